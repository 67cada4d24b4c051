"""Mamba-2 layers in plain torch: the reference of the native kernel, and what a GPU runs.

For each head, with dt = softplus(dt + dt_bias) within limits, a token changes the state S [state_size, head_size] and
reads it:

    S = exp(-decay dt) S + b (dt x)^T        y = S^T c + skip x

Before that a short convolution and SiLU go over x, b and c; behind it y is multiplied by SiLU(z).
"""

from typing import NamedTuple

import torch
from torch.nn.functional import conv1d, silu, softplus

from vllm_lite.checkpoint.mamba import MambaSpec
from vllm_lite.kernels.delta_rule import CHUNK, Segments


class MambaWeights(NamedTuple):
    """What a layer has beside its projections and its norm, all float32."""

    conv: torch.Tensor  # [conv_size, conv_channels]
    conv_bias: torch.Tensor  # [conv_channels]
    decay: torch.Tensor  # [num_heads], exp(A_log)
    dt_bias: torch.Tensor  # [num_heads]
    skip: torch.Tensor  # [num_heads], D


class Projected(NamedTuple):
    """A token's projections, side by side in one row."""

    z: torch.Tensor  # [n, value_width]
    mixed: torch.Tensor  # [n, conv_channels], x, b and c
    dt: torch.Tensor  # [n, num_heads]


def split_projected(projected: torch.Tensor, spec: MambaSpec) -> Projected:
    """The parts of `projected`: [n, projected_size]."""
    mixed = spec.value_width
    dt = mixed + spec.conv_channels
    return Projected(projected[:, :mixed], projected[:, mixed:dt], projected[:, dt : spec.projected_size])


def split_state(states: torch.Tensor, spec: MambaSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's part of the slots, float32 [num_slots, state_elements], as what the convolution keeps [num_slots,
    conv_size - 1, conv_channels] and the matrices [num_slots, num_heads, state_size, head_size]."""
    size = spec.conv_shape[0] * spec.conv_shape[1]
    return states[:, :size].unflatten(1, spec.conv_shape), states[:, size:].unflatten(1, spec.matrix_shape)


class MambaOp:
    """Computes on any device, segment after segment."""

    def __init__(self, spec: MambaSpec) -> None:
        self.spec = spec

    def forward(
        self,
        projected: torch.Tensor,  # [n, projected_size]
        weights: MambaWeights,
        states: torch.Tensor,  # float32 [num_slots, state_elements]
        segments: Segments,
        mixed: torch.Tensor,  # float32 [n, conv_channels], scratch memory
        out: torch.Tensor,  # [n, value_width]
    ) -> None:
        """Write what each token gets, before the norm, and change the states."""
        parts = split_projected(projected, self.spec)
        kept, matrices = split_state(states, self.spec)
        rows, sources, targets = (each.tolist() for each in segments[1:])
        for first, last, source, target in zip(rows, rows[1:], sources, targets, strict=False):
            if first == last:
                states[target] = states[source]
                continue
            own = Projected(*(part[first:last].float() for part in parts))
            before = kept[source] if source else torch.zeros_like(kept[0])
            state = matrices[source] if source else torch.zeros_like(matrices[0])
            inputs = torch.cat((before, own.mixed))
            mixed[first:last] = _convolve(inputs, weights)
            read, state = self._scan(mixed[first:last], own.dt, weights, state)
            out[first:last] = read.flatten(1) * silu(own.z)
            if target:
                kept[target], matrices[target] = inputs[len(own.mixed) :], state

    def _scan(
        self, mixed: torch.Tensor, dt: torch.Tensor, weights: MambaWeights, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [n, num_heads, head_size], and the state behind it
        """CHUNK tokens at a time."""
        spec, outs = self.spec, []
        x, b, c = mixed.split((spec.value_width, spec.state_size, spec.state_size), dim=1)
        x = x.unflatten(1, (spec.num_heads, spec.head_size))
        step = softplus(dt + weights.dt_bias).clamp(*spec.step_limits)  # [n, num_heads]
        for own, added, written, read, log_decay in zip(
            *(part.split(CHUNK) for part in (x, x * step[..., None], b, c, -weights.decay * step)), strict=True
        ):
            total, n = log_decay.T.cumsum(1), len(own)  # [num_heads, n]
            later = torch.ones(n, n, device=x.device).triu(1).bool()
            between = (total[:, :, None] - total[:, None]).masked_fill(later, -1e30).exp()  # from token j to i
            values = added.transpose(0, 1)  # [num_heads, n, head_size]
            within = ((read @ written.T) * between) @ values
            before = total.exp()[..., None] * (read @ state)
            outs.append((within + before).transpose(0, 1) + weights.skip[:, None] * own)
            left = (total[:, -1:] - total).exp()[..., None]
            state = state * total[:, -1:].exp()[..., None] + written.T @ (values * left)
        return torch.cat(outs), state


def _convolve(inputs: torch.Tensor, weights: MambaWeights) -> torch.Tensor:
    """SiLU of a causal convolution of each channel: [conv_size - 1 + n, channels] -> [n, channels]."""
    weight = weights.conv.T[:, None].contiguous()
    return silu(conv1d(inputs.T[None], weight, weights.conv_bias, groups=len(weight))[0].T)


def mamba_op(spec: MambaSpec, device: torch.device, dtype: torch.dtype) -> MambaOp:
    """The fastest implementation that a device has."""
    from vllm_lite.kernels.cpu import available

    if device.type == "cpu" and available():
        from vllm_lite.kernels.cpu.mamba import NativeMamba

        if NativeMamba.supports(spec, dtype):
            return NativeMamba(spec)
    return MambaOp(spec)
