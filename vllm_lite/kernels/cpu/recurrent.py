"""Recurrent layers on a CPU: short convolutions, the gated delta rule, Mamba-2. csrc/cpu/delta_rule.cpp, mamba.cpp."""

from abc import abstractmethod
from typing import NamedTuple

import torch

from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer
from vllm_lite.kernels.delta_rule import DeltaNetOp, DeltaNetWeights, Projected
from vllm_lite.kernels.mamba import MambaInputs, MambaOp, MambaWeights
from vllm_lite.kernels.recurrent import Parts, Segments, Spec, Taps, TwoCalls, Weights
from vllm_lite.kernels.short_conv import ConvolvedOp

MAX_HEAD_SIZE = 256
"""The same number as in csrc/cpu/delta_rule.h."""
MAX_STATE_SIZE = 256
"""The same number as in csrc/cpu/mamba.h."""
_SEGMENTS = (pointer, pointer, pointer, pointer)
_CONV = (
    int32, int64, int64, int64, pointer, pointer, pointer, int64, pointer, pointer, pointer, int64, *_SEGMENTS,
    pointer, int64,
)  # fmt: skip


def _addresses(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


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
        """See recurrent.Convolution."""
        weight, bias = taps
        before, behind = (0, 0) if gates is None else _addresses(*gates)
        self._conv(
            DTYPES[x.dtype], len(segments.firsts) - 1, weight.shape[1], weight.shape[0], x.data_ptr(), before, behind,
            x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), kept.data_ptr(), kept.stride(0),
            *_addresses(*segments), out.data_ptr(), out.stride(0),
        )  # fmt: skip


class NativeShortConv(ConvolvedOp):
    """Layers that consist of a gated convolution only."""

    def __init__(self, spec: ShortConvSpec) -> None:
        super().__init__(spec, NativeConvolution())

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        return dtype in FLOATS


class ScanArguments(NamedTuple):
    """Arguments of a native scan that depend on the kind of layer."""

    sizes: tuple[int, int, int, int]
    floats: tuple[float, ...]
    projected: tuple[torch.Tensor, ...]
    """Parts of a token's projections other than `mixed` and `z`, in rows with the same stride."""
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NativeScan(TwoCalls[Spec, Parts, Weights]):
    """Two native calls: the convolution, and then a scan."""

    def __init__(self, spec: Spec, name: str, num_floats: int, num_projected: int) -> None:
        """`name`: the native function. `num_floats` and `num_projected`: the lengths of `floats` and `projected` of its
        ScanArguments."""
        super().__init__(spec)
        self.convolution = NativeConvolution()
        kinds = (
            int32, *[int64] * 5, *[float32] * num_floats, pointer, pointer, *[pointer] * num_projected, int64,
            pointer, pointer, pointer, pointer, int64, *_SEGMENTS, pointer, int64,
        )  # fmt: skip
        self._scan = function(name, kinds)

    @abstractmethod
    def arguments(self, parts: Parts, weights: Weights) -> ScanArguments:
        """Arguments of the scan of these parts."""

    def scan_all(
        self,
        parts: Parts,
        weights: Weights,
        matrices: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See TwoCalls."""
        z: torch.Tensor = parts._asdict()["z"]
        own = self.arguments(parts, weights)
        self._scan(
            DTYPES[z.dtype], len(segments.firsts) - 1, *own.sizes, *own.floats, *_addresses(mixed, z, *own.projected),
            z.stride(0), *_addresses(*own.weights), matrices.data_ptr(), matrices.stride(0), *_addresses(*segments),
            out.data_ptr(), out.stride(0),
        )  # fmt: skip


class NativeDeltaNet(NativeScan[DeltaNetSpec, Projected, DeltaNetWeights], DeltaNetOp):
    """The gated delta rule."""

    def __init__(self, spec: DeltaNetSpec) -> None:
        super().__init__(spec, "vllm_lite_delta_rule", num_floats=1, num_projected=2)

    @staticmethod
    def supports(spec: DeltaNetSpec, dtype: torch.dtype) -> bool:
        return dtype in FLOATS and max(spec.key_size, spec.value_size) <= MAX_HEAD_SIZE

    def arguments(self, parts: Projected, weights: DeltaNetWeights) -> ScanArguments:
        """As NativeScan's."""
        spec = self.spec
        return ScanArguments(
            (spec.num_key_heads, spec.num_value_heads, spec.key_size, spec.value_size),
            (weights.eps,),
            (parts.b, parts.a),
            (weights.decay, weights.dt_bias, weights.norm),
        )


class NativeMamba(NativeScan[MambaSpec, MambaInputs, MambaWeights], MambaOp):
    """Mamba-2."""

    def __init__(self, spec: MambaSpec) -> None:
        super().__init__(spec, "vllm_lite_mamba", num_floats=2, num_projected=1)

    @staticmethod
    def supports(spec: MambaSpec, dtype: torch.dtype) -> bool:
        return dtype in FLOATS and spec.state_size <= MAX_STATE_SIZE

    def arguments(self, parts: MambaInputs, weights: MambaWeights) -> ScanArguments:
        """As NativeScan's."""
        spec = self.spec
        return ScanArguments(
            (spec.num_heads, spec.num_groups, spec.head_size, spec.state_size),
            spec.step_limits,
            (parts.dt,),
            (weights.decay, weights.dt_bias, weights.skip),
        )
