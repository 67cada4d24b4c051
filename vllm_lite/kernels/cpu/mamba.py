"""Mamba-2 layers, natively: csrc/cpu/mamba.cpp."""

import torch

from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer
from vllm_lite.kernels.cpu.short_conv import SEGMENTS, NativeConvolution, addresses
from vllm_lite.kernels.mamba import MambaInputs, MambaOp, MambaWeights
from vllm_lite.kernels.recurrent import Segments, TwoCalls

MAX_STATE_SIZE = 256
"""The same number as in csrc/cpu/mamba.h."""
_SCAN = (
    int32, int64, int64, int64, int64, int64, float32, float32, pointer, pointer, pointer, int64, pointer, pointer,
    pointer, pointer, int64, *SEGMENTS, pointer, int64,
)  # fmt: skip


class NativeMamba(TwoCalls[MambaSpec, MambaInputs, MambaWeights], MambaOp):
    """Two native calls."""

    def __init__(self, spec: MambaSpec) -> None:
        super().__init__(spec)
        self.convolution = NativeConvolution()
        self._scan = function("vllm_lite_mamba", _SCAN)

    @staticmethod
    def supports(spec: MambaSpec, dtype: torch.dtype) -> bool:
        return dtype in FLOATS and spec.state_size <= MAX_STATE_SIZE

    def scan_all(
        self,
        parts: MambaInputs,
        weights: MambaWeights,
        matrices: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As TwoCalls'."""
        spec = self.spec
        self._scan(
            DTYPES[parts.z.dtype], len(segments.firsts) - 1, spec.num_heads, spec.num_groups, spec.head_size,
            spec.state_size, *spec.step_limits, mixed.data_ptr(), parts.z.data_ptr(), parts.dt.data_ptr(),
            parts.z.stride(0), weights.decay.data_ptr(), weights.dt_bias.data_ptr(), weights.skip.data_ptr(),
            matrices.data_ptr(), matrices.stride(0), *addresses(segments), out.data_ptr(), out.stride(0),
        )  # fmt: skip
