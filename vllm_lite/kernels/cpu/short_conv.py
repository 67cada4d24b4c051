"""Gated short convolutions, natively: csrc/cpu/delta_rule.cpp."""

import torch

from vllm_lite.checkpoint.short_conv import ShortConvSpec
from vllm_lite.kernels.cpu.delta_rule import SHORT_CONV
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import function
from vllm_lite.kernels.delta_rule import Segments
from vllm_lite.kernels.short_conv import ShortConvOp


class NativeShortConv(ShortConvOp):
    """One native call over all sequences of a step."""

    def __init__(self, spec: ShortConvSpec) -> None:
        super().__init__(spec)
        self._conv = function("vllm_lite_short_conv", SHORT_CONV)

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def forward(
        self,
        projected: torch.Tensor,
        weight: torch.Tensor,
        states: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,  # noqa: ARG002 (as ShortConvOp's)
        out: torch.Tensor,
    ) -> None:
        """As ShortConvOp's."""
        spec, (b, c, x) = self.spec, projected.chunk(3, dim=1)
        self._conv(
            DTYPES[projected.dtype], len(segments.firsts) - 1, spec.channels, spec.conv_size, x.data_ptr(),
            b.data_ptr(), c.data_ptr(), projected.stride(0), weight.data_ptr(), 0, states.data_ptr(), states.stride(0),
            *(each.data_ptr() for each in segments), out.data_ptr(), out.stride(0),
        )  # fmt: skip
