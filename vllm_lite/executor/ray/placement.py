"""Resources of one rank in a Ray cluster, the placement of all ranks, and a message for missing ones. No ray import."""

from collections.abc import Mapping, Sequence
from typing import Literal

from vllm_lite.config import ResolvedConfig

Resources = Mapping[str, float]
Strategy = Literal["STRICT_PACK", "SPREAD"]


def bundle_of(config: ResolvedConfig) -> dict[str, float]:
    """Resources of one rank: one GPU, or as many CPUs as it has threads."""
    if config.device == "cuda":
        return {"GPU": 1.0}
    return {"CPU": float(config.cpu_threads or 1)}


def strategy(bundle: Resources, num_ranks: int, nodes: Sequence[Resources]) -> Strategy:
    """Placement strategy: one node for all ranks if any node is large enough, whatever runs there; else several."""
    fits = any(all(node.get(name, 0.0) >= num_ranks * amount for name, amount in bundle.items()) for node in nodes)
    return "STRICT_PACK" if fits else "SPREAD"


def missing(bundle: Resources, num_ranks: int, free: Resources, total: Resources) -> str:
    """Message naming the resources for which the ranks wait."""
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    there = ", ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name} are free" for name in bundle)
    return f"{num_ranks} times {wanted} are wanted; in the whole cluster {there}"
