"""Unpacks the blocks of GGUF files to grouped weights; https://github.com/ggml-org/ggml has the formats.

A block has scales, and codes of 2 to 8 bits whose bits may be stored in separate parts. All results are exact: a weight
equals the float32 number of ggml's own dequantization, except for the order of multiplication where a scale has a
scale.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_lite.errors import ModelError
from vllm_lite.kernels import gguf_small_blocks as small
from vllm_lite.kernels.gguf_small_blocks import BlockParts, half, nibbles
from vllm_lite.kernels.grouped import INT4, INT8, UINT4, UINT8, GroupedWeight

IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
"""Values of IQ4_NL's codes."""
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Values of MXFP4's codes."""


ELEMENTS_AT_ONCE = 1 << 20


class Layout(NamedTuple):
    """Layout of the blocks of one type."""

    elements: int
    num_bytes: int
    values: torch.Tensor
    group_size: int
    parts: Callable[[torch.Tensor], BlockParts]
    """Unpacks blocks, uint8 [blocks, num_bytes]."""
    has_minima: bool = False

    @property
    def has_supers(self) -> bool:
        """Whether scales and minima are integers times a number of their block."""
        return self.elements > self.group_size


class BlockRows(NamedTuple):
    """A matrix as it is stored in a file."""

    kind: str
    """ggml's name for the type."""
    blocks: torch.Tensor
    """uint8 [num_outputs, bytes of a row], whole blocks."""
    order: torch.Tensor | None = None
    """See GroupedWeight."""
    factors: torch.Tensor | None = None
    """float32 [num_outputs]: each row is multiplied by one. Only for types that are not native."""


def take_apart(rows: BlockRows) -> GroupedWeight:
    """Unpack rows to a grouped weight. Raises ModelError for an unsupported type, with its name, and for rows that are
    not whole blocks."""
    own, blocks_per_row = layout(rows)
    num_rows, num_inputs = len(rows.blocks), blocks_per_row * own.elements
    parts = own.parts(rows.blocks.reshape(-1, own.num_bytes))
    shape = num_rows, num_inputs // own.group_size
    minima = None if parts.minima is None else parts.minima.reshape(shape)
    scales = parts.scales.reshape(shape)
    return GroupedWeight(
        parts.codes.reshape(num_rows, num_inputs),
        own.values,
        scales if rows.factors is None else scales * rows.factors.unsqueeze(1),
        own.group_size,
        minima,
        rows.order,
    )


def layout(rows: BlockRows) -> tuple[Layout, int]:
    """The layout of the type, and the number of blocks in a row. Raises ModelError as `take_apart` does."""
    if rows.kind not in _LAYOUTS:
        raise ModelError(f"blocks of type {rows.kind} are not supported; supported: {', '.join(_LAYOUTS)}")
    own, row_bytes = _LAYOUTS[rows.kind], rows.blocks.shape[1]
    if row_bytes % own.num_bytes or rows.blocks.dtype != torch.uint8:
        raise ModelError(
            f"rows of {row_bytes} bytes are not whole blocks of type {rows.kind}, which have {own.num_bytes}"
        )
    return own, row_bytes // own.num_bytes


def is_native(kind: str) -> bool:
    """Whether the native library unpacks blocks of this type."""
    return kind not in _SMALL


