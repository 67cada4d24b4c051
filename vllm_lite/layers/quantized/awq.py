"""AWQ's `qweight` int32 [inputs, outputs / 8], `qzeros` [groups, outputs / 8] and `scales` [groups, outputs], in the
order that its GEMM kernels want. https://github.com/casper-hansen/AutoAWQ writes them. weight = scale * (code - zero).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_lite.checkpoint.quantization.spec import Awq
from vllm_lite.kernels.grouped import GroupedWeight
from vllm_lite.layers.quantized.columns import Columns
from vllm_lite.layers.quantized.stored import QuantizedWeight
from vllm_lite.layers.weights.weight_form import LinearShape

BITS = 4
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions in a word of the codes of eight consecutive outputs."""


def stored(spec: Awq, names: Sequence[str], shape: LinearShape) -> QuantizedWeight:
    """The weight of the projections `names`, stacked; see QuantizedForm."""
    columns = Columns(names, shape, BITS, spec.group_size or shape.inputs.total)
    stacks = (
        columns.stack("qweight", shape.inputs, torch.int32, packed=True),
        columns.stack("qzeros", columns.groups, torch.int32, packed=True),
        columns.stack("scales", columns.groups, torch.float32, packed=False),
    )
    return QuantizedWeight(stacks, _Reader(columns).take, shape)


@dataclass(frozen=True, slots=True)
class _Reader:
    columns: Columns

    def take(self, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> GroupedWeight:
        return self.columns.weight(_unpack(qweight), _unpack(qzeros).float(), scales)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """[rows, words of outputs] -> uint8 [rows, outputs], a view of the transposed matrix, as callers need it."""
    turned = words.t().contiguous()
    codes = [((turned >> (BITS * place)) & 15).to(torch.uint8) for place in PLACES]
    return torch.stack(codes, dim=1).flatten(0, 1).t()
