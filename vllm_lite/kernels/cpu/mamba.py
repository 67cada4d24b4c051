"""Mamba-2 layers, natively: csrc/cpu/mamba.cpp."""

import torch

from vllm_lite.checkpoint.mamba import MambaSpec
from vllm_lite.kernels.cpu.delta_rule import SEGMENTS, SHORT_CONV
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer
from vllm_lite.kernels.delta_rule import Segments
from vllm_lite.kernels.mamba import MambaOp, MambaWeights, split_projected, split_state

MAX_STATE_SIZE = 256
"""The same number as in csrc/cpu/mamba.h."""
_SCAN = (
    int32, int64, int64, int64, int64, float32, float32, pointer, pointer, pointer, int64, pointer, pointer, pointer,
    pointer, int64, *SEGMENTS, pointer, int64,
)  # fmt: skip


class NativeMamba(MambaOp):
    """Two native calls, each over all sequences of a step."""

    def __init__(self, spec: MambaSpec) -> None:
        super().__init__(spec)
        self._conv = function("vllm_lite_short_conv", SHORT_CONV)
        self._scan_heads = function("vllm_lite_mamba", _SCAN)

    @staticmethod
    def supports(spec: MambaSpec, dtype: torch.dtype) -> bool:
        return dtype in FLOATS and spec.state_size <= MAX_STATE_SIZE

    def forward(
        self,
        projected: torch.Tensor,
        weights: MambaWeights,
        states: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As MambaOp's."""
        spec, code = self.spec, DTYPES[projected.dtype]
        parts = split_projected(projected, spec)
        kept, matrices = split_state(states, spec)
        num_seqs, stride = len(segments.firsts) - 1, projected.stride(0)
        where = [each.data_ptr() for each in segments]
        self._conv(
            code, num_seqs, spec.conv_channels, spec.conv_size, parts.mixed.data_ptr(), 0, 0, stride,
            weights.conv.data_ptr(), weights.conv_bias.data_ptr(), kept.data_ptr(), states.stride(0), *where,
            mixed.data_ptr(), mixed.stride(0),
        )  # fmt: skip
        self._scan_heads(
            code, num_seqs, spec.num_heads, spec.head_size, spec.state_size, *spec.step_limits, mixed.data_ptr(),
            parts.z.data_ptr(), parts.dt.data_ptr(), stride, weights.decay.data_ptr(), weights.dt_bias.data_ptr(),
            weights.skip.data_ptr(), matrices.data_ptr(), states.stride(0), *where, out.data_ptr(), out.stride(0),
        )  # fmt: skip
