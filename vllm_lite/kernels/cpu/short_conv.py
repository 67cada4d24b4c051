"""Short convolutions, natively: csrc/cpu/delta_rule.cpp."""

import torch

from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import function, int32, int64, pointer
from vllm_lite.kernels.recurrent import Segments, Taps
from vllm_lite.kernels.short_conv import ConvolvedOp

SEGMENTS = (pointer, pointer, pointer, pointer)
_CONV = (
    int32, int64, int64, int64, pointer, pointer, pointer, int64, pointer, pointer, pointer, int64, *SEGMENTS,
    pointer, int64,
)  # fmt: skip


class NativeConvolution:
    """One native call over all sequences of a step."""

    def __init__(self) -> None:
        self._conv = function("vllm_lite_short_conv", _CONV)

    def __call__(
        self,
        x: torch.Tensor,
        gates: tuple[torch.Tensor, torch.Tensor] | None,
        taps: Taps,
        kept: torch.Tensor,
        segments: Segments,
        out: torch.Tensor,
    ) -> None:
        """As recurrent.Convolution's."""
        weight, bias = taps
        before, behind = (0, 0) if gates is None else (gates[0].data_ptr(), gates[1].data_ptr())
        self._conv(
            DTYPES[x.dtype], len(segments.firsts) - 1, weight.shape[1], weight.shape[0], x.data_ptr(), before, behind,
            x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), kept.data_ptr(), kept.stride(0),
            *addresses(segments), out.data_ptr(), out.stride(0),
        )  # fmt: skip


def addresses(segments: Segments) -> list[int]:
    """Addresses of a step's segments for a native call."""
    return [part.data_ptr() for part in segments]


class NativeShortConv(ConvolvedOp):
    """Layers that are a gated convolution and nothing else."""

    def __init__(self, spec: ShortConvSpec) -> None:
        super().__init__(spec, NativeConvolution())

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        return dtype in FLOATS
