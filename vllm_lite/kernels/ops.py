"""The small operations between matrix products: their definitions in plain torch, the reference of all implementations.

`select.ops_for(device)` returns the fastest implementation of a device. All write into preallocated outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import gelu, layer_norm, relu, silu

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.routing import Chosen, Routing, choose


class Rotation(NamedTuple):
    """Rotary embedding of a step's tokens in the NeoX order: element i turns with element i + head_size / 2.

    Both [num_tokens, head_size], in the model's dtype; the first half of sin is negated.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class HeadNormWeights(NamedTuple):
    """RMSNorms over each head of Q and of K, as `Ops.rms_norm` computes them."""

    query: torch.Tensor  # [head_size]
    key: torch.Tensor  # [head_size]
    eps: float


class WideNormWeights(NamedTuple):
    """A norm that is computed completely in float32."""

    weight: torch.Tensor  # float32 [size]; not centered also [inner, size], for x: [num_tokens, inner, size]
    bias: torch.Tensor | None  # float32, as weight
    eps: float
    centered: bool


class Ops(Protocol):
    """The operations. Rows may be strided; the elements of a row are contiguous. An output may be the same tensor as an
    input of the same shape."""

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
        """Rotate heads, [num_tokens, num_heads, head_size], in place."""
        ...

    def rotate_into(self, heads: torch.Tensor, rotation: Rotation, out: torch.Tensor) -> None:
        """Rotate heads into `out`, of the same shape."""
        ...

    def wide_norm(self, x: torch.Tensor, norm: WideNormWeights, out: torch.Tensor) -> None:
        """out = norm of x over the last axis, computed in float32 and rounded once at the end; x, out: [..., size].

        Centered it is LayerNorm, (x - mean) / sqrt(variance + eps) * weight + bias; else x / sqrt(mean(x^2) + eps) *
        weight + bias.
        """
        ...

    def add_wide_norm(self, residual: torch.Tensor, x: torch.Tensor, norm: WideNormWeights, out: torch.Tensor) -> None:
        """residual += x, rounded; out = wide_norm(residual); all [num_tokens, size]."""
        ...

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual += x; both [num_tokens, size]."""
        ...

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x; both [num_tokens, size]."""
        ...

    def take_rows(self, x: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        """out = x[ids]. x: [num_tokens, ...], ids: int64 [k], contiguous, out: [k, ...], which may overlap x."""
        ...

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """x *= factor, in float32 and rounded; x: [num_tokens, size]."""
        ...

    def clamp(self, x: torch.Tensor, limit: float) -> None:
        """Clamp x to -limit to limit, which is rounded to x's type; x: [num_tokens, size]."""
        ...

    def scale_rows(self, heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
        """heads[i] *= table[positions[i]], in float32 and rounded; heads: [num_tokens, num_heads, head_size], table:
        float32 [max_position], positions: int64 [num_tokens], all of which are in the table."""
        ...

    def add_rows(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
        """x[i] += table[positions[i]]; x: [num_tokens, size], table: [max_position, size] in x's dtype, positions:
        int64 [num_tokens], all of which are in the table."""
        ...

    def activate(self, kind: Activation, x: torch.Tensor) -> None:
        """x = activation(x), in float32 and rounded; x: [num_tokens, size]."""
        ...

    def activate_and_mul(self, kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out = activation(gate) * up. The activation is rounded before the product; "swiglu_oai" is rounded once.
        gate_up: [num_tokens, 2 * size], out: [num_tokens, size]. May overwrite the gate."""
        ...

    def scale_and_cap(self, logits: torch.Tensor, factor: float, cap: float) -> None:
        """logits *= factor, then, unless cap is 0, logits = cap * tanh(logits / cap); float32 [num_rows, size]."""
        ...

    def route(self, logits: torch.Tensor, routing: Routing, chosen: Chosen) -> None:
        """Fill `chosen` with the experts of each token; logits: float32 [num_tokens, num_experts]. See RoutingSpec."""
        ...

    def add_gated(self, residual: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
        """residual += sigmoid(gates) * x, in float32 and rounded once; residual, x: [num_tokens, size], gates: float32
        [num_tokens, 1]."""
        ...

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> None:
        """x *= sigmoid(gate), in float32 and rounded once; both [num_tokens, size]."""
        ...

    def gate_heads(self, heads: torch.Tensor, gate: torch.Tensor) -> None:
        """heads *= sigmoid(gate), as `sigmoid_gate`; heads: [num_tokens, num_heads, head_size], gate: [num_tokens,
        num_heads]."""
        ...

    def xielu(self, x: torch.Tensor, factors: torch.Tensor) -> None:
        """x = xIELU(x), in float32 and rounded once; x: [num_tokens, size], factors: float32 [4], contiguous: a, c,
        beta and eps (Huang and Schlag 2024). Above 0 it is a x^2 + beta x, elsewhere c (exp(min(x, eps)) - 1 - x) +
        beta x."""
        ...


class TorchOps:
    """The operations in plain torch, on any device and in any dtype."""

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

    def rotate_into(self, heads: torch.Tensor, rotation: Rotation, out: torch.Tensor) -> None:
        self.rotate(out.copy_(heads), rotation)

    def wide_norm(self, x: torch.Tensor, norm: WideNormWeights, out: torch.Tensor) -> None:
        wide = x.float()
        if norm.centered:
            out.copy_(layer_norm(wide, wide.shape[-1:], norm.weight, norm.bias, norm.eps))
            return
        normed = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt_() * norm.weight
        out.copy_(normed if norm.bias is None else normed + norm.bias)

    def add_wide_norm(self, residual: torch.Tensor, x: torch.Tensor, norm: WideNormWeights, out: torch.Tensor) -> None:
        residual.add_(x)
        self.wide_norm(residual, norm, out)

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual.add_(x)

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    def take_rows(self, x: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x[ids])

    def scale(self, x: torch.Tensor, factor: float) -> None:
        x.mul_(factor)

    def clamp(self, x: torch.Tensor, limit: float) -> None:
        x.clamp_(-limit, limit)

    def scale_rows(self, heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
        heads.copy_(heads * table.index_select(0, positions)[:, None, None])

    def add_rows(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
        x.add_(table.index_select(0, positions))

    def activate(self, kind: Activation, x: torch.Tensor) -> None:
        x.copy_(_ACTIVATIONS[kind](x))

    def activate_and_mul(self, kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        if kind == "swiglu_oai":
            out.copy_(swiglu_oai(gate, up))
        else:
            torch.mul(_ACTIVATIONS[kind](gate), up, out=out)

    def scale_and_cap(self, logits: torch.Tensor, factor: float, cap: float) -> None:
        logits.mul_(factor)
        if cap:
            logits.div_(cap).tanh_().mul_(cap)

    def route(self, logits: torch.Tensor, routing: Routing, chosen: Chosen) -> None:
        choose(logits, routing, chosen)

    def add_gated(self, residual: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
        residual.copy_(residual.float() + gates.sigmoid() * x.float())

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> None:
        x.copy_(x.float() * gate.float().sigmoid())

    def gate_heads(self, heads: torch.Tensor, gate: torch.Tensor) -> None:
        self.sigmoid_gate(heads, gate[..., None])

    def xielu(self, x: torch.Tensor, factors: torch.Tensor) -> None:
        above, below, beta, eps = factors
        wide = x.float()
        curved = torch.where(wide > 0, above * wide * wide, below * (torch.expm1(torch.minimum(wide, eps)) - wide))
        x.copy_(curved.add_(beta * wide))


SWIGLU_SLOPE, SWIGLU_LIMIT = 1.702, 7.0


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation, float32; see Activation."""
    gate, up = gate.float().clamp(max=SWIGLU_LIMIT), up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * (SWIGLU_SLOPE * gate).sigmoid())


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
}
