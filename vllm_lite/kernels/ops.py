"""The small operations between matrix products: what each computes, in plain torch, the reference of all others.

`ops_for(device)` gives the fastest implementation that a device has. All write into preallocated outputs.
"""

from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import gelu, silu

from vllm_lite.kernels import cpu


class Rotation(NamedTuple):
    """Rotary embedding of a step's tokens in the NeoX order: element i turns with element i + head_size / 2.

    Both [num_tokens, head_size], in the model's dtype; the first half of sin is negated.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class Ops(Protocol):
    """Rows may be strided; the elements of a row are contiguous. An output may be the input of the same shape."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight over the last axis; x, out: [..., size], weight: [size].

        Rounding is that of transformers: the quotient is computed in float32 and rounded to the dtype of x, and only
        then multiplied by the weight.
        """
        ...

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """residual += x, rounded; out = rms_norm(residual); all [num_tokens, size]."""
        ...

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> None:
        """heads: [num_tokens, num_heads, head_size], turned in place."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(gate) * up; gate_up: [num_tokens, 2 * size], out: [num_tokens, size]. May overwrite the gate."""
        ...

    def gelu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """The same with gelu, tanh approximation."""
        ...


class TorchOps:
    """Computes on any device, in any dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = (length * length / x.shape[-1] + eps).rsqrt_()
        torch.mul(x, scale, out=out)
        out.mul_(weight)

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        residual.add_(x)
        self.rms_norm(residual, weight, eps, out)

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> None:
        half = heads.shape[-1] // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
        heads.mul_(rotation.cos[:, None]).addcmul_(swapped, rotation.sin[:, None])

    def silu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(silu(gate, inplace=True), up, out=out)

    def gelu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(gelu(gate, approximate="tanh"), up, out=out)


def ops_for(device: torch.device) -> Ops:
    """Make the best implementation for `device`."""
    if device.type == "cpu" and cpu.available():
        from vllm_lite.kernels.cpu.fused import CpuOps  # which is built on this module

        return CpuOps()
    if device.type == "cuda":
        from vllm_lite.kernels.cuda.cupy_launcher import default_launcher
        from vllm_lite.kernels.cuda.fused import CudaOps  # which is built on this module

        if (launcher := default_launcher()) is not None:
            return CudaOps(launcher)
    return TorchOps()
