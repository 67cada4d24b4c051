"""The norms of a model, plain or fused with the addition to the residual stream."""

from typing import Protocol

import torch

from vllm_lite.checkpoint.model_spec import NormSpec
from vllm_lite.kernels.ops import WideNormWeights
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot


class Norm(Protocol):
    """A norm over the last axis."""

    def group(self, name: str, order: tuple[int, ...] | None = None) -> WeightGroup:
        """Request the checkpoint tensors `<name>.weight` and, if there is one, `<name>.bias`, permuted to `order`."""
        ...

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x, out: [..., size]; `out` may be `x`."""
        ...

    def add_forward(self, residual: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """residual += x, out = norm(residual); all [num_tokens, size], and `out` may be `x`."""
        ...


class RMSNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight, rounded as `Ops.rms_norm` says."""

    weight: torch.Tensor  # [size], by `load`

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        self.eps = eps
        self.dtype = dtype
        self.device = device
        self.ops = ops_for(device)

    def load(self, weight: torch.Tensor) -> None:
        """Keep `weight`: [size]."""
        self.weight = weight

    def group(self, name: str, order: tuple[int, ...] | None = None) -> WeightGroup:
        slot = whole_slot(f"{name}.weight", self.size, order=order)
        return WeightGroup((WeightStack((slot,), self.dtype, self.device),), self.load)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.ops.rms_norm(x, self.weight, self.eps, out)

    def add_forward(self, residual: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        self.ops.add_rms_norm(residual, x, self.weight, self.eps, out)


class WideNorm:
    """LayerNorm, or an RMSNorm that is computed in float32 to its end: `Ops.wide_norm`. Its weights are float32."""

    weights: WideNormWeights  # by `load`

    def __init__(self, size: int, spec: NormSpec, *, device: torch.device) -> None:
        self.size = size
        self.spec = spec
        self.device = device
        self.ops = ops_for(device)

    def load(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Keep `weight` and `bias`: [size]."""
        weight = weight + 1 if self.spec.plus_one else weight
        self.weights = WideNormWeights(weight, bias, self.spec.eps, self.spec.kind == "layer")

    def group(self, name: str, order: tuple[int, ...] | None = None) -> WeightGroup:
        kinds = ("weight", "bias") if self.spec.bias else ("weight",)
        slots = (whole_slot(f"{name}.{kind}", self.size, order=order) for kind in kinds)
        return WeightGroup(tuple(WeightStack((slot,), torch.float32, self.device) for slot in slots), self.load)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.ops.wide_norm(x, self.weights, out)

    def add_forward(self, residual: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        self.ops.add_wide_norm(residual, x, self.weights, out)
