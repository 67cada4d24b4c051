"""RMSNorm, alone or after adding to the residual stream."""

import torch

from vllm_lite.kernels.ops import ops_for


class RMSNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last axis, rounded as `Ops.rms_norm` says."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self.ops = ops_for(device)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x, out: [..., size]; `out` may be `x`."""
        self.ops.rms_norm(x, self.weight, self.eps, out)

    def add_forward(self, residual: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """residual += x, out = norm(residual); all [num_tokens, size], and `out` may be `x`."""
        self.ops.add_rms_norm(residual, x, self.weight, self.eps, out)
