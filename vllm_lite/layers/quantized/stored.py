"""What the formats of quantized checkpoints share: the weight that they give, and the part of it that a rank holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ConfigError
from vllm_lite.kernels.grouped import GroupedWeight, dequantize
from vllm_lite.layers.matmul import Matmul, make_grouped_matmul
from vllm_lite.layers.weight_form import LinearShape
from vllm_lite.layers.weight_slot import WeightStack

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A StoredWeight whose tensors a format takes apart."""

    stacks: tuple[WeightStack, ...]
    """On the CPU, wherever the model is."""
    take: Callable[..., GroupedWeight]
    """Called with one tensor for each stack."""
    shape: LinearShape

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        return make_grouped_matmul(self.take(*tensors), bias, self.shape.dtype, self.shape.device)

    def dense(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return dequantize(self.take(*tensors)).to(self.shape.device, self.shape.dtype)


def in_units(part: Split, unit: int) -> Split:
    """The part of a dimension of which `unit` elements lie in one word, or share a scale. The last unit of the whole
    may be cut off. Raises ConfigError if ranks would have to share a unit."""
    if part.start % unit or (part.size % unit and part.end != part.total):
        raise ConfigError(
            f"a quantized weight with {part.total} inputs in groups of {unit} cannot be split so that a rank has "
            f"{part.size} from {part.start} on; use a smaller --tensor-parallel-size"
        )
    return Split(-(-part.total // unit), part.start // unit, -(-part.size // unit))
