"""Cases of the kernels of adapters, as named functions of a launcher and a device; no pytest in here."""

import numpy as np
import torch

from tests.kernels.cases import Case
from tests.kernels.fused_cases import assert_rounded, draw, with_gaps
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.weights import lora
from vllm_lite.layers.weights.adapter_rows import Grouped

RANKS = (16, 3, 0, 8)
"""Rank of the adapter in each slot; 0: the slot is empty."""


def filled(
    inputs: int, sizes: list[int], matrix: list[int], dtype: torch.dtype, device: torch.device
) -> lora.LoraStack:
    """Slots with adapters of RANKS; elements that no adapter fills are NaN."""
    like = torch.empty(0, dtype=dtype, device=device)
    stack = lora.LoraStack.empty(len(RANKS), 16, inputs, sizes, matrix, like)
    stack.down.fill_(torch.nan)
    stack.up.fill_(torch.nan)
    stack.ranks.copy_(torch.tensor(RANKS))
    for slot, rank in enumerate(RANKS):
        for number in range(max(matrix) + 1):
            rows = slice(16 * number, 16 * number + rank)
            stack.down[slot, rows] = draw((rank, inputs + number + slot), dtype, device)[:, :inputs]
        stack.up[slot, :rank] = draw((rank, sum(sizes) + slot), dtype, device)[:, : sum(sizes)]
    return stack


def exact(stack: lora.LoraStack, slots: np.ndarray, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Row by row, in float64."""
    result = out.double().cpu()
    for row, slot in enumerate(slots.tolist()):
        rank, first = RANKS[slot] if slot >= 0 else 0, 0
        for size, number in zip(stack.sizes, stack.matrix, strict=True):
            down = stack.down[slot, 16 * number : 16 * number + rank].double().cpu()
            up = stack.up[slot, :rank, first : first + size].double().cpu()
            result[row, first : first + size] += x[row].double().cpu() @ down.t() @ up
            first += size
    return result


def added(inputs: int, sizes: list[int], matrix: list[int], dtype: torch.dtype, out_dtype: torch.dtype) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        stack = filled(inputs, sizes, matrix, dtype, device)
        for num_rows in (1, 5, 40):
            slots = np.random.default_rng(num_rows).integers(-1, len(RANKS), num_rows)
            groups = Grouped.empty(len(RANKS), num_rows)
            groups.fill(slots)
            x = with_gaps(draw((num_rows, inputs), dtype, device), 8)
            out = with_gaps(draw((num_rows, sum(sizes)), out_dtype, device), 8)
            expected = exact(stack, slots, x, out)
            hidden = torch.full((num_rows, stack.down.shape[1]), torch.nan, device=device)
            lora.add(launcher, stack, groups.to(device), x, out, hidden)
            assert_rounded(out, expected)

    return run


HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
CASES: list[tuple[str, Case]] = [
    ("one_bfloat16", added(64, [72], [0], BF16, BF16)),
    ("three_matrices_half", added(96, [160, 32, 40], [0, 1, 2], HALF, FLOAT)),
    ("three_of_one_matrix", added(64, [48, 16, 16], [0, 0, 0], BF16, BF16)),
    ("two_matrices", added(64, [130, 130], [0, 1], BF16, BF16)),
    ("odd", added(37, [33], [0], BF16, BF16)),
    ("float", added(64, [40], [0], FLOAT, FLOAT)),
]
