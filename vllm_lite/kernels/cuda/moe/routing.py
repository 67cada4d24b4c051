"""Routing of tokens to experts on a GPU. Kernel: csrc/cuda/routing.cuh; the reference is kernels/routing.py."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_lite.kernels.cuda.launcher import Launcher, require
from vllm_lite.kernels.routing import Chosen, Routing

if TYPE_CHECKING:  # it needs msgspec, which machines for kernel measurements may lack
    from vllm_lite.checkpoint.layer_specs.experts import RoutingSpec

SOURCE = "routing.cuh"
MAX_EXPERTS = 2048
"""Maximum number of experts, whose scores, in three arrays, fit into the default shared memory."""


def route(launcher: Launcher, logits: torch.Tensor, routing: Routing, chosen: Chosen) -> None:
    """As Ops.route. All ids written are valid and a token's ids differ, whatever the logits are. Raises ValueError for
    unsupported shapes, types or numbers."""
    spec, bias, factors = routing
    num_tokens, top = len(logits), spec.experts_per_token
    check_spec(spec)
    require(
        logits.dtype == torch.float32 and logits.shape == (num_tokens, spec.num_experts) and logits.stride(1) == 1,
        f"logits must be float32 [num_tokens, {spec.num_experts}] with contiguous rows, got {logits.dtype} "
        f"{list(logits.shape)}, strides {list(logits.stride())}",
    )
    check_chosen(chosen, num_tokens, top)
    for what, each in (("the bias of a choice", bias), ("the factors of experts", factors)):
        require(
            each is None
            or (each.dtype == torch.float32 and each.shape == (spec.num_experts,) and each.is_contiguous()),
            f"{what} must be a contiguous float32 [{spec.num_experts}]",
        )
    if num_tokens == 0:
        return
    sizes = (spec.num_experts, top, spec.num_groups, spec.groups_per_token)
    rules = (spec.scoring == "sigmoid", spec.group_score == "top two", spec.renormalize)
    launcher.kernel(SOURCE, "route")(
        (num_tokens, 1, 1),
        (32, 1, 1),
        (
            *(logits, bias, factors, *chosen, np.int64(logits.stride(0))),
            *map(np.int32, (*sizes, *rules)),
            *map(np.float32, (spec.epsilon, spec.scale)),
        ),
        4 * (3 * spec.num_experts + spec.num_groups),
    )


def check_spec(spec: "RoutingSpec") -> None:
    """Raise ValueError for numbers with which the kernel would access memory out of bounds."""
    experts, top, groups = spec.num_experts, spec.experts_per_token, spec.num_groups
    require(0 < experts <= MAX_EXPERTS, f"a layer has {experts} experts; the kernel takes 1 to {MAX_EXPERTS}")
    require(0 < top <= experts, f"a token cannot choose {top} of {experts} experts")
    require(groups > 0 and experts % groups == 0, f"{experts} experts do not make {groups} groups of one size")
    require(0 < spec.groups_per_token <= groups, f"a token cannot choose {spec.groups_per_token} of {groups} groups")
    require(
        groups == 1 or spec.group_score == "max" or experts // groups > 1,
        f"a group of one expert has no two scores ({experts} experts in {groups} groups)",
    )


def check_chosen(chosen: Chosen, num_tokens: int, top: int) -> None:
    """Raise ValueError unless `chosen` has the shapes and types of `Ops.route` for `num_tokens`."""
    for what, tensor, dtype in (("ids", chosen.experts, torch.int32), ("weights", chosen.weights, torch.float32)):
        require(
            tensor.dtype == dtype and tensor.shape == (num_tokens, top) and tensor.is_contiguous(),
            f"chosen {what} must be a contiguous {dtype} {[num_tokens, top]}, got {tensor.dtype} "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}",
        )
