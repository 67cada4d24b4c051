"""Recurrent layers on a GPU: short convolutions, the gated delta rule and Mamba-2. Kernels: csrc/cuda/recurrent.cuh."""

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.kernels.cuda.launcher import Launcher, Scalar, cuda_type, require
from vllm_lite.kernels.delta_rule import DeltaNetOp, DeltaNetWeights, Projected
from vllm_lite.kernels.mamba import MambaInputs, MambaOp, MambaWeights
from vllm_lite.kernels.recurrent import Parts, Segments, Spec, Taps, TwoCalls, Weights

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


class Scan(NamedTuple):
    """A kernel that takes the matrix of each head through a sequence, and what it alone is called with."""

    name: str
    sizes: tuple[int, int]
    """Rows and columns of a matrix."""
    num_heads: int
    floats: int
    """Elements of shared memory for a token."""
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[Scalar, ...]


class LaunchedScan(TwoCalls[Spec, Parts, Weights]):
    """Two launches: of the convolution, and of a scan by a block for each sequence and head."""

    def __init__(self, spec: Spec, launcher: Launcher) -> None:
        super().__init__(spec)
        self.convolution = LaunchedConvolution(launcher)
        self._launcher = launcher

    @abstractmethod
    def kernel(self, parts: Parts, weights: Weights) -> Scan:
        """The scan of these."""

    def scan_all(
        self,
        parts: Parts,
        weights: Weights,
        matrices: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As TwoCalls'. Raises ValueError for other shapes."""
        z: torch.Tensor = parts._asdict()["z"]
        scan, kind = self.kernel(parts, weights), cuda_type(z.dtype, "projected")
        _require_rows("mixed", mixed, torch.float32, len(z), self.spec.conv_shape[1], is_dense=True)
        _require_rows("out", out, z.dtype, len(z), scan.num_heads * scan.sizes[1])
        self._launcher.kernel(SOURCE, f"{scan.name}<{kind}, {scan.sizes[0]}, {scan.sizes[1]}>")(
            (len(segments.firsts) - 1, scan.num_heads, 1),
            (_threads(scan.sizes[1]), 1, 1),
            (
                *(mixed, z, *scan.tensors, matrices, *segments, out),
                *map(np.int64, (z.stride(0), matrices.stride(0), out.stride(0))),
                *scan.scalars,
            ),
            4 * TILE * scan.floats,
        )


class LaunchedDeltaNet(LaunchedScan[DeltaNetSpec, Projected, DeltaNetWeights], DeltaNetOp):
    """The gated delta rule."""

    @staticmethod
    def supports(spec: DeltaNetSpec, dtype: torch.dtype) -> bool:
        fits = spec.key_size <= MAX_DELTA_ROWS and spec.value_size <= MAX_COLUMNS
        return dtype in DTYPES and fits and LaunchedConvolution.supports(spec.conv_size)

    def kernel(self, parts: Projected, weights: DeltaNetWeights) -> Scan:
        """As LaunchedScan's."""
        spec = self.spec
        return Scan(
            "delta_rule",
            (spec.key_size, spec.value_size),
            spec.num_value_heads,
            2 * _padded(spec.key_size) + spec.value_size + 2,
            (parts.b, parts.a, weights.decay, weights.dt_bias, weights.norm),
            (np.int32(spec.num_key_heads), np.float32(weights.eps)),
        )


class LaunchedMamba(LaunchedScan[MambaSpec, MambaInputs, MambaWeights], MambaOp):
    """Mamba-2."""

    @staticmethod
    def supports(spec: MambaSpec, dtype: torch.dtype) -> bool:
        fits = spec.state_size <= MAX_MAMBA_ROWS and spec.head_size <= MAX_COLUMNS
        is_small = spec.state_size <= MAX_DELTA_ROWS or spec.head_size <= MAX_COLUMNS // 2
        return dtype in DTYPES and fits and is_small and LaunchedConvolution.supports(spec.conv_size)

    def kernel(self, parts: MambaInputs, weights: MambaWeights) -> Scan:
        """As LaunchedScan's."""
        spec = self.spec
        return Scan(
            "mamba",
            (spec.state_size, spec.head_size),
            spec.num_heads,
            2 * _padded(spec.state_size) + 2,
            (parts.dt, weights.decay, weights.dt_bias, weights.skip),
            (np.int32(spec.num_groups), *map(np.float32, spec.step_limits)),
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
