"""Native choice of each token's experts. Kernel: csrc/cpu/routing.cpp; kernels/routing.py is the reference."""

import ctypes

import torch

from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer
from vllm_lite.kernels.routing import Chosen, Routing

_TYPES = (pointer, pointer, int64, pointer, pointer, int64)


class _Record(ctypes.Structure):
    """The same record as `RoutingRules` in csrc/cpu/routing.cpp."""

    _fields_ = (
        ("bias", pointer),
        ("factors", pointer),
        ("num_experts", int64),
        ("top", int64),
        ("num_groups", int64),
        ("groups_per_token", int64),
        ("epsilon", float32),
        ("scale", float32),
        ("sigmoid", int32),
        ("renormalize", int32),
        ("two_of_group", int32),
        ("unused", int32),
    )


class NativeRouter:
    """The routing rules of one layer, as a record for the kernel. It keeps the bias and the factors alive."""

    def __init__(self, routing: Routing) -> None:
        spec, self.bias, self.factors = routing
        self._num_experts, self._top = spec.num_experts, spec.experts_per_token
        self._record = _Record(
            *(None if each is None else each.data_ptr() for each in (self.bias, self.factors)),
            spec.num_experts,
            spec.experts_per_token,
            spec.num_groups,
            spec.groups_per_token,
            spec.epsilon,
            spec.scale,
            spec.scoring == "sigmoid",
            spec.renormalize,
            spec.group_score == "top two",
            0,
        )

    def route(self, logits: torch.Tensor, chosen: Chosen) -> bool:
        """Route as Ops.route does. Returns False and does nothing if the kernel does not support the tensors."""
        shape = (len(logits), self._top)
        wanted = logits.dtype == torch.float32 and logits.shape[1] == self._num_experts and logits.stride(1) == 1
        choices = chosen.experts.dtype == torch.int32 and chosen.weights.dtype == torch.float32
        contiguous = chosen.experts.is_contiguous() and chosen.weights.is_contiguous()
        if not (wanted and choices and contiguous and chosen.experts.shape == chosen.weights.shape == shape):
            return False
        function("vllm_lite_route", _TYPES)(
            ctypes.addressof(self._record),
            logits.data_ptr(),
            logits.stride(0),
            chosen.experts.data_ptr(),
            chosen.weights.data_ptr(),
            len(logits),
        )
        return True
