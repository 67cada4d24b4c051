"""Recurrent layers with the gated delta rule, in plain torch: the reference of the native and GPU kernels.

For each value head, with q and k of length 1 (q also divided by the root of its size), g = exp(-decay * softplus(a +
dt_bias)) and beta = sigmoid(b), a token changes the state S [key_size, value_size] and reads it:

    S = g S + k (beta (v - (g S)^T k))^T        o = S^T q

Before that, q, k and v pass a short convolution over the sequence and SiLU; afterwards o is normalized and multiplied
by SiLU(z). `step_rule` computes this formula token by token; `chunk_rule` solves a chunk of tokens at once (Yang et al.
2024), for long segments.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import silu, softplus

from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.kernels.recurrent import CHUNK, SegmentedOp

EPS = 1e-6
"""Added to the squared length of q and k."""


class DeltaNetWeights(NamedTuple):
    """Weights of a layer without its projections, all float32."""

    conv: torch.Tensor  # [conv_size, conv_channels]
    decay: torch.Tensor  # [num_value_heads], exp(A_log)
    dt_bias: torch.Tensor  # [num_value_heads]
    norm: torch.Tensor  # [value_size]
    eps: float

    @property
    def conv_bias(self) -> None:
        """None: the convolution has no bias."""
        return


class Projected(NamedTuple):
    """A token's projections, which are parts of one row."""

    mixed: torch.Tensor  # [n, conv_channels], q, k and v
    z: torch.Tensor  # [n, value_width]
    b: torch.Tensor  # [n, num_value_heads]
    a: torch.Tensor  # [n, num_value_heads]


class DeltaNetOp(SegmentedOp[DeltaNetSpec, Projected, DeltaNetWeights]):
    """Computes on any device, segment by segment."""

    def split_projected(self, projected: torch.Tensor) -> Projected:
        """Split `projected`, [n, projected_size], into its parts."""
        spec = self.spec
        z = spec.conv_channels
        b = z + spec.value_width
        a = b + spec.num_value_heads
        return Projected(projected[:, :z], projected[:, z:b], projected[:, b:a], projected[:, a:])

    def scan(
        self, own: Projected, weights: DeltaNetWeights, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [n, value_width], and the state after it
        spec = self.spec
        query, key, value = own.mixed.split((spec.key_width, spec.key_width, spec.value_width), dim=1)
        shared = spec.num_value_heads // spec.num_key_heads
        heads = [
            _unit(part.unflatten(1, (-1, spec.key_size))).repeat_interleave(shared, dim=1) for part in (query, key)
        ]
        log_decay = -weights.decay * softplus(own.a + weights.dt_bias)
        inputs = RuleInputs(
            heads[0] * spec.key_size**-0.5,
            heads[1],
            value.unflatten(1, (-1, spec.value_size)),
            log_decay,
            own.b.sigmoid(),
        )
        read, state = step_rule(inputs, state) if len(value) < CHUNK // 4 else chunk_rule(inputs, state)
        return self._gated_norm(read, own.z, weights).flatten(1), state

    def _gated_norm(self, x: torch.Tensor, z: torch.Tensor, weights: DeltaNetWeights) -> torch.Tensor:
        normed = x * (x.square().mean(-1, keepdim=True) + weights.eps).rsqrt() * weights.norm
        return normed * silu(z.unflatten(1, (-1, self.spec.value_size)))


class RuleInputs(NamedTuple):
    """Inputs of the rule for each token and head; float32."""

    query: torch.Tensor  # [n, num_heads, key_size]
    key: torch.Tensor  # [n, num_heads, key_size]
    value: torch.Tensor  # [n, num_heads, value_size]
    log_decay: torch.Tensor  # [n, num_heads]
    beta: torch.Tensor  # [n, num_heads]


def step_rule(inputs: RuleInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute token by token; state: [num_heads, key_size, value_size]."""
    outs = []
    for query, key, value, log_decay, beta in zip(*inputs, strict=True):
        state = state * log_decay.exp()[:, None, None]
        known = (key[:, None] @ state)[:, 0]
        state = state + key[:, :, None] * ((value - known) * beta[:, None])[:, None]
        outs.append((query[:, None] @ state)[:, 0])
    return torch.stack(outs), state


def chunk_rule(inputs: RuleInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute CHUNK tokens at a time: within a chunk, the corrections are the solution of a triangular system."""
    outs = []
    for query, key, value, log_decay, beta in zip(*(part.split(CHUNK) for part in inputs), strict=True):
        q, k, v = (part.transpose(0, 1) for part in (query, key, value))  # [num_heads, n, ...]
        total, weight = log_decay.T.cumsum(1), beta.T[..., None]
        n = len(query)
        between = (total[:, :, None] - total[:, None]).masked_fill(torch.ones(n, n).triu(1).bool().to(q.device), -1e30)
        between = between.exp()  # [num_heads, n, n], the decay from token j to token i
        grown = total.exp()[..., None]
        system = (weight * k @ k.mT) * between
        wanted = weight * (v - grown * (k @ state))
        change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outs.append((grown * (q @ state) + ((q @ k.mT) * between) @ change).transpose(0, 1))
        left = (total[:, -1:] - total).exp()[..., None]
        state = state * grown[:, -1:] + (k * left).mT @ change
    return torch.cat(outs), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
