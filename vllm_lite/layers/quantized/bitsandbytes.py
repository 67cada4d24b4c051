"""bitsandbytes of 4 bits, see https://github.com/bitsandbytes-foundation: numbers of a table, times a scale.

`weight` is uint8 [outputs * inputs / 2, 1], the high half of a byte first. `weight.absmax` has a scale for each 64
elements of the flattened matrix. `weight.quant_map` [16] is the table,
`weight.quant_state.bitsandbytes__nf4` (or fp4) is JSON in bytes.

With double quantization absmax is uint8: a scale is nested_quant_map[absmax[i]] * nested_absmax[i / 256] +
nested_offset, which is in the JSON.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from vllm_lite.checkpoint.quantization.spec import BitsAndBytes4
from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ModelError
from vllm_lite.kernels.grouped import GroupedWeight, halves
from vllm_lite.layers.quantized.stored import CPU, QuantizedWeight
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape, StoredWeight
from vllm_lite.layers.weights.weight_slot import WeightSlot, WeightStack, whole_slot

BLOCK, NESTED_BLOCK = 64, 256
"""Elements that share a scale, and scales that share one."""
MAX_STATE_BYTES = 1024
"""Maximum size of the JSON, which is about 170 bytes."""
_NF4 = [
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453],
    [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0],
    [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224],
    [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
]
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
TABLES = {"nf4": torch.tensor(_NF4).flatten(), "fp4": torch.tensor(_FP4 + tuple(-size for size in _FP4)) / 12}
"""Values of the codes, in units of a block's scale."""


def stored(spec: BitsAndBytes4, names: Sequence[str], shape: LinearShape) -> StoredWeight:
    """The weight of the projections `names`, stacked; see QuantizedForm. Experts that are stored together are dense."""
    if shape.stacked is not None:
        return DENSE.stored(names, shape)
    readers = [_Reader(spec, name, shape.inputs, rows) for name, rows in zip(names, shape.outputs, strict=True)]
    stacks = tuple(stack for reader in readers for stack in reader.stacks())
    return QuantizedWeight(stacks, _Readers(readers).take, shape)


@dataclass(frozen=True, slots=True)
class _Readers:
    readers: Sequence["_Reader"]

    def take(self, *tensors: torch.Tensor) -> GroupedWeight:
        each = len(tensors) // len(self.readers)
        parts = [reader.take(*tensors[each * at : each * (at + 1)]) for at, reader in enumerate(self.readers)]
        codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
        return parts[0]._replace(codes=codes, scales=scales)


class _State(msgspec.Struct):
    """The JSON of a matrix."""

    quant_type: str
    blocksize: int
    shape: tuple[int, ...]
    nested_blocksize: int | None = None
    nested_offset: float | None = None


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one projection."""

    spec: BitsAndBytes4
    name: str
    inputs: Split
    rows: Split

    @property
    def reads_rows(self) -> bool:
        """Whether this rank's rows are contiguous and begin at a byte; else it reads the whole matrix."""
        return self.rows.order is None and self.inputs.total % 2 == 0

    def stacks(self) -> tuple[WeightStack, ...]:
        per_row, num_elements = self.inputs.total // 2, self.rows.total * self.inputs.total
        size = -(-num_elements // 2)
        start, own = (self.rows.start * per_row, self.rows.size * per_row) if self.reads_rows else (0, size)
        weight = f"{self.name}.weight"
        num_blocks = -(-num_elements // BLOCK)
        state = f"{weight}.quant_state.bitsandbytes__{self.spec.table}"
        found = [
            (WeightSlot(weight, (size, 1), (start, 0), (own, 1)), torch.uint8),
            (whole_slot(f"{weight}.absmax", num_blocks), torch.uint8 if self.spec.nested else torch.float32),
            (whole_slot(f"{weight}.quant_map", 16), torch.float32),
            (whole_slot(state, MAX_STATE_BYTES)._replace(is_text=True), torch.uint8),
        ]
        if self.spec.nested:
            found.append((whole_slot(f"{weight}.nested_absmax", -(-num_blocks // NESTED_BLOCK)), torch.float32))
            found.append((whole_slot(f"{weight}.nested_quant_map", 256), torch.float32))
        return tuple(WeightStack((slot,), dtype, CPU) for slot, dtype in found)

    def take(
        self,
        weight: torch.Tensor,
        absmax: torch.Tensor,
        quant_map: torch.Tensor,
        state: torch.Tensor,
        *nested: torch.Tensor,
    ) -> GroupedWeight:
        """nested: absmax and map of the scales, if they are quantized too."""
        table = TABLES[self.spec.table]
        if not torch.allclose(quant_map, table, rtol=0, atol=1e-5):
            raise ModelError(f"{self.name}.weight.quant_map: {quant_map.tolist()} is not {self.spec.table}'s table")
        offset = self._offset(state)
        if nested:
            spread = nested[0].repeat_interleave(NESTED_BLOCK)[: len(absmax)]
            absmax = nested[1][absmax.long()] * spread + offset
        rows = torch.tensor(self.rows.order or range(self.rows.start, self.rows.end), dtype=torch.int64)
        group = self._group_size()
        columns = torch.arange(self.inputs.start, self.inputs.end, group)
        scales = absmax[(rows[:, None] * self.inputs.total + columns) // BLOCK]
        return GroupedWeight(self._codes(weight, rows), table, scales, group)

    def _group_size(self) -> int:
        """Largest group of inputs that no block boundary cuts, as blocks continue from row to row."""
        return math.gcd(BLOCK, self.inputs.total, self.inputs.start, self.inputs.size)

    def _codes(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [this rank's rows, its inputs]."""
        codes, inputs = halves(weight.flatten(), high_first=True), self.inputs
        if self.reads_rows:
            return codes.view(len(rows), inputs.total)[:, inputs.start : inputs.end].contiguous()
        whole = codes[: self.rows.total * inputs.total].view(self.rows.total, inputs.total)
        return whole[rows, inputs.start : inputs.end]

    def _offset(self, text: torch.Tensor) -> float:
        """Return the offset of nested scales from the JSON, after checking that it agrees with this module."""
        name = f"{self.name}.weight.quant_state"
        try:
            state = msgspec.json.decode(bytes(text.tolist()).rstrip(b"\0"), type=_State)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{name}: not the JSON that it should be ({error})") from error
        shape = (self.rows.total, self.inputs.total)
        nested = NESTED_BLOCK if self.spec.nested else None
        if (state.quant_type, state.blocksize, state.shape) != (self.spec.table, BLOCK, shape):
            raise ModelError(
                f"{name}: {state.quant_type} in blocks of {state.blocksize} of {list(state.shape)} is not supported "
                f"here; supported: {self.spec.table} in blocks of {BLOCK} of {list(shape)}"
            )
        if state.nested_blocksize != nested or (state.nested_offset is None) == self.spec.nested:
            raise ModelError(
                f"{name}: nested_blocksize {state.nested_blocksize} with nested_offset {state.nested_offset} is not "
                f"what config.json asks for: nested_blocksize {nested}"
            )
        return state.nested_offset or 0.0
