"""Recurrent layers on a GPU: short convolutions, the gated delta rule and Mamba-2. Kernels: csrc/cuda/recurrent.cuh."""

import numpy as np
import torch

from vllm_lite.checkpoint.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.mamba import MambaSpec
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require
from vllm_lite.kernels.delta_rule import DeltaNetOp, DeltaNetWeights
from vllm_lite.kernels.delta_rule import Projected as DeltaProjected
from vllm_lite.kernels.mamba import MambaOp, MambaWeights
from vllm_lite.kernels.mamba import Projected as MambaProjected
from vllm_lite.kernels.recurrent import Segments, Taps, TwoCalls

SOURCE = "recurrent.cuh"
CONV_THREADS, LANES, TILE = 128, 4, 16
"""Channels of a block, threads of a column, and tokens that are prepared together; as in the source."""
MAX_CONV_SIZE = 8
MAX_COLUMNS = 128
MAX_DELTA_ROWS, MAX_MAMBA_ROWS = 128, 256
"""A thread keeps a row in LANES of a matrix in registers, with up to 128 of them."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LaunchedConvolution:
    """One launch over all sequences of a step."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @staticmethod
    def supports(conv_size: int) -> bool:
        return 2 <= conv_size <= MAX_CONV_SIZE

    def __call__(
        self,
        x: torch.Tensor,
        gates: tuple[torch.Tensor, torch.Tensor] | None,
        taps: Taps,
        kept: torch.Tensor,
        segments: Segments,
        out: torch.Tensor,
    ) -> None:
        """As recurrent.Convolution's. Raises ValueError for other shapes."""
        conv_size, channels = taps.weight.shape
        for part in (x, *(gates or ())):
            require(
                part.shape == (len(x), channels) and part.dtype == x.dtype and part.stride() == (x.stride(0), 1),
                f"x and its gates must be {x.dtype} [n, {channels}] with rows alike, got {part.dtype} "
                f"{list(part.shape)}, strides {list(part.stride())}",
            )
        wanted = torch.float32 if gates is None else x.dtype
        _require_rows("out", out, wanted, len(x), channels)
        require(kept.stride()[1:] == (channels, 1), f"a slot must be contiguous, got strides {list(kept.stride())}")
        before, behind = gates or (None, None)
        name = f"short_conv<{cuda_type(x.dtype, 'x')}, {conv_size}, {str(gates is not None).lower()}>"
        self._launcher.kernel(SOURCE, name)(
            (len(segments.firsts) - 1, -(-channels // CONV_THREADS), 1),
            (CONV_THREADS, 1, 1),
            (
                *(x, before, behind, *taps, kept, *segments, out),
                *map(np.int64, (x.stride(0), kept.stride(0), out.stride(0))),
                np.int32(channels),
            ),
        )


class LaunchedDeltaNet(TwoCalls[DeltaNetSpec, DeltaProjected, DeltaNetWeights], DeltaNetOp):
    """Two launches."""

    def __init__(self, spec: DeltaNetSpec, launcher: Launcher) -> None:
        super().__init__(spec)
        self.convolution = LaunchedConvolution(launcher)
        self._launcher = launcher

    @staticmethod
    def supports(spec: DeltaNetSpec, dtype: torch.dtype) -> bool:
        fits = spec.key_size <= MAX_DELTA_ROWS and spec.value_size <= MAX_COLUMNS
        return dtype in DTYPES and fits and LaunchedConvolution.supports(spec.conv_size)

    def scan_all(
        self,
        parts: DeltaProjected,
        weights: DeltaNetWeights,
        matrices: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As TwoCalls'. Raises ValueError for other shapes."""
        spec, kind = self.spec, cuda_type(parts.z.dtype, "projected")
        _require_rows("mixed", mixed, torch.float32, len(parts.z), spec.conv_channels, is_dense=True)
        _require_rows("out", out, parts.z.dtype, len(parts.z), spec.value_width)
        floats = TILE * (2 * _padded(spec.key_size) + spec.value_size + 2)
        self._launcher.kernel(SOURCE, f"delta_rule<{kind}, {spec.key_size}, {spec.value_size}>")(
            (len(segments.firsts) - 1, spec.num_value_heads, 1),
            (_threads(spec.value_size), 1, 1),
            (
                *(mixed, parts.z, parts.b, parts.a, weights.decay, weights.dt_bias, weights.norm, matrices, *segments),
                out,
                *map(np.int64, (parts.z.stride(0), matrices.stride(0), out.stride(0))),
                *(np.int32(spec.num_key_heads), np.float32(weights.eps)),
            ),
            4 * floats,
        )


class LaunchedMamba(TwoCalls[MambaSpec, MambaProjected, MambaWeights], MambaOp):
    """Two launches."""

    def __init__(self, spec: MambaSpec, launcher: Launcher) -> None:
        super().__init__(spec)
        self.convolution = LaunchedConvolution(launcher)
        self._launcher = launcher

    @staticmethod
    def supports(spec: MambaSpec, dtype: torch.dtype) -> bool:
        fits = spec.state_size <= MAX_MAMBA_ROWS and spec.head_size <= MAX_COLUMNS
        is_small = spec.state_size <= MAX_DELTA_ROWS or spec.head_size <= MAX_COLUMNS // 2
        return dtype in DTYPES and fits and is_small and LaunchedConvolution.supports(spec.conv_size)

    def scan_all(
        self,
        parts: MambaProjected,
        weights: MambaWeights,
        matrices: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As TwoCalls'. Raises ValueError for other shapes."""
        spec, kind = self.spec, cuda_type(parts.z.dtype, "projected")
        _require_rows("mixed", mixed, torch.float32, len(parts.z), spec.conv_channels, is_dense=True)
        _require_rows("out", out, parts.z.dtype, len(parts.z), spec.value_width)
        self._launcher.kernel(SOURCE, f"mamba<{kind}, {spec.state_size}, {spec.head_size}>")(
            (len(segments.firsts) - 1, spec.num_heads, 1),
            (_threads(spec.head_size), 1, 1),
            (
                *(mixed, parts.z, parts.dt, weights.decay, weights.dt_bias, weights.skip, matrices, *segments, out),
                *map(np.int64, (parts.z.stride(0), matrices.stride(0), out.stride(0))),
                *map(np.float32, spec.step_limits),
            ),
            4 * TILE * (2 * _padded(spec.state_size) + 2),
        )


def _padded(size: int) -> int:
    """Whole runs of four elements for each lane."""
    return -(-size // (4 * LANES)) * 4 * LANES


def _threads(columns: int) -> int:
    """Whole warps, LANES threads a column."""
    return -(-columns * LANES // 32) * 32


def _require_rows(
    what: str, tensor: torch.Tensor, dtype: torch.dtype, num_rows: int, size: int, *, is_dense: bool = False
) -> None:
    fits = tensor.dtype == dtype and tensor.shape[1] == size and tensor.stride(1) == 1 and len(tensor) >= num_rows
    require(
        fits and (not is_dense or tensor.stride(0) == size),
        f"{what} must be {dtype} [{num_rows}, {size}] with {'nothing between its' if is_dense else 'contiguous'} rows, "
        f"got {tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}",
    )
