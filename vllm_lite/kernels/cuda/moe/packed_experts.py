"""Experts with packed quantized weights on a GPU. Kernels: csrc/cuda/packed_experts.cuh.

Few rows are multiplied with the codes. If experts have FOR_MANY rows or more on average, groups of experts are
dequantized one after another into reused memory and multiplied as dense ones.
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cuda.launcher import Arg, Launcher, cuda_type, require
from vllm_lite.kernels.cuda.moe.experts import FOR_MANY, KINDS, UNGATED, TileProducts, check_bias
from vllm_lite.kernels.cuda.moe.packed_stack import PackedStack
from vllm_lite.kernels.cuda.moe.sorted_experts import Sorted, SortedExperts
from vllm_lite.kernels.cuda.weights.many_rows import THREADS, WARPS
from vllm_lite.kernels.cuda.weights.packed_linear import DTYPES, Tiles, aligned, spans_between_scales, tiles_for
from vllm_lite.kernels.cuda.weights.packed_weight import TILE

SOURCE = "packed_experts.cuh"
SCRATCH_BYTES = 256 << 20
"""Memory for dequantized experts: at least one at a time, and as many as fit."""


class PackedStacks(NamedTuple):
    """The weights of all experts of a rank, and the biases that this rank adds."""

    gate_up: PackedStack
    """Tiles of gate and up, alternating; without a gate [inner, hidden] of each expert."""
    down: PackedStack
    gate_up_bias: torch.Tensor | None = None  # [num_experts, 2 * inner], the gate first
    down_bias: torch.Tensor | None = None  # [num_experts, hidden]


class GpuPackedExperts(SortedExperts):
    """Experts from number `first` on, each an MLP, gated unless its activation is UNGATED."""

    def __init__(
        self, launcher: Launcher, stacks: PackedStacks, first: int, activation: Activation, dtype: torch.dtype
    ) -> None:
        """dtype: of rows and biases. Raises ValueError unless the weights are those of such MLPs."""
        gate_up, down = stacks.gate_up, stacks.down
        (hidden, inner), num_experts, gated = down.shape, len(down.codes), activation != UNGATED
        super().__init__(launcher, first, (num_experts, hidden, inner), dtype)
        require(
            gate_up.shape == ((1 + gated) * inner, hidden) and len(gate_up.codes) == num_experts,
            f"experts of {list(gate_up.shape)} and {list(down.shape)} are not MLPs with{'' if gated else 'out'} a gate",
        )
        require(
            gate_up.in_turn == gated and not down.in_turn,
            "tiles of gate and up must lie in turn, and those of other matrices in their order",
        )
        require(dtype in DTYPES, f"rows must be float16 or bfloat16, not {dtype}")
        check_bias("gate and up", stacks.gate_up_bias, (num_experts, gate_up.shape[0]), dtype)
        check_bias("down", stacks.down_bias, (num_experts, hidden), dtype)
        self._stacks, self._activation = stacks, activation
        self._dense = TileProducts(launcher, num_experts)

    @property
    def down_bias(self) -> torch.Tensor | None:
        return self._stacks.down_bias

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, without biases."""
        return self._stacks.gate_up.num_bytes + self._stacks.down.num_bytes

    def multiply(self, x: torch.Tensor, in_order: Sorted) -> torch.Tensor:
        many = len(in_order.pairs) >= FOR_MANY * self.num_experts
        return self._by_numbers(x, in_order) if many else self._by_codes(x, in_order)

    def _by_codes(self, x: torch.Tensor, in_order: Sorted) -> torch.Tensor:
        num_pairs, (_, hidden, inner), down = len(in_order.pairs), self.shape, self._stacks.down
        make = x.new_zeros if down.padded[1] > inner else x.new_empty
        activated = make(num_pairs, down.padded[1])
        rows = aligned(x, self._stacks.gate_up.padded[1])
        self._few(activated[:, :inner], rows, self._stacks.gate_up, in_order, self._activation)
        wide = torch.empty(num_pairs, hidden, dtype=torch.float32, device=x.device)
        self._few(wide, activated, down, in_order, None)
        return wide

    def _few(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        weights: PackedStack,
        in_order: Sorted,
        activation: Activation | None,
    ) -> None:
        """Multiply few rows with the codes. With an activation, `rows` are tokens, else places."""
        num_pairs, size = out.shape
        tiles = tiles_for(-(-num_pairs // self.num_experts))
        if weights.in_turn:
            tiles = Tiles(tiles.rows, max(2, tiles.outputs))
        at_once = -(-num_pairs // (self.num_experts * 8 * tiles.rows))  # if all experts have equally many rows
        kind = "NONE" if activation is None else KINDS[activation]
        pairs, top = (None, 1) if activation is None else (in_order.pairs, num_pairs // len(rows))
        flush = spans_between_scales(weights.kind, weights.group_shift, weights.scales)
        x, written, scales = (cuda_type(each.dtype, "rows") for each in (rows, out, weights.scales))
        of_codes = f"packed::{weights.kind}, packed::{weights.less}, {flush}, {tiles.rows}, {tiles.outputs}"
        biases = self._stacks.gate_up_bias if weights.in_turn else None
        args: tuple[Arg, ...] = (
            *(out, rows, weights.codes, weights.scales, biases, in_order.starts, pairs),
            *(np.int64(out.stride(0)), np.int64(rows.stride(0))),
            *map(np.int32, (self.num_experts, weights.padded[0], size, weights.num_chunks)),
            *map(np.int32, (weights.scales.shape[1], weights.group_shift, top)),
        )
        grid = (weights.padded[0] // (TILE * tiles.outputs), min(num_pairs, self.num_experts), at_once)
        kernel = self.launcher.kernel(SOURCE, f"packed_experts<{x}, {written}, experts::{kind}, {scales}, {of_codes}>")
        kernel(grid, (THREADS, 1, 1), args, 16 * tiles.rows * tiles.outputs * THREADS)

    def _by_numbers(self, x: torch.Tensor, in_order: Sorted) -> torch.Tensor:
        num_pairs, (num_experts, hidden, inner) = len(in_order.pairs), self.shape
        activated = x.new_empty(num_pairs, inner)
        wide = torch.empty(num_pairs, hidden, dtype=torch.float32, device=x.device)
        gate_up, down, biases, _ = self._stacks
        at_once = max(1, SCRATCH_BYTES // (x.element_size() * hidden * (gate_up.shape[0] + inner)))
        some = min(at_once, num_experts)
        first, second = x.new_empty(some, *gate_up.shape), x.new_empty(some, *down.shape)
        for begin in range(0, num_experts, at_once):
            part = slice(begin, min(begin + at_once, num_experts))
            own = in_order._replace(starts=in_order.starts[begin : part.stop + 1])
            own_biases = None if biases is None else biases[part]
            weights = self.widen(gate_up.some(part), first), self.widen(down.some(part), second)
            self._dense.multiply(activated, x, (weights[0], own_biases), own, self._activation)
            self._dense.multiply(wide, activated, (weights[1], None), own, None)
        return wide

    def widen(self, weights: PackedStack, into: torch.Tensor) -> torch.Tensor:
        """Dequantize the weights into the first elements of `into`: [experts, outputs, inputs]."""
        (size, depth), num_experts, padded = weights.shape, len(weights.codes), weights.padded[0]
        types = f"{cuda_type(into.dtype, 'rows')}, {cuda_type(weights.scales.dtype, 'scales')}"
        name = f"widen_experts<{types}, packed::{weights.kind}, packed::{weights.less}>"
        sizes = int(weights.in_turn), padded, size, depth, weights.num_chunks, weights.scales.shape[1]
        args: tuple[Arg, ...] = into, weights.codes, weights.scales, *map(np.int32, (*sizes, weights.group_shift))
        grid = (-(-weights.num_chunks // WARPS), padded // TILE, num_experts)
        self.launcher.kernel(SOURCE, name)(grid, (THREADS, 1, 1), args)
        return into[:num_experts]
