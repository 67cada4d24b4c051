"""Common parts of the formats of quantized checkpoints: their weight, and a rank's part of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.kernels.grouped import GroupedWeight, dequantize
from vllm_lite.layers.weights.matmul import Matmul, make_grouped_matmul
from vllm_lite.layers.weights.weight_form import LinearShape
from vllm_lite.layers.weights.weight_slot import WeightStack

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A StoredWeight whose tensors a format unpacks."""

    stacks: tuple[WeightStack, ...]
    """Stacks on the CPU, whatever the model's device."""
    take: Callable[..., GroupedWeight]
    """Function that unpacks the tensors, called with one for each stack."""
    shape: LinearShape
    float8_rows: bool = False
    """Whether a product may round its rows to float8."""

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        kind = self.shape.dtype, self.shape.device
        return make_grouped_matmul(self.take(*tensors), bias, *kind, float8_rows=self.float8_rows)

    def dense(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return dequantize(self.take(*tensors)).to(self.shape.device, self.shape.dtype)


def in_units(part: Split, unit: int) -> Split:
    """Convert the part of a dimension to units of `unit` elements, which share a word or a scale. The last unit of the
    whole may be incomplete. Raises ConfigError if ranks would have to share a unit."""
    if part.start % unit or (part.size % unit and part.end != part.total):
        raise ConfigError(
            f"a quantized weight with {part.total} inputs in groups of {unit} cannot be split so that a rank has "
            f"{part.size} from {part.start} on; use a smaller --tensor-parallel-size"
        )
    return Split(-(-part.total // unit), part.start // unit, -(-part.size // unit))


def own_rows(outputs: Sequence[Split], unit: int | None = 1, stored_unit: int = 1) -> torch.Tensor:
    """int64: row of each of this rank's outputs in the concatenated tensors of several projections, which have a row
    for `unit` outputs (None: for all). Each tensor has a multiple of `stored_unit` rows."""
    found, first = [], 0
    for part in outputs:
        size = unit or max(part.total, 1)
        own = torch.tensor(part.order or range(part.start, part.end), dtype=torch.int64)
        found.append(own // size + first)
        rows = -(-part.total // size)
        first += -(-rows // stored_unit) * stored_unit
    return torch.cat(found)


def sorted_by_group(groups: torch.Tensor, size: int, names: Sequence[str]) -> torch.Tensor:
    """groups: [projections, inputs], the group of each input -> inputs in the order of their groups, int64. Raises
    ModelError if groups have not `size` inputs each, or if the projections differ in them."""
    order = groups[0].argsort(stable=True)
    if not torch.equal(groups[0, order], torch.arange(len(order)) // size):
        raise ModelError(f"{names[0]}.g_idx: its groups are not of {size} inputs each")
    group_of_each(groups, int(groups.max()) + 1, names)
    return order


def group_of_each(groups: torch.Tensor, num_groups: int, names: Sequence[str]) -> torch.Tensor:
    """groups: [projections, inputs] -> the group of each input. Raises ModelError for a group outside of `num_groups`,
    or if the projections differ in them."""
    if not torch.equal(groups, groups[:1].expand_as(groups)):
        raise ModelError(f"{', '.join(names)}: their inputs are grouped differently (g_idx)")
    if not bool(((groups >= 0) & (groups < num_groups)).all()):
        raise ModelError(f"{names[0]}.g_idx: some groups are not among the {num_groups} that there are")
    return groups[0]
