"""Unpacks blocks of GGUF files of 1 to 3 bits, and NVFP4: points of lattices with signs, powers of three, floats.

All become codes of 4 bits, which index a table of 16 values with signs. No native kernel reads these blocks, so torch
unpacks them once, when a model is loaded.
"""

from typing import NamedTuple

import torch

from vllm_lite.kernels.gguf_lattices import points


class BlockParts(NamedTuple):
    """Codes and scales of unpacked blocks."""

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


_SIGN2, _SIGN3 = 4, 8
"""Number that is added to the code of a negative element, for codes of 2 and of 3 bits."""


def _signed(magnitudes: tuple[float, ...], room: int) -> torch.Tensor:
    """Values of codes, float32 [16]: the first `room` are the magnitudes, the next `room` their negatives."""
    one = torch.zeros(room)
    one[: len(magnitudes)] = torch.tensor(magnitudes)
    table = torch.zeros(16)
    table[: 2 * room] = torch.cat((one, -one))
    return table


IQ2 = _signed((8, 25, 43), _SIGN2)
IQ3_XXS = _signed((4, 12, 20, 28, 36, 44, 52, 62), _SIGN3)
IQ3_S = _signed((1, 3, 5, 7, 9, 11, 13, 15), _SIGN3)
IQ1 = torch.tensor([-7.0, 1, 9, 0, -9, -1, 7, 0, *[0] * 8])
"""Values in eighths: -1, 0 and 1, each plus one eighth; then each minus one eighth."""
_EIGHTH = 0.125
_UE4M3 = torch.cat(
    [torch.arange(8) / 512, *((torch.arange(8) + 8) * 2.0 ** (power - 10) for power in range(1, 16))]
).repeat(2)
_UE4M3[127] = 0.0  # NaN, which ggml reads as 0; code 255, with a bit that no scale has, stays a number
_EIGHT_BITS, _FOUR_SEVENS = tuple(range(8)), (0, 7, 14, 21)


def _parity(signs: torch.Tensor) -> torch.Tensor:
    """Extend 7 sign bits, int64 [..., n], to 8; the last one makes the number of set bits even."""
    count = ((signs.unsqueeze(-1) >> torch.arange(7)) & 1).sum(dim=-1)
    return signs | (count & 1) << 7


def _lattice(name: str, indices: torch.Tensor, signs: torch.Tensor, sign: int) -> torch.Tensor:
    """indices: [blocks, n], signs: [blocks, bytes], a bit for each element -> codes, uint8 [blocks, elements]."""
    magnitudes = points(name)[indices].flatten(1)
    return magnitudes + sign * fields(signs, _EIGHT_BITS, 1).to(torch.uint8)


def _halves_above(scales: torch.Tensor) -> torch.Tensor:
    return scales + 0.5


def iq2_xxs(blocks: torch.Tensor) -> BlockParts:
    """Unpack IQ2_XXS. Of 8 bytes, four have the index of a point each; the others have 7 signs for each point, then the
    scale."""
    pairs = blocks[:, 2:].unflatten(1, (8, 8))
    above = words(pairs[:, :, 4:].flatten(1), 4)
    signs = _parity(fields(above, _FOUR_SEVENS, 127))
    scales = half(blocks, 0) * _halves_above(above >> 28) * 0.25
    return BlockParts(_lattice("IQ2_XXS", pairs[:, :, :4].flatten(1).long(), signs, _SIGN2), scales)


def iq2_xs(blocks: torch.Tensor) -> BlockParts:
    """Unpack IQ2_XS. Each word of 16 bits has the index of a point and 7 signs."""
    both = words(blocks[:, 2:66], 2)
    scales = half(blocks, 0) * _halves_above(fields(blocks[:, 66:], (0, 4), 15)) * 0.25
    return BlockParts(_lattice("IQ2_XS", both & 511, _parity(both >> 9), _SIGN2), scales)


