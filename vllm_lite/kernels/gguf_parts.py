"""Blocks of GGUF files as codes and scales, and the reading of bits from their bytes."""

from typing import NamedTuple

import torch


class BlockParts(NamedTuple):
    """Blocks, taken apart."""

    codes: torch.Tensor
    """uint8 [blocks, elements]"""
    scales: torch.Tensor
    """float32 [blocks, groups]"""
    minima: torch.Tensor | None = None


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block -> float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> [..., 2 n]: all low halves, then all high ones."""
    packed, size = packed.contiguous(), packed.shape[-1]
    out = packed.new_empty(*packed.shape[:-1], 2 * size)
    torch.bitwise_and(packed, 15, out=out[..., :size])
    torch.bitwise_right_shift(packed, 4, out=out[..., size:])
    return out


def fields(words: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Integers [blocks, n] -> those of the bits in `mask` after each of the shifts, [blocks, n * len(shifts)]."""
    each = words.unsqueeze(-1) >> torch.tensor(shifts, dtype=words.dtype)
    return torch.bitwise_and(each, mask).flatten(1)


def words(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Little-endian words of `size` bytes, uint8 [blocks, n] -> int64 [blocks, n / size]."""
    each = blocks.unflatten(1, (-1, size)).long()
    return torch.sum(each << torch.arange(0, 8 * size, 8), dim=-1)
