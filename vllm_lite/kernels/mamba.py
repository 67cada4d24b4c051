"""Mamba-2 layers in plain torch: the reference of the native and GPU kernels.

For each head, with dt = softplus(dt + dt_bias) within limits, a token changes the state S [state_size, head_size] and
reads it:

    S = exp(-decay dt) S + b (dt x)^T        y = S^T c + skip x

The heads of a group share b and c. Before that, x, b and c pass a short convolution and SiLU; afterwards y is
multiplied by SiLU(z).
"""

from typing import NamedTuple

import torch
from torch.nn.functional import silu, softplus

from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.kernels.recurrent import CHUNK, SegmentedOp


class MambaWeights(NamedTuple):
    """Weights of a layer without its projections and its norm, all float32."""

    conv: torch.Tensor  # [conv_size, conv_channels]
    conv_bias: torch.Tensor  # [conv_channels]
    decay: torch.Tensor  # [num_heads], exp(A_log)
    dt_bias: torch.Tensor  # [num_heads]
    skip: torch.Tensor  # [num_heads], D


class MambaInputs(NamedTuple):
    """A token's projections, which are parts of one row."""

    z: torch.Tensor  # [n, value_width]
    mixed: torch.Tensor  # [n, conv_channels], x, b and c
    dt: torch.Tensor  # [n, num_heads]


class MambaOp(SegmentedOp[MambaSpec, MambaInputs, MambaWeights]):
    """Computes on any device, segment by segment."""

    def split_projected(self, projected: torch.Tensor) -> MambaInputs:
        """Split `projected`, [n, projected_size], into its parts."""
        mixed = self.spec.value_width
        dt = mixed + self.spec.conv_channels
        return MambaInputs(projected[:, :mixed], projected[:, mixed:dt], projected[:, dt : self.spec.projected_size])

    def scan(
        self, own: MambaInputs, weights: MambaWeights, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [n, value_width], and the state after it
        """Compute CHUNK tokens at a time."""
        spec, outs = self.spec, []
        shared, each = (spec.num_groups, spec.state_size), spec.num_heads // spec.num_groups
        x, *b_and_c = own.mixed.split((spec.value_width, *[spec.num_groups * spec.state_size] * 2), dim=1)
        b, c = (part.unflatten(1, shared).repeat_interleave(each, dim=1) for part in b_and_c)
        x = x.unflatten(1, (spec.num_heads, spec.head_size))
        step = softplus(own.dt + weights.dt_bias).clamp(*spec.step_limits)  # [n, num_heads]
        for own_x, added, written, read, log_decay in zip(
            *(part.split(CHUNK) for part in (x, x * step[..., None], b, c, -weights.decay * step)), strict=True
        ):
            total, n = log_decay.T.cumsum(1), len(own_x)  # [num_heads, n]
            later = torch.ones(n, n, device=x.device).triu(1).bool()
            between = (total[:, :, None] - total[:, None]).masked_fill(later, -1e30).exp()  # from token j to i
            values = added.transpose(0, 1)  # [num_heads, n, head_size]
            reads, writes = read.transpose(0, 1), written.permute(1, 2, 0)
            within = ((reads @ writes) * between) @ values
            before = total.exp()[..., None] * (reads @ state)
            outs.append((within + before).transpose(0, 1) + weights.skip[:, None] * own_x)
            left = (total[:, -1:] - total).exp()[..., None]
            state = state * total[:, -1:].exp()[..., None] + writes @ (values * left)
        return torch.cat(outs).flatten(1) * silu(own.z), state
