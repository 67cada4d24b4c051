"""Recurrent layers of the gated delta rule, natively: csrc/cpu/delta_rule.cpp."""

import torch

from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer
from vllm_lite.kernels.cpu.short_conv import SEGMENTS, NativeConvolution, addresses
from vllm_lite.kernels.delta_rule import DeltaNetOp, DeltaNetWeights, Projected
from vllm_lite.kernels.recurrent import Segments, TwoCalls

MAX_HEAD_SIZE = 256
"""The same number as in csrc/cpu/delta_rule.h."""
_DELTA_RULE = (
    int32, int64, int64, int64, int64, int64, float32, pointer, pointer, pointer, pointer, int64,
    pointer, pointer, pointer, pointer, int64, *SEGMENTS, pointer, int64,
)  # fmt: skip


class NativeDeltaNet(TwoCalls[DeltaNetSpec, Projected, DeltaNetWeights], DeltaNetOp):
    """Two native calls."""

    def __init__(self, spec: DeltaNetSpec) -> None:
        super().__init__(spec)
        self.convolution = NativeConvolution()
        self._rule = function("vllm_lite_delta_rule", _DELTA_RULE)

    @staticmethod
    def supports(spec: DeltaNetSpec, dtype: torch.dtype) -> bool:
        return dtype in FLOATS and max(spec.key_size, spec.value_size) <= MAX_HEAD_SIZE

    def scan_all(
        self,
        parts: Projected,
        weights: DeltaNetWeights,
        matrices: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As TwoCalls'."""
        spec = self.spec
        self._rule(
            DTYPES[parts.z.dtype], len(segments.firsts) - 1, spec.num_key_heads, spec.num_value_heads, spec.key_size,
            spec.value_size, weights.eps, mixed.data_ptr(), parts.z.data_ptr(), parts.b.data_ptr(), parts.a.data_ptr(),
            parts.z.stride(0), weights.decay.data_ptr(), weights.dt_bias.data_ptr(), weights.norm.data_ptr(),
            matrices.data_ptr(), matrices.stride(0), *addresses(segments), out.data_ptr(), out.stride(0),
        )  # fmt: skip
