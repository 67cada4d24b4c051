"""Forms of linear layers' weights in a checkpoint: the interface that formats of quantized checkpoints implement.

A form names the tensors that it takes and makes a Matmul of them. The forms of quantized checkpoints are in
`layers.quantized`, which chooses one by the checkpoint's configuration.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import NamedTuple, Protocol

import torch

from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.weights.matmul import Matmul, SideBySide, copies, make_matmul, packs
from vllm_lite.layers.weights.weight_slot import WeightSlot, WeightStack
from vllm_lite.runtime import log

logger = log.get(__name__)


class LinearShape(NamedTuple):
    """The weight of one or more projections of the same input, stacked by outputs: [sum of outputs, inputs]."""

    inputs: Split
    outputs: tuple[Split, ...]
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False
    """Whether the checkpoint stores [inputs, outputs]."""
    stacked: tuple[int, int] | None = None
    """See WeightSlot.stacked."""

    def slot(self, name: str, rows: Split) -> WeightSlot:
        """This rank's rows of one projection in the matrix `name`."""
        inputs = self.inputs
        start, size = (rows.start, inputs.start), (rows.size, inputs.size)
        return WeightSlot(name, (rows.total, inputs.total), start, size, rows.order, self.transposed, self.stacked)

    def slots(self, names: Sequence[str], ending: str) -> tuple[WeightSlot, ...]:
        """This rank's rows of each projection in the matrices `<name><ending>`."""
        return tuple(self.slot(f"{name}{ending}", rows) for name, rows in zip(names, self.outputs, strict=True))


class StoredWeight(Protocol):
    """The weight of one linear layer, or of one expert, as stored in a checkpoint."""

    @property
    def stacks(self) -> tuple[WeightStack, ...]:
        """The tensors of the weight, without its bias."""
        ...

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        """Make the product. `tensors`: one for each of `stacks`, perhaps lent; bias: [sum of outputs], may be kept."""
        ...

    def dense(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the matrix [sum of outputs, inputs], in the shape's dtype and on its device."""
        ...


class WeightForm(Protocol):
    """One way to store weights."""

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        """Return the stacked weight of the projections `names`."""
        ...

    def quantizes(self, name: str) -> bool:
        """Whether the checkpoint stores the matrix `name` quantized; asked for the embedding and the LM head, which are
        dense in most checkpoints."""
        ...


@dataclass(frozen=True, slots=True)
class DenseForm:
    """One matrix for each projection, `<name>.weight`: [outputs, inputs], which may be quantized on loading. A tensor
    with several stacked matrices is called `<name>`."""

    quantization: Form | None = None
    mixed: MixedForm | None = None
    """Forms of single layers that differ from `quantization`; None: all layers have one form."""

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        parts: list[StoredWeight] = []
        for form, some in groupby(zip(names, shape.outputs, strict=True), key=lambda one: self._form_of(one[0])):
            own, outputs = zip(*some, strict=True)
            parts.append(_dense(own, shape._replace(outputs=outputs), form))
        return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))

    def quantizes(self, name: str) -> bool:  # noqa: ARG002 (the protocol's)
        return False

    def _form_of(self, name: str) -> Form | None:
        return self.quantization if self.mixed is None else self.mixed.form(name)


def _dense(names: Sequence[str], shape: LinearShape, form: Form | None) -> "DenseWeight":
    """Weight of projections that become one matrix of one form."""
    ending = ".weight" if shape.stacked is None else ""
    kind = shape.dtype, shape.device
    stack = WeightStack(shape.slots(names, ending), *kind, lent=copies(*kind), packed_as=packs(*kind, form))
    return DenseWeight((stack,), form)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """One matrix, of one or more projections."""

    stacks: tuple[WeightStack, ...]
    quantization: Form | None

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        return make_matmul(tensors[0], bias, self.quantization)

    def dense(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0].clone() if self.stacks[0].lent else tensors[0]


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Weights of the same inputs with concatenated outputs; each has its own form or type."""

    parts: tuple[StoredWeight, ...]

    @property
    def stacks(self) -> tuple[WeightStack, ...]:
        """Stacks of all weights; none is lent, as at most one tensor of a group may be."""
        return tuple(stack._replace(lent=False) for part in self.parts for stack in part.stacks)

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        made, first = [], 0
        for part, own in self._each(tensors):
            size = sum(stack.shape[0] for stack in part.stacks)
            made.append((part.matmul(own, None if bias is None else bias[first : first + size]), size))
            first += size
        return SideBySide(tuple(made))

    def dense(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.dense(own) for part, own in self._each(tensors)])

    def _each(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[StoredWeight, Sequence[torch.Tensor]]]:
        first = 0
        for part in self.parts:
            end = first + len(part.stacks)
            yield part, tensors[first:end]
            first = end


DENSE = DenseForm()


@dataclass(frozen=True, slots=True)
class WrappedForm(ABC):
    """Wraps another form, whose tensors it takes. Subclasses change the products."""

    form: WeightForm

    @abstractmethod
    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        """As in WeightForm."""

    def quantizes(self, name: str) -> bool:
        return self.form.quantizes(name)


@dataclass(frozen=True, slots=True)
class WrappedWeight(ABC):
    """Wraps another weight, whose tensors it takes. Subclasses make another product of them."""

    stored: StoredWeight

    @property
    def stacks(self) -> tuple[WeightStack, ...]:
        return self.stored.stacks

    @abstractmethod
    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        """As in StoredWeight."""

    def dense(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.stored.dense(tensors)


@dataclass(frozen=True, slots=True)
class WidenedForm(WrappedForm):
    """Quantized weights become dense when loaded, because no kernel multiplies them well."""

    what: str
    """Name of the weights in the log."""

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        stored = self.form.stored(names, shape)
        if not any(self.quantizes(name) for name in names):
            return stored
        say_widened(self.what, str(shape.dtype).removeprefix("torch."), shape.device.type)
        return RemadeWeight(stored)


@dataclass(frozen=True, slots=True)
class RemadeForm(WrappedForm):
    """All weights become dense when loaded, whatever their form in the checkpoint, and are then quantized to
    `quantization`, if that is given; one at a time."""

    quantization: Form | None = None

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        return RemadeWeight(self.form.stored(names, shape), self.quantization)


@dataclass(frozen=True, slots=True)
class RemadeWeight(WrappedWeight):
    """A weight that becomes dense when loaded, and is then quantized to `quantization`, if that is given."""

    quantization: Form | None = None

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        return make_matmul(self.dense(tensors), bias, self.quantization)


@cache
def say_widened(what: str, dtype: str, device: str) -> None:
    """Log once per kind of weights that they become dense."""
    logger.info("quantized %s become %s: %s has kernels for dense ones alone", what, dtype, device)