def iq2_s(blocks: torch.Tensor) -> BlockParts:
    high = fields(blocks[:, 66:74], (0, 2, 4, 6), 3).long()
    scales = half(blocks, 0) * _halves_above(fields(blocks[:, 74:], (0, 4), 15)) * 0.25
    return BlockParts(_lattice("IQ2_S", blocks[:, 2:34].long() | high << 8, blocks[:, 34:66], _SIGN2), scales)


def iq3_xxs(blocks: torch.Tensor) -> BlockParts:
    """Unpack IQ3_XXS: like IQ2_XXS, but all points come first and have four elements."""
    above = words(blocks[:, 66:], 4)
    signs = _parity(fields(above, _FOUR_SEVENS, 127))
    scales = half(blocks, 0) * _halves_above(above >> 28) * 0.5
    return BlockParts(_lattice("IQ3_XXS", blocks[:, 2:66].long(), signs, _SIGN3), scales)


def iq3_s(blocks: torch.Tensor) -> BlockParts:
    high = fields(blocks[:, 66:74], _EIGHT_BITS, 1).long()
    scales = half(blocks, 0) * (1 + 2 * fields(blocks[:, 106:], (0, 4), 15).float())
    return BlockParts(_lattice("IQ3_S", blocks[:, 2:66].long() | high << 8, blocks[:, 74:106], _SIGN3), scales)


def iq1_s(blocks: torch.Tensor) -> BlockParts:
    """Unpack IQ1_S. Each word of 16 bits has the high bits of four points, a scale, and a bit that subtracts an
    eighth."""
    above = words(blocks[:, 34:], 2)
    codes = points("IQ1")[blocks[:, 2:34].long() | fields(above, (0, 3, 6, 9), 7) << 8]
    taken = (above >> 15).to(torch.uint8).repeat_interleave(4, dim=1)
    scales = half(blocks, 0) * (2 * (above >> 12 & 7) + 1) * _EIGHTH
    return BlockParts((codes + _SIGN2 * taken.unsqueeze(-1)).flatten(1), scales)


def iq1_m(blocks: torch.Tensor) -> BlockParts:
    """Unpack IQ1_M. The scale of the block is in the high bits of the four words with the scales of 16 elements
    each."""
    above, scale_words = blocks[:, 32:48], words(blocks[:, 48:], 2)
    codes = points("IQ1")[blocks[:, :32].long() | fields(above, (0, 4), 7).long() << 8]
    taken = fields(above, (3, 7), 1)
    bits = ((scale_words >> 12) << torch.tensor([0, 4, 8, 12])).sum(dim=1, keepdim=True)
    scale = bits.to(torch.uint16).view(torch.float16).float()
    scales = scale * (2 * fields(scale_words, (0, 3, 6, 9), 7) + 1) * _EIGHTH
    return BlockParts((codes + _SIGN2 * taken.unsqueeze(-1)).flatten(1), scales)


def tq1_0(blocks: torch.Tensor) -> BlockParts:
    """Unpack TQ1_0. A byte has five digits in base three; their number is scaled from 243 to 256."""
    runs = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    digits = []
    for packed, count in runs:
        factors = torch.tensor([3**power for power in range(count)])
        fractions = (packed.unsqueeze(1).long() * factors.view(1, -1, 1)) & 255
        digits.append((fractions * 3 >> 8).flatten(1))
    return BlockParts((torch.cat(digits, dim=1) + 7).to(torch.uint8), half(blocks, 52))


def tq2_0(blocks: torch.Tensor) -> BlockParts:
    halves = blocks[:, :64].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return BlockParts(((halves >> shifts) & 3).flatten(1) + 7, half(blocks, 64))


def nvfp4(blocks: torch.Tensor) -> BlockParts:
    """Unpack NVFP4. Scales are unsigned floats with 4 bits of exponent and 3 of mantissa."""
    return BlockParts(nibbles(blocks[:, 4:].unflatten(1, (4, 8))).flatten(1), _UE4M3[blocks[:, :4].int()])
