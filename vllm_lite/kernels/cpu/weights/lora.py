"""One native operation for the low-rank adapters of a linear layer. Kernel: csrc/cpu/lora.cpp."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_lite.kernels.cpu.dtypes import FLOATS, dtype_code
from vllm_lite.kernels.cpu.library import function, int32, int64, pointer

BLOCK = 32
"""Outputs of a block of B; kLoraBlock."""
RANKS, INPUTS = 4, 32
"""Ranks and inputs of a block of A; kLoraRanks, kLoraInputs."""
MAX_PARTS = 6
"""Maximum projections of one layer; kMaxParts."""

_TYPES = (pointer, pointer, pointer, int64, pointer, int64, int32, pointer, int64, int32)


class _Slot(ctypes.Structure):
    """The same record as `LoraSlot` in csrc/cpu/lora.h."""

    _fields_ = (
        ("down", pointer),
        ("up", pointer),
        ("ranks", int32 * MAX_PARTS),
        ("num_ranks", int32),
        ("gain", pointer),
        ("shift", pointer),
    )


class _Layer(ctypes.Structure):
    """The same record as `LoraLayer` in csrc/cpu/lora.h."""

    _fields_ = (
        ("slots", pointer),
        ("num_inputs", int64),
        ("sizes", int64 * MAX_PARTS),
        ("matrix", int32 * MAX_PARTS),
        ("num_projections", int32),
    )


class Lengths(NamedTuple):
    """DoRA's magnitudes: each output of a layer, with its adapter's part added, is multiplied by `gain`; then `shift`
    is added."""

    gain: torch.Tensor  # float32 [sum of sizes]
    shift: torch.Tensor  # float32 [sum of sizes]


class PackedLora(NamedTuple):
    """One adapter's matrices for one layer, in the kernel's layout."""

    down: torch.Tensor  # in blocks
    up: torch.Tensor  # of all projections, in blocks
    ranks: tuple[int, ...]  # of each matrix
    lengths: Lengths | None = None


class LoraSlots:
    """The adapters of one layer. Projection i has `sizes[i]` outputs and uses the down matrix number `matrix[i]`; all
    have the same inputs. No address ever changes."""

    def __init__(self, num_slots: int, num_inputs: int, sizes: Sequence[int], matrix: Sequence[int]) -> None:
        if not 0 < len(sizes) == len(matrix) <= MAX_PARTS:
            raise ValueError(f"a layer must have 1 to {MAX_PARTS} projections, got {len(sizes)}")
        self.num_inputs, self.sizes, self.matrix = num_inputs, tuple(sizes), tuple(matrix)
        self._slots = (_Slot * num_slots)()
        self._kept: list[PackedLora | None] = [None] * num_slots
        count = len(self.sizes)
        self._layer = _Layer(
            ctypes.addressof(self._slots),
            num_inputs,
            (int64 * MAX_PARTS)(*self.sizes),
            (int32 * MAX_PARTS)(*self.matrix),
            count,
        )
        self.address, self.num_slots = ctypes.addressof(self._layer), num_slots

    def pack(
        self,
        down: Sequence[torch.Tensor | None],
        up: Sequence[torch.Tensor | None],
        lengths: Lengths | None = None,
    ) -> PackedLora:
        """Pack an adapter. down: [rank, num_inputs] of each matrix, up: [size, rank] of each projection; None if the
        adapter does not change it. lengths: None without DoRA."""
        ranks = tuple(0 if each is None else len(each) for each in down)
        rows = [each for each in down if each is not None]
        blocks = [_blocks(each) for each in up if each is not None]
        return PackedLora(_rank_blocks(torch.cat(rows)), torch.cat(blocks), ranks, lengths)

    def put(self, slot: int, packed: PackedLora | None) -> None:
        """Put an adapter, or None, into `slot`. No step may be running."""
        self._kept[slot] = packed
        if packed is None:
            self._slots[slot] = _Slot()
            return
        ranks = (int32 * MAX_PARTS)(*packed.ranks)
        lengths = (None, None) if packed.lengths is None else [each.data_ptr() for each in packed.lengths]
        self._slots[slot] = _Slot(packed.down.data_ptr(), packed.up.data_ptr(), ranks, sum(packed.ranks), *lengths)

    def add(self, x: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' outputs for rows of `x` to the same rows of `out`. x: [n, num_inputs], in the dtype of the
        adapters; out: [n, sum of sizes], in the dtype of x or float32. rows: int32 [any], starts: int32 [num_slots +
        1]: the rows rows[starts[i]:starts[i + 1]] have the adapter in slot i."""
        if x.dtype not in FLOATS or out.dtype not in (x.dtype, torch.float32) or x.stride(1) != 1 or out.stride(1) != 1:
            raise ValueError(f"rows must be contiguous floats, the same or float32 out, got {x.dtype} -> {out.dtype}")
        if x.shape[1] != self.num_inputs or out.shape != (len(x), sum(self.sizes)):
            raise ValueError(
                f"{list(x.shape)} -> {list(out.shape)} with {self.num_inputs} inputs, outputs {self.sizes}"
            )
        function("vllm_lite_lora", _TYPES)(
            self.address, rows.data_ptr(), starts.data_ptr(), len(self._slots),
            x.data_ptr(), x.stride(0), dtype_code(x.dtype),
            out.data_ptr(), out.stride(0), dtype_code(out.dtype),
        )  # fmt: skip


def _rank_blocks(down: torch.Tensor) -> torch.Tensor:
    """[ranks, inputs] -> [blocks, inputs / INPUTS, RANKS, INPUTS]"""
    ranks, inputs = down.shape
    padded = torch.nn.functional.pad(down, (0, -inputs % INPUTS, 0, -ranks % RANKS))
    return padded.view(-1, RANKS, padded.shape[1] // INPUTS, INPUTS).transpose(1, 2).contiguous()


def _blocks(up: torch.Tensor) -> torch.Tensor:
    """[size, rank] -> [blocks, rank, BLOCK], flat."""
    size, rank = up.shape
    padded = torch.nn.functional.pad(up, (0, 0, 0, -size % BLOCK))
    return padded.view(-1, BLOCK, rank).transpose(1, 2).reshape(-1)
