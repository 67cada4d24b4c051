"""Resources of the cluster for one rank, and for all ranks on one node, with a sentence on missing ones. No ray."""

from collections.abc import Mapping, Sequence
from typing import Literal

from vllm_lite.config import ResolvedConfig

Resources = Mapping[str, float]
Strategy = Literal["STRICT_PACK", "SPREAD"]


def bundle_of(config: ResolvedConfig) -> dict[str, float]:
    """Resources of one rank: a GPU, or as many CPUs as it has threads."""
    if config.device == "cuda":
        return {"GPU": 1.0}
    return {"CPU": float(config.cpu_threads or 1)}


def strategy(bundle: Resources, num_ranks: int, nodes: Sequence[Resources]) -> Strategy:
    """All ranks are put on one node if there is one that is large enough, whatever runs there now; else on several."""
    fits = any(all(node.get(name, 0.0) >= num_ranks * amount for name, amount in bundle.items()) for node in nodes)
    return "STRICT_PACK" if fits else "SPREAD"


def missing(bundle: Resources, num_ranks: int, free: Resources, total: Resources) -> str:
    """Name what the ranks wait for."""
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    there = ", ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name} are free" for name in bundle)
    return f"{num_ranks} times {wanted} are wanted; in the whole cluster {there}"
