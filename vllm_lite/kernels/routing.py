"""Choice of each token's experts in plain torch: the reference of all other implementations of `Ops.route`."""

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:  # it needs msgspec, but kernels are also tested on machines that have only torch
    from vllm_lite.checkpoint.layer_specs.experts import RoutingSpec


class Routing(NamedTuple):
    """Routing of one layer's tokens."""

    spec: "RoutingSpec"
    bias: torch.Tensor | None
    """float32 [num_experts], if `spec` has a choice_bias."""
    factors: torch.Tensor | None = None
    """float32 [num_experts], if `spec` has expert_factors."""


class Chosen(NamedTuple):
    """The experts of each token, the best first, and the factors of their outputs."""

    experts: torch.Tensor  # int32 [num_tokens, experts_per_token]
    weights: torch.Tensor  # float32 [num_tokens, experts_per_token]


def choose(logits: torch.Tensor, routing: Routing, chosen: Chosen) -> None:
    """Route as Ops.route does. Of equal scores, the expert, or group, with the lower number wins."""
    spec, bias, factors = routing
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        by_group = ranked.unflatten(-1, (spec.num_groups, -1))
        of_group = by_group.amax(-1) if spec.group_score == "max" else by_group.topk(2, dim=-1).values.sum(-1)
        left_out = torch.ones_like(of_group, dtype=torch.bool).scatter(
            -1, _first(of_group, spec.groups_per_token), False
        )
        ranked = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
    experts = _first(ranked, spec.experts_per_token)
    weights = scores.gather(-1, experts)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.epsilon)
    if factors is not None:
        weights = weights * factors[experts]
    chosen.experts.copy_(experts)
    chosen.weights.copy_(weights * spec.scale)


def _first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest scores of each row; of equal ones the first, where torch.topk may take any."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
