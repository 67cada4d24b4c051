"""Weights of GGUF files. Each tensor has its own type, so V may differ in type from Q and K.

https://github.com/ggml-org/ggml has the format. Matrices are always [outputs, inputs] there, rows of whole blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from vllm_lite.checkpoint.gguf.kinds import BY_NAME
from vllm_lite.checkpoint.quantization.spec import Gguf
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.kernels import cpu, gguf_blocks
from vllm_lite.kernels.cpu.weights import gguf_blocks as native
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.kernels.gguf_blocks import BlockRows
from vllm_lite.kernels.grouped import GroupedChunks
from vllm_lite.layers.quantized.stored import CPU, in_units
from vllm_lite.layers.weights.gpu_matmul import packed_matmul
from vllm_lite.layers.weights.matmul import Matmul, NativeMatmul, copies, make_matmul, say_dense
from vllm_lite.layers.weights.weight_form import DENSE, DenseForm, LinearShape, StackedWeight, StoredWeight
from vllm_lite.layers.weights.weight_slot import WeightStack

CHUNK_ELEMENTS = 1 << 20
"""Elements that are dequantized at a time. Intermediate results take several bytes for each, and should stay in a
cache: with 2^24 Q4_0 took five times as long."""


@dataclass(frozen=True, slots=True)
class GgufForm:
    """The WeightForm of a GGUF model. `floats`: form of the matrices that are floats in the file."""

    spec: Gguf
    floats: DenseForm = DENSE

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        shape = shape._replace(transposed=False)
        named = zip(names, shape.outputs, strict=True)
        parts: list[StoredWeight] = []
        for kind, some in groupby(named, key=lambda one: self.spec.kind(one[0])):
            own, outputs = zip(*some, strict=True)
            part = shape._replace(outputs=outputs)
            if kind is None:
                parts.append(self.floats.stored(own, part))
            else:
                weight = BlockWeight.of(kind, own, part, self.spec.inputs.get(own[0]))
                parts.append(replace(weight, factors=tuple(map(self.spec.factor, own))))
        return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))

    def quantizes(self, name: str) -> bool:
        return not self.spec.is_dense(name)


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Projections whose tensors are all of one type."""

    stacks: tuple[WeightStack, ...]
    """A single stack of uint8 [outputs, bytes of a row], on the CPU."""
    kind: str
    shape: LinearShape
    order: tuple[int, ...] | None = None
    """See GroupedWeight.order."""
    factors: tuple[float, ...] = ()
    """Factor of each projection."""

    @classmethod
    def of(
        cls, kind: str, names: Sequence[str], shape: LinearShape, order: tuple[int, ...] | None = None
    ) -> "BlockWeight":
        """`order`: the input of each column. Raises ModelError if inputs do not fill blocks, and ConfigError if ranks
        would have to share a block, or reordered columns."""
        block = BY_NAME[kind]
        if order is not None and shape.inputs.size != shape.inputs.total:
            raise ConfigError(
                f"{names[0]}: the file has its inputs in another order, so that ranks cannot share its blocks of type "
                f"{kind}; use tensor_parallel_size 1"
            )
        if shape.inputs.total % block.elements:
            raise ModelError(f"{names[0]}: {shape.inputs.total} inputs are not whole blocks of type {kind}")
        columns = in_units(shape.inputs, block.elements).times(block.num_bytes)
        slots = shape._replace(inputs=columns).slots(names, ".weight")
        return cls((WeightStack(slots, torch.uint8, CPU, lent=True),), kind, shape, order)

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        """Make the fastest product with blocks; weights that no kernel multiplies become dense."""
        dtype, device = self.shape.dtype, self.shape.device
        if copies(dtype, device):
            return NativeMatmul(PackedWeight(self._rows(tensors[0]), bias))
        chunks = self._chunks(tensors)
        if self.order is None and (packed := packed_matmul(chunks, bias, dtype, device)) is not None:
            return packed
        say_dense(f"blocks of type {self.kind}", device.type, str(dtype).removeprefix("torch."))
        return make_matmul(chunks.dense(dtype, device), bias)

    def dense(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._chunks(tensors).dense(self.shape.dtype, self.shape.device)

    def _rows(self, blocks: torch.Tensor, rows: slice = slice(None)) -> BlockRows:
        """Rows of the matrix, given all its blocks."""
        factors = None
        if any(factor != 1.0 for factor in self.factors):
            parts = zip(self.factors, self.shape.outputs, strict=True)
            factors = torch.cat([torch.full((part.size,), factor) for factor, part in parts])[rows]
        return BlockRows(self.kind, blocks[rows], None if self.order is None else torch.tensor(self.order), factors)

    def _chunks(self, tensors: Sequence[torch.Tensor]) -> GroupedChunks:
        take_apart = native.take_apart if cpu.available() else gguf_blocks.take_apart
        (blocks,), num_inputs = tensors, self.shape.inputs.size
        num_rows = max(1, CHUNK_ELEMENTS // (32 * max(1, num_inputs))) * 32
        shape = len(blocks), num_inputs
        return GroupedChunks(shape, num_rows, lambda rows: take_apart(self._rows(blocks, rows)))