def take_apart_by_rows(rows: BlockRows) -> GroupedWeight:
    """Unpack as `take_apart` does, some rows at a time: intermediate integers need dozens of bytes for each weight."""
    own, blocks_per_row = layout(rows)
    count = max(1, ELEMENTS_AT_ONCE // max(1, blocks_per_row * own.elements))
    if count >= len(rows.blocks):
        return take_apart(rows)
    factors = [None] * -(-len(rows.blocks) // count) if rows.factors is None else rows.factors.split(count)
    each = zip(rows.blocks.split(count), factors, strict=True)
    parts = [take_apart(rows._replace(blocks=some, factors=own_factors)) for some, own_factors in each]
    codes, scales = (torch.cat(each) for each in zip(*((part.codes, part.scales) for part in parts), strict=True))
    return parts[0]._replace(codes=codes, scales=scales)


def _bits(words: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 4] -> the 32 bits of each, lowest first, uint8 [blocks, 32]."""
    return ((words.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> BlockParts:
    return BlockParts(nibbles(blocks[:, 2:]), half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> BlockParts:
    return BlockParts(nibbles(blocks[:, 4:]), half(blocks, 0), -half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> BlockParts:
    return BlockParts(nibbles(blocks[:, 6:]) + (_bits(blocks[:, 2:6]) << 4) + 112, half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> BlockParts:
    return BlockParts(nibbles(blocks[:, 8:]) + (_bits(blocks[:, 4:8]) << 4), half(blocks, 0), -half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> BlockParts:
    return BlockParts(blocks[:, 2:] ^ 128, half(blocks, 0))


def _mxfp4(blocks: torch.Tensor) -> BlockParts:
    """Unpack MXFP4. The scale is a power of two; exponent byte 0 is the smallest one."""
    exponents = blocks[:, :1].float() - 127
    return BlockParts(nibbles(blocks[:, 1:]), torch.exp2(exponents))


def _twos(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 64] -> [blocks, 256] of 2 bits: of each 32 bytes all lowest pairs, then the next, and so on."""
    halves = packed.view(len(packed), 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return ((halves >> shifts) & 3).flatten(1)


def _q2_k(blocks: torch.Tensor) -> BlockParts:
    both = blocks[:, :16]
    scales, minima = half(blocks, 80) * (both & 15), half(blocks, 82) * (both >> 4)
    return BlockParts(_twos(blocks[:, 16:80].contiguous()), scales, minima)


def _q3_k(blocks: torch.Tensor) -> BlockParts:
    """Unpack Q3_K. A set third bit means that 4 is not subtracted; 16 scales of 6 bits take 12 bytes."""
    high = blocks[:, :32].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1) & 1
    codes = _twos(blocks[:, 32:96].contiguous()) + (high.flatten(1) << 2) + 124
    packed = blocks[:, 96:108]
    low = nibbles(packed[:, :8])
    top = (packed[:, 8:].unsqueeze(1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 4, 1) & 3).flatten(1)
    scales = (low | top << 4).float() - 32
    return BlockParts(codes, half(blocks, 108) * scales)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [blocks, 12] -> 8 scales and 8 minima of 6 bits each."""
    first, second, third = packed.contiguous().split(4, dim=1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return scales, minima


def _in_pairs(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 128] -> [blocks, 256]: of each 32 bytes the low halves, then the high ones."""
    return nibbles(packed.reshape(len(packed), 4, 32)).flatten(1)


def _q4_k(blocks: torch.Tensor) -> BlockParts:
    scales, minima = _six_bits(blocks[:, 4:16])
    return BlockParts(_in_pairs(blocks[:, 16:]), half(blocks, 0) * scales, half(blocks, 2) * minima)


def _q5_k(blocks: torch.Tensor) -> BlockParts:
    scales, minima = _six_bits(blocks[:, 4:16])
    high = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1) & 1
    codes = _in_pairs(blocks[:, 48:]) | high.flatten(1) << 4
    return BlockParts(codes, half(blocks, 0) * scales, half(blocks, 2) * minima)


def _q6_k(blocks: torch.Tensor) -> BlockParts:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    tops = high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1) & 3
    codes = nibbles(low).flatten(1) | tops.flatten(1) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return BlockParts(codes + 96, half(blocks, 208) * scales)


def _iq4_xs(blocks: torch.Tensor) -> BlockParts:
    """Unpack IQ4_XS, with 8 scales of 6 bits: the high two bits of all in 2 bytes, the low four in 4 bytes."""
    high = blocks[:, 2:4].unsqueeze(2) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    low = blocks[:, 4:8].unsqueeze(2) >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    scales = (low.flatten(1) | high.flatten(1) << 4).float() - 32
    codes = nibbles(blocks[:, 8:].reshape(len(blocks), 8, 16)).flatten(1)
    return BlockParts(codes, half(blocks, 0) * scales)


_KINDS = {
    "Q4_0": Layout(32, 18, INT4, 32, _q4_0),
    "Q4_1": Layout(32, 20, UINT4, 32, _q4_1, has_minima=True),
    "Q5_0": Layout(32, 22, INT8, 32, _q5_0),
    "Q5_1": Layout(32, 24, UINT8, 32, _q5_1, has_minima=True),
    "Q8_0": Layout(32, 34, INT8, 32, _q8_0),
    "Q2_K": Layout(256, 84, UINT4, 16, _q2_k, has_minima=True),
    "Q3_K": Layout(256, 110, INT8, 16, _q3_k),
    "Q4_K": Layout(256, 144, UINT4, 32, _q4_k, has_minima=True),
    "Q5_K": Layout(256, 176, UINT8, 32, _q5_k, has_minima=True),
    "Q6_K": Layout(256, 210, INT8, 16, _q6_k),
    "IQ4_NL": Layout(32, 18, IQ4, 32, _q4_0),
    "IQ4_XS": Layout(256, 136, IQ4, 32, _iq4_xs),
    "MXFP4": Layout(32, 17, FP4, 32, _mxfp4),
}
_SMALL = {
    "IQ2_XXS": Layout(256, 66, small.IQ2, 32, small.iq2_xxs),
    "IQ2_XS": Layout(256, 74, small.IQ2, 16, small.iq2_xs),
    "IQ2_S": Layout(256, 82, small.IQ2, 16, small.iq2_s),
    "IQ3_XXS": Layout(256, 98, small.IQ3_XXS, 32, small.iq3_xxs),
    "IQ3_S": Layout(256, 110, small.IQ3_S, 32, small.iq3_s),
    "IQ1_S": Layout(256, 50, small.IQ1, 32, small.iq1_s),
    "IQ1_M": Layout(256, 56, small.IQ1, 16, small.iq1_m),
    "TQ1_0": Layout(256, 54, INT4, 256, small.tq1_0),
    "TQ2_0": Layout(256, 66, INT4, 256, small.tq2_0),
    "NVFP4": Layout(64, 36, FP4, 16, small.nvfp4),
}
"""Types of blocks that only torch unpacks."""
_LAYOUTS = _KINDS | _SMALL
BLOCK = {name: (kind.elements, kind.num_bytes) for name, kind in _LAYOUTS.items()}
"""Supported type -> elements and bytes of a block."""
