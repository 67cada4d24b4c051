"""Linear layers with packed quantized weights. Kernels: csrc/cuda/packed_linear.cuh and packed_tiles.cuh.

Up to FEW_ROWS rows, each block reads all its inputs itself; up to TILED_ROWS, blocks have 256 outputs and pass inputs
through shared memory; more rows are multiplied by torch (many_rows.py).
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.kernels.cuda.fused import threads_for, vector_width
from vllm_lite.kernels.cuda.launcher import Arg, Launcher, cuda_type, require
from vllm_lite.kernels.cuda.weights.many_rows import SOURCE, THREADS, WARPS, ManyRows, WidenedProducts
from vllm_lite.kernels.cuda.weights.packed_weight import HALF_BYTES, OUTPUTS, SPAN, TILE, GpuPackedWeight

DTYPES = (torch.float16, torch.bfloat16)
"""Supported dtypes of rows."""
FEW_ROWS = 16
"""With more rows, x would be read from L2 once per 64 outputs, at 32 rows twice as many bytes as 4-bit codes have. Not
measured on a GPU; gpu_check measures all ways."""
TILED_ROWS, TILED_ROWS_BEFORE_FLOAT8 = 128, 32
"""More rows are multiplied by torch; the second limit is for float8 products. Not measured."""
ENOUGH_BLOCKS = 128
"""Inputs are divided into parts until there are this many blocks of OUTPUTS outputs: the multiprocessors of large
GPUs."""
MAX_PARTS = 8
TILES_SOURCE = "packed_tiles.cuh"
BLOCK_OUTPUTS, STEP, STAGES = 256, 64, 4
"""Outputs of a block, inputs per step, and steps in shared memory; as in TILES_SOURCE."""
BYTES_LEFT = 1024
"""Shared memory of a multiprocessor that a block cannot use."""


class Tiles(NamedTuple):
    """Size of a block: 8 * rows rows and 16 * outputs outputs."""

    rows: int
    outputs: int


def tiles_for(num_rows: int) -> Tiles:
    """Tiles for a number of rows: more outputs per block for more rows, so that fewer blocks read them. Results do not
    depend on it."""
    if num_rows <= 2:
        return Tiles(1, 1)
    if num_rows <= 8:
        return Tiles(1, 2)
    return Tiles(2, 4) if num_rows <= 16 else Tiles(4, 4)


def num_parts(weight: GpuPackedWeight) -> int:
    """Number of parts of the inputs, from the shape alone: each has at least two chunks per warp."""
    wanted = -(-ENOUGH_BLOCKS // max(1, weight.padded[0] // OUTPUTS))
    return max(1, min(wanted, MAX_PARTS, weight.num_chunks // (2 * WARPS)))


def num_tiled_parts(weight: GpuPackedWeight) -> int:
    """The same for BLOCK_OUTPUTS outputs per block: each part fills the ring at least twice."""
    wanted = ENOUGH_BLOCKS // max(1, -(-weight.padded[0] // BLOCK_OUTPUTS))
    return max(1, min(wanted, MAX_PARTS, weight.padded[1] // (2 * STAGES * STEP)))


def tile_bytes(weight: GpuPackedWeight, rows: int, flush: int) -> int:
    """Shared memory of a block with 8 * rows rows: STAGES times `packed::Step::BYTES` of TILES_SOURCE."""
    codes = BLOCK_OUTPUTS * STEP // (2 if weight.kind in HALF_BYTES else 1)
    a_scale = weight.scales.itemsize * (1 if weight.less == "NOTHING" else 2)
    return STAGES * (codes + STEP // (SPAN * flush) * BLOCK_OUTPUTS * a_scale + 8 * rows * STEP * 2)


def rows_of_a_tile(weight: GpuPackedWeight, num_rows: int, flush: int, multiprocessor_bytes: int) -> int:
    """Rows of a block / 8: 4, or 8 if there are more rows and shared memory suffices. Results do not depend on it."""
    return 8 if num_rows > 32 and tile_bytes(weight, 8, flush) <= multiprocessor_bytes - BYTES_LEFT else 4


def spans_between_scales(kind: str, group_shift: int, scales: torch.Tensor) -> int:
    """Number of spans after which a scale is applied. Scales of 4 bytes leave no registers for two."""
    return 2 if kind in HALF_BYTES and group_shift > 0 and scales.itemsize == 2 else 1


class PackedLinear:
    """out = x W^T + bias. Up to FEW_ROWS rows, a row's bits depend only on the row and the weight; the same holds from
    there to TILED_ROWS rows, possibly with other bits."""

    def __init__(
        self, launcher: Launcher, weight: GpuPackedWeight, bias: torch.Tensor | None, many_rows: ManyRows | None = None
    ) -> None:
        """bias: [num_outputs], of any float dtype. many_rows: multiplies rows beyond the limits, by default with
        dequantized weights."""
        require(
            bias is None or bias.shape == weight.shape[:1],
            f"the bias must have {weight.shape[0]} elements, got {None if bias is None else list(bias.shape)}",
        )
        self.weight = weight
        self.launcher = launcher
        self.bias = None if bias is None else bias.to(weight.codes.device, torch.float32)
        self._num_parts, self._num_tiled_parts = num_parts(weight), num_tiled_parts(weight)
        self.many_rows = many_rows or WidenedProducts(launcher, weight)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [num_rows, num_inputs], float16 or bfloat16; out: [num_rows, num_outputs], of x's dtype or float32, with
        any row stride. It can be captured in a CUDA graph. Raises ValueError for other tensors."""
        num_outputs, num_inputs = self.weight.shape
        require(
            x.dtype in DTYPES and x.dim() == 2 and x.shape[1] == num_inputs,
            f"x must be float16 or bfloat16 [num_rows, {num_inputs}], got {x.dtype} {list(x.shape)}",
        )
        require(
            out.dtype in (x.dtype, torch.float32) and out.shape == (len(x), num_outputs) and out.stride(1) == 1,
            f"out must be {x.dtype} or float32 {[len(x), num_outputs]} with contiguous rows, got {out.dtype} "
            f"{list(out.shape)}, strides {list(out.stride())}",
        )
        if 0 in out.shape:
            return
        if self.weight.order is not None:
            x = x.index_select(1, self.weight.order)
        is_few = len(x) <= FEW_ROWS
        if is_few or len(x) <= (TILED_ROWS_BEFORE_FLOAT8 if self.many_rows.keeps_codes else TILED_ROWS):
            self._by_codes(aligned(x, self.weight.padded[1]), out, tiled=not is_few)
        else:
            self.many_rows.forward(x, self.bias, out)

    def _by_codes(self, x: torch.Tensor, out: torch.Tensor, *, tiled: bool) -> None:
        weight, (num_rows, size) = self.weight, out.shape
        parts_count = self._num_tiled_parts if tiled else self._num_parts
        parts, bias, written = None, self.bias, out.dtype
        if parts_count > 1:
            parts = torch.empty(parts_count, num_rows, size, dtype=torch.float32, device=x.device)
            bias, written = None, x.dtype
        types = ", ".join(cuda_type(dtype, "x") for dtype in (x.dtype, written, weight.scales.dtype))
        flush = spans_between_scales(weight.kind, weight.group_shift, weight.scales)
        kinds = f"packed::{weight.kind}, packed::{weight.less}, {flush}"
        args: tuple[Arg, ...] = (
            *(None if parts is not None else out, parts, x, weight.codes, weight.scales, bias),
            *(np.int64(out.stride(0)), np.int64(x.stride(0))),
            *map(np.int32, (num_rows, weight.padded[0], size, weight.num_chunks, weight.group_shift)),
        )
        if tiled:
            rows = rows_of_a_tile(weight, num_rows, flush, self.launcher.multiprocessor_bytes)
            grid = (-(-weight.padded[0] // BLOCK_OUTPUTS), -(-num_rows // (8 * rows)), parts_count)
            shared_bytes = tile_bytes(weight, rows, flush)
            kernel = self.launcher.kernel(TILES_SOURCE, f"packed_tiles<{types}, {kinds}, {rows}>")
        else:
            tiles = tiles_for(num_rows)
            grid = (weight.padded[0] // (TILE * tiles.outputs), -(-num_rows // (8 * tiles.rows)), parts_count)
            shared_bytes = 4 * tiles.rows * tiles.outputs * 4 * THREADS
            kernel = self.launcher.kernel(SOURCE, f"packed_linear<{types}, {kinds}, {tiles.rows}, {tiles.outputs}>")
        kernel(grid, (THREADS, 1, 1), args, shared_bytes)
        if parts is None:
            return
        threads = threads_for(size, 256)
        self.launcher.kernel(SOURCE, f"sum_parts<{cuda_type(out.dtype, 'out')}>")(
            (-(-size // threads), num_rows, 1),
            (threads, 1, 1),
            (out, parts, self.bias, np.int64(out.stride(0)), np.int32(size), np.int32(parts_count)),
        )


def aligned(x: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """x padded with zeros to `num_inputs` columns, with rows aligned to 16 bytes."""
    if x.shape[1] < num_inputs:
        return torch.nn.functional.pad(x, (0, num_inputs - x.shape[1]))
    if x.stride(1) == 1 and vector_width(num_inputs, x) > 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)
