"""Common keys of families with experts: routing, and the layers that have experts."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec, RoutingSpec
from vllm_lite.checkpoint.model_spec import LayerSpec
from vllm_lite.errors import ModelError

NumExperts = Annotated[int, Meta(ge=1, le=16384)]
"""Number of experts in a layer, bounded as each becomes an object."""
Index = Annotated[int, Meta(ge=0)]


def routing_of(num_experts: int, experts_per_token: int, **own: Any) -> RoutingSpec:
    """Make a RoutingSpec; `own`: its further fields. Raises ModelError if the numbers contradict each other."""
    routing = RoutingSpec(num_experts, experts_per_token, **own)
    if not 1 <= experts_per_token <= num_experts:
        limits = "at least one" if experts_per_token < 1 else "at most all"
        raise ModelError(f"a token cannot go to {experts_per_token} experts of {num_experts}; it must be {limits}")
    size, remainder = divmod(num_experts, routing.num_groups)
    if remainder:
        raise ModelError(f"{num_experts} experts cannot be in {routing.num_groups} groups of one size")
    if routing.groups_per_token > routing.num_groups:
        raise ModelError(
            f"a token cannot choose from {routing.groups_per_token} groups of {routing.num_groups}; it must be at most "
            "all"
        )
    if experts_per_token > size * routing.groups_per_token:
        raise ModelError(
            f"a token cannot go to {experts_per_token} experts of the {size * routing.groups_per_token} that are in "
            f"{routing.groups_per_token} of {routing.num_groups} groups"
        )
    if routing.num_groups > 1 and routing.group_score == "top two" and size < 2:
        raise ModelError(f"{num_experts} experts in {routing.num_groups} groups have no two that could score a group")
    return routing


V3_ROUTING: dict[str, Any] = {"scoring": "sigmoid", "choice_bias": True, "group_score": "top two", "epsilon": 1e-20}
"""Fields of DeepSeek-V3's routing that config.json does not give."""


def grouped_routing_of(raw: Any, **own: Any) -> RoutingSpec:
    """As `routing_of`, for a config with DeepSeek's keys."""
    return routing_of(
        raw.n_routed_experts,
        raw.num_experts_per_tok,
        renormalize=raw.norm_topk_prob,
        scale=raw.routed_scaling_factor,
        num_groups=raw.n_group or 1,
        groups_per_token=raw.topk_group or 1,
        **own,
    )


def at_intervals(step: int, dense: Sequence[int] | None) -> Callable[[int], bool]:
    """For `with_experts`: every `step`-th layer, except for those in `dense`."""
    return lambda index: index not in (dense or ()) and (index + 1) % step == 0


def with_experts(
    layers: tuple[LayerSpec, ...], experts: ExpertsSpec, sparse: Callable[[int], bool] = lambda _: True
) -> tuple[LayerSpec, ...]:
    """Add `experts` to the layers for whose index `sparse` is true."""
    made = enumerate(layers)
    return tuple(msgspec.structs.replace(own, experts=experts) if sparse(index) else own for index, own in made)
