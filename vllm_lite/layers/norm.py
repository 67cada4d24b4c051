"""RMSNorm, alone or after adding to the residual stream."""

import torch


class RMSNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Rounding is that of transformers: the quotient is computed in float32 and rounded to the model's dtype, and only
    then multiplied by the weight.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = torch.tensor(eps, dtype=torch.float32, device=device)
        self.inverse_size = 1.0 / size

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x, out: [..., size]; `out` may be `x`."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps, length, length, value=self.inverse_size).rsqrt_()
        torch.mul(x, scale, out=out)
        out.mul_(self.weight)

    def add_forward(self, residual: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """residual += x, out = norm(residual); all [num_tokens, size], and `out` may be `x`."""
        residual.add_(x)
        self.forward(residual, out)
