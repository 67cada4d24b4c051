"""Gated short convolutions in plain torch: the reference of all kernels."""

import torch

from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.kernels.recurrent import Convolution, Segments, Taps, convolve


class ShortConvOp:
    """Computes on any device, segment by segment."""

    graph_safe = False

    def __init__(self, spec: ShortConvSpec) -> None:
        self.spec = spec

    def forward(
        self,
        projected: torch.Tensor,  # [n, projected_size]: b, c and x
        weight: torch.Tensor,  # float32 [conv_size, channels]
        states: torch.Tensor,  # float32 [num_slots, state_elements]
        segments: Segments,
        mixed: torch.Tensor,  # noqa: ARG002 (other recurrent layers' scratch memory)
        out: torch.Tensor,  # [n, channels]
    ) -> None:
        """Write the output of each token, and update the states."""
        kept = states.unflatten(1, self.spec.conv_shape)
        for first, last, source, target in segments.each():
            b, c, x = projected[first:last].float().chunk(3, dim=1)
            inputs = torch.cat((kept[source] if source else torch.zeros_like(kept[0]), b * x))
            if first < last:
                out[first:last] = c * convolve(inputs, weight)
            if target:
                kept[target] = inputs[last - first :]


class ConvolvedOp(ShortConvOp):
    """An implementation with a kernel over all sequences of a step."""

    graph_safe = True

    def __init__(self, spec: ShortConvSpec, convolution: Convolution) -> None:
        super().__init__(spec)
        self.convolution = convolution

    def forward(
        self,
        projected: torch.Tensor,
        weight: torch.Tensor,
        states: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,  # noqa: ARG002 (as ShortConvOp's)
        out: torch.Tensor,
    ) -> None:
        b, c, x = projected.chunk(3, dim=1)
        self.convolution(x, (b, c), Taps(weight), states.unflatten(1, self.spec.conv_shape), segments, out)
