"""Gated short convolutions in plain torch: the reference of the native kernel, and what a GPU runs."""

import torch
from torch.nn.functional import conv1d

from vllm_lite.checkpoint.short_conv import ShortConvSpec
from vllm_lite.kernels.delta_rule import Segments


class ShortConvOp:
    """Computes on any device, segment after segment."""

    def __init__(self, spec: ShortConvSpec) -> None:
        self.spec = spec

    def forward(
        self,
        projected: torch.Tensor,  # [n, projected_size], side by side b, c and x
        weight: torch.Tensor,  # float32 [conv_size, channels]
        states: torch.Tensor,  # float32 [num_slots, state_elements]
        segments: Segments,
        mixed: torch.Tensor,  # noqa: ARG002 (other recurrent layers' scratch memory)
        out: torch.Tensor,  # [n, channels]
    ) -> None:
        """Write what each token gets, and change the states."""
        kept = states.unflatten(1, self.spec.conv_shape)
        rows, sources, targets = (each.tolist() for each in segments[1:])
        for first, last, source, target in zip(rows, rows[1:], sources, targets, strict=False):
            b, c, x = projected[first:last].float().chunk(3, dim=1)
            inputs = torch.cat((kept[source] if source else torch.zeros_like(kept[0]), b * x))
            if first < last:
                summed = conv1d(inputs.T[None], weight.T[:, None].contiguous(), groups=weight.shape[1])[0].T
                out[first:last] = c * summed
            if target:
                kept[target] = inputs[last - first :]


def short_conv_op(spec: ShortConvSpec, device: torch.device, dtype: torch.dtype) -> ShortConvOp:
    """The fastest implementation that a device has."""
    from vllm_lite.kernels.cpu import available

    if device.type == "cpu" and available():
        from vllm_lite.kernels.cpu.short_conv import NativeShortConv

        if NativeShortConv.supports(dtype):
            return NativeShortConv(spec)
    return ShortConvOp(spec)
