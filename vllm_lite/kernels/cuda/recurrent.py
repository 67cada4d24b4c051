"""Recurrent layers on a GPU: short convolutions, the gated delta rule and Mamba-2.

Kernels: csrc/cuda/recurrent.cuh, token by token, and recurrent_chunks.cuh, in chunks, for sequences with many rows in a
step.
"""

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

SOURCE, CHUNKS_SOURCE = "recurrent.cuh", "recurrent_chunks.cuh"
CONV_THREADS, LANES, TILE = 128, 4, 16
"""Channels per block, threads per column, and tokens prepared together; as in the source."""
MAX_CONV_SIZE = 8
MAX_COLUMNS = 128
MAX_DELTA_ROWS, MAX_MAMBA_ROWS = 128, 256
"""Maximum rows of a matrix: a thread keeps one row in LANES of its column in registers, up to 128 of them."""
BLOCK = 16
"""Tokens of a chunk whose equations are solved together, as in the source."""
CHUNKED_ROWS = 64
"""Minimum rows of a sequence in a step for chunks. Not measured: by arithmetic, a chunk of any length takes as long as
about 16 single tokens; but rows of drafts need the same bits as decodes."""
MAX_EXACT_ROWS = 128
"""Maximum rows of a matrix for chunks with operands of two bfloat16: more would spill registers."""
_NEVER = (1 << 31) - 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LaunchedConvolution:
    """The convolution: one launch over all sequences of a step."""

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
    """A kernel that updates each head's matrix over a sequence, with its own arguments."""

    name: str
    sizes: tuple[int, int]
    """Rows and columns of a matrix."""
    num_heads: int
    solves: bool
    """Whether the tokens of a chunk form a system of equations."""
    floats: int
    """Elements of shared memory per token."""
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[Scalar, ...]


class LaunchedScan(TwoCalls[Spec, Parts, Weights]):
    """A recurrent layer in two launches: the convolution, and a scan with a block per sequence and head. If a sequence
    may have CHUNKED_ROWS rows, a third launch processes such sequences."""

    def __init__(self, spec: Spec, launcher: Launcher) -> None:
        super().__init__(spec)
        self.convolution = LaunchedConvolution(launcher)
        self._launcher = launcher

    @abstractmethod
    def kernel(self, parts: Parts, weights: Weights) -> Scan:
        """The Scan for these inputs."""

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
        scan, num_seqs = self.kernel(parts, weights), len(segments.firsts) - 1
        _require_rows("mixed", mixed, torch.float32, len(z), self.spec.conv_shape[1], is_dense=True)
        _require_rows("out", out, z.dtype, len(z), scan.num_heads * scan.sizes[1])
        has_chunks = len(z) - num_seqs + 1 >= CHUNKED_ROWS and goes_in_chunks(scan.sizes[0], z.dtype)
        args = (
            *(mixed, z, *scan.tensors, matrices, *segments, out),
            *map(np.int64, (z.stride(0), matrices.stride(0), out.stride(0))),
            np.int32(CHUNKED_ROWS if has_chunks else _NEVER),
            *scan.scalars,
        )
        types = f"<{cuda_type(z.dtype, 'projected')}, {scan.sizes[0]}, {scan.sizes[1]}>"
        grid, columns = (num_seqs, scan.num_heads, 1), scan.sizes[1]
        by_token = self._launcher.kernel(SOURCE, scan.name + types)
        by_token(grid, (_threads(columns), 1, 1), args, 4 * TILE * scan.floats)
        if has_chunks:
            by_chunk = self._launcher.kernel(CHUNKS_SOURCE, f"{scan.name}_chunks{types}")
            by_chunk(grid, (2 * _wide(columns), 1, 1), args, chunk_shared_bytes(scan, z.dtype))


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
            True,
            2 * _padded(spec.key_size) + spec.value_size + 2,
            (parts.b, parts.a, weights.decay, weights.dt_bias, weights.norm),
            (np.int32(spec.num_key_heads), np.float32(weights.eps)),
        )


class LaunchedMamba(LaunchedScan[MambaSpec, MambaInputs, MambaWeights], MambaOp):
    """The scan of a Mamba-2 layer."""

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
            False,
            2 * _padded(spec.state_size) + 2,
            (parts.dt, weights.decay, weights.dt_bias, weights.skip),
            (np.int32(spec.num_groups), *map(np.float32, spec.step_limits)),
        )


def goes_in_chunks(num_matrix_rows: int, dtype: torch.dtype) -> bool:
    """Whether sequences with many rows in a step are computed in chunks; else token by token, like all others."""
    return dtype is torch.bfloat16 or num_matrix_rows <= MAX_EXACT_ROWS


def chunk_shared_bytes(scan: Scan, dtype: torch.dtype) -> int:
    """Dynamic shared memory of a block for chunks: `recurrent::Chunk` of the source."""
    parts, tokens = (1, 64) if dtype is torch.bfloat16 else (2, 32)
    size, columns = map(_wide, scan.sizes)

    def matrix(width: int) -> int:
        return 2 * parts * tokens * (width + 8)

    rows = max(2 * matrix(size), 4 * tokens * (columns + 4))
    system = matrix(tokens) + matrix(BLOCK) + 4 * tokens * BLOCK if scan.solves else 0
    return rows + matrix(tokens) + system + 4 * 4 * tokens


def _wide(size: int) -> int:
    """`size` rounded up to whole operands of a matrix instruction."""
    return -(-size // BLOCK) * BLOCK


def _padded(size: int) -> int:
    """`size` rounded up to four elements per lane."""
    return -(-size // (4 * LANES)) * 4 * LANES


def _threads(columns: int) -> int:
    """Threads in whole warps, LANES per column."""
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
