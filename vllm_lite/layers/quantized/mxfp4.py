"""MXFP4 as gpt-oss stores it: `<name>_blocks` uint8 [experts, outputs, inputs / 32, 16], the low half of a byte first,
and `<name>_scales` uint8 [experts, outputs, inputs / 32], the exponents of powers of two plus 127.

The format is that of the Open Compute Project's Microscaling Formats 1.0: E2M1 numbers with an E8M0 scale for each 32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_lite.checkpoint.quantization.spec import MxFp4
from vllm_lite.errors import ModelError
from vllm_lite.kernels.grouped import E2M1, GroupedWeight, halves
from vllm_lite.layers.quantized.stored import CPU, QuantizedWeight, in_units
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape, StoredWeight
from vllm_lite.layers.weights.weight_slot import WeightSlot, WeightStack

BLOCK = 32
"""Inputs that share a scale."""
NOT_A_NUMBER = 255
"""The scale that encodes NaN."""


def stored(_: MxFp4, names: Sequence[str], shape: LinearShape) -> StoredWeight:
    """The weight of one expert's projections `names`, stacked; see QuantizedForm. Only for experts that are stored
    together."""
    if shape.stacked is None:
        return DENSE.stored(names, shape)
    if shape.inputs.total % BLOCK:
        raise ModelError(f"{names[0]}: {shape.inputs.total} inputs are not whole blocks of {BLOCK}")
    blocks = in_units(shape.inputs, BLOCK)
    codes = _stack(names, shape, "_blocks", (blocks.total, 16), (blocks.start, 0), (blocks.size, 16))
    scales = _stack(names, shape, "_scales", (blocks.total,), (blocks.start,), (blocks.size,))
    stacks = codes, scales
    return QuantizedWeight(stacks, _Reader(names[0]).take, shape)


def _stack(
    names: Sequence[str],
    shape: LinearShape,
    ending: str,
    inner: tuple[int, ...],
    start: tuple[int, ...],
    size: tuple[int, ...],
) -> WeightStack:
    """Request a rank's box (start, size) of the tensors `<name><ending>`: [outputs, *inner] for each expert."""
    slots = (
        WeightSlot(
            f"{name}{ending}",
            (rows.total, *inner),
            (rows.start, *start),
            (rows.size, *size),
            rows.order,
            stacked=shape.stacked,
        )
        for name, rows in zip(names, shape.outputs, strict=True)
    )
    return WeightStack(tuple(slots), torch.uint8, CPU)


@dataclass(frozen=True, slots=True)
class _Reader:
    name: str

    def take(self, blocks: torch.Tensor, scales: torch.Tensor) -> GroupedWeight:
        if bool((scales == NOT_A_NUMBER).any()):
            raise ModelError(f"{self.name}_scales: some are {NOT_A_NUMBER}, which is not a number")
        return GroupedWeight(halves(blocks).flatten(1), E2M1, _powers_of_two(scales), BLOCK)


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) of each uint8 e, made from the exponent bits of a float32, except 2^-127, which is denormal."""
    bits = exponents.to(torch.int32) << 23
    return torch.where(exponents == 0, 1 << 22, bits).view(torch.float32)
