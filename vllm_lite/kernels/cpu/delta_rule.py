"""Recurrent layers of the gated delta rule, natively: csrc/cpu/delta_rule.cpp."""

import torch

from vllm_lite.checkpoint.delta_net import DeltaNetSpec
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer
from vllm_lite.kernels.delta_rule import DeltaNetOp, DeltaNetWeights, Segments, split_projected, split_state

MAX_HEAD_SIZE = 256
"""The same number as in csrc/cpu/delta_rule.h."""
SEGMENTS = (pointer, pointer, pointer, pointer)
SHORT_CONV = (
    int32, int64, int64, int64, pointer, pointer, pointer, int64, pointer, pointer, pointer, int64, *SEGMENTS,
    pointer, int64,
)  # fmt: skip
_DELTA_RULE = (
    int32, int64, int64, int64, int64, int64, float32, pointer, pointer, pointer, pointer, int64,
    pointer, pointer, pointer, pointer, int64, *SEGMENTS, pointer, int64,
)  # fmt: skip


class NativeDeltaNet(DeltaNetOp):
    """Two native calls, each over all sequences of a step."""

    def __init__(self, spec: DeltaNetSpec) -> None:
        super().__init__(spec)
        self._conv = function("vllm_lite_short_conv", SHORT_CONV)
        self._rule = function("vllm_lite_delta_rule", _DELTA_RULE)

    @staticmethod
    def supports(spec: DeltaNetSpec, dtype: torch.dtype) -> bool:
        return dtype in FLOATS and max(spec.key_size, spec.value_size) <= MAX_HEAD_SIZE

    def forward(
        self,
        projected: torch.Tensor,
        weights: DeltaNetWeights,
        states: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As DeltaNetOp's."""
        spec, code = self.spec, DTYPES[projected.dtype]
        parts = split_projected(projected, spec)
        kept, matrices = split_state(states, spec)
        num_seqs, stride = len(segments.firsts) - 1, projected.stride(0)
        where = [each.data_ptr() for each in segments]
        self._conv(
            code, num_seqs, spec.conv_channels, spec.conv_size, parts.mixed.data_ptr(), 0, 0, stride,
            weights.conv.data_ptr(), 0, kept.data_ptr(), states.stride(0), *where, mixed.data_ptr(), mixed.stride(0),
        )  # fmt: skip
        self._rule(
            code, num_seqs, spec.num_key_heads, spec.num_value_heads, spec.key_size, spec.value_size, weights.eps,
            mixed.data_ptr(), parts.z.data_ptr(), parts.b.data_ptr(), parts.a.data_ptr(), stride,
            weights.decay.data_ptr(), weights.dt_bias.data_ptr(), weights.norm.data_ptr(), matrices.data_ptr(),
            states.stride(0), *where, out.data_ptr(), out.stride(0),
        )  # fmt: skip
