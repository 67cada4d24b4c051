"""RMSNorm, alone or after adding to the residual stream."""

import torch

from vllm_lite.kernels.ops import ops_for
from vllm_lite.layers.weight_slot import WeightGroup, WeightStack, whole_slot


class RMSNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last axis, rounded as `Ops.rms_norm` says."""

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

    def group(self, name: str) -> WeightGroup:
        """Ask for the checkpoint tensor `<name>.weight`."""
        slot = whole_slot(f"{name}.weight", self.size)
        return WeightGroup((WeightStack((slot,), self.dtype, self.device),), self.load)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x, out: [..., size]; `out` may be `x`."""
        self.ops.rms_norm(x, self.weight, self.eps, out)

    def add_forward(self, residual: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """residual += x, out = norm(residual); all [num_tokens, size], and `out` may be `x`."""
        self.ops.add_rms_norm(residual, x, self.weight, self.eps, out)
