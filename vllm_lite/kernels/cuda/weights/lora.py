"""Low-rank adapters of a linear layer on a GPU, with rows grouped by adapter. Kernels: csrc/cuda/lora.cuh."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.kernels.cuda.fused import vector_width
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require

SOURCE = "lora.cuh"
TILE, WARPS, THREADS = 8, 4, 128
"""Rows, ranks and outputs per block; as in the source."""


class LoraStack(NamedTuple):
    """The adapters of one layer, in slots; elements beyond a slot's rank are never read."""

    down: torch.Tensor  # [num_slots, matrices * rank, inputs]
    up: torch.Tensor  # [num_slots, rank, sum of outputs]
    ranks: torch.Tensor  # int32 [num_slots]; 0: the slot is empty
    rank: int
    sizes: tuple[int, ...]
    """Outputs of each projection."""
    matrix: tuple[int, ...]
    """The index of each projection's `down` matrix: 0, 1, 2, or all 0."""

    @classmethod
    def empty(
        cls, num_slots: int, rank: int, inputs: int, sizes: Sequence[int], matrix: Sequence[int], like: torch.Tensor
    ) -> "LoraStack":
        """Make an empty stack with the dtype and device of `like`. Raises ValueError for an unsupported order of
        matrices."""
        in_turn = tuple(range(len(sizes)))
        require(0 < len(sizes) <= 3, f"a layer must have 1 to 3 projections, got {len(sizes)}")
        require(tuple(matrix) in (in_turn, (0,) * len(sizes)), f"matrices must be {in_turn} or all 0, got {matrix}")
        width = (max(matrix) + 1) * rank
        down, up = like.new_zeros(num_slots, width, inputs), like.new_zeros(num_slots, rank, sum(sizes))
        ranks = torch.zeros(num_slots, dtype=torch.int32, device=like.device)
        return cls(down, up, ranks, rank, tuple(sizes), tuple(matrix))


def add(
    launcher: Launcher,
    stack: LoraStack,
    groups: tuple[torch.Tensor, torch.Tensor],  # order int32 [at least n], starts int32 [num_slots + 1]
    x: torch.Tensor,  # [n, inputs]
    out: torch.Tensor,  # [n, sum of outputs], in the dtype of x or float32
    hidden: torch.Tensor,  # float32 [at least n, matrices * rank], persistent scratch memory
) -> None:
    """Add the adapters' outputs for rows of `x` to the same rows of `out`; slot i has the rows in order[starts[i] :
    starts[i + 1]]. Two launches, whose grids depend only on n. Raises ValueError for other shapes."""
    num_slots, width, inputs = stack.down.shape
    num_rows, outputs = len(x), stack.up.shape[2]
    require(
        x.shape == (num_rows, inputs) and x.dtype == stack.down.dtype and x.stride(1) == 1,
        f"x must be {stack.down.dtype} [n, {inputs}] with contiguous rows, got {x.dtype} {list(x.shape)}",
    )
    require(
        out.shape == (num_rows, outputs) and out.dtype in (x.dtype, torch.float32) and out.stride(1) == 1,
        f"out must be [{num_rows}, {outputs}], {x.dtype} or float32, with contiguous rows, got {out.dtype} "
        f"{list(out.shape)}",
    )
    require(
        hidden.dtype == torch.float32 and hidden.is_contiguous() and hidden.numel() >= num_rows * width,
        f"hidden must have {num_rows} contiguous rows of {width} float32, got {hidden.dtype} {list(hidden.shape)}",
    )
    if num_rows == 0:
        return
    kind, vector = cuda_type(x.dtype, "x"), vector_width(inputs, x, stack.down)
    tiles = min(num_rows, -(-num_rows // TILE) + num_slots)
    launcher.kernel(SOURCE, f"lora_shrink<{kind}, {vector}>")(
        (tiles, -(-width // WARPS), 1),
        (THREADS, 1, 1),
        (
            *(x, stack.down, hidden, *groups, stack.ranks, np.int64(x.stride(0))),
            *map(np.int32, (num_slots, inputs, stack.rank, width)),
        ),
    )
    ends = np.cumsum(stack.sizes) if max(stack.matrix) else np.full(3, outputs)
    second, third = (*ends[:-1], outputs, outputs)[:2]
    launcher.kernel(SOURCE, f"lora_expand<{kind}, {cuda_type(out.dtype, 'out')}>")(
        (tiles, -(-outputs // THREADS), 1),
        (THREADS, 1, 1),
        (
            *(hidden, stack.up, out, *groups, stack.ranks, np.int64(out.stride(0))),
            *map(np.int32, (num_slots, outputs, stack.rank, width, second, third)),
        ),
    )
