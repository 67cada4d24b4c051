"""Changes by converters to tensors beside their names, and their inverses: here as data, in a model with torch.

A change says how a tensor of the checkpoint is made of the file's. `weight_source` carries changes out where a tensor
is read; those of the inputs of blocks (`HeadOrder` along axis 1) are left to the product, which takes its inputs in the
file's order: a block may hold parts of several heads.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class OneMore(NamedTuple):
    """The checkpoint's tensor has an axis of one element at `axis`, which the file leaves out."""

    axis: int
    num_axes: int
    """The checkpoint's tensor has so many; a file whose tensor has as many leaves nothing out."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if len(stored) != self.num_axes - 1:
            return stored
        return *stored[: self.axis], 1, *stored[self.axis :]


class Flat(NamedTuple):
    """The checkpoint's tensor has one axis, of which the file makes two."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return (math.prod(stored),)


class LogOfMinus(NamedTuple):
    """The file has -exp of each element."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored


class HeadOrder(NamedTuple):
    """Heads are in groups. The checkpoint has those of a group one behind the other; the file has the first of each
    group, then the second of each, and so on."""

    axis: int
    start: int
    """What lies before is not moved."""
    num_groups: int
    per_group: int
    size: int
    """Elements of a head."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored

    @property
    def end(self) -> int:
        return self.start + self.num_groups * self.per_group * self.size

    def order(self) -> list[int]:
        """The file's index for each of the checkpoint's."""
        heads = (which * self.num_groups + group for group in range(self.num_groups) for which in range(self.per_group))
        return [*range(self.start), *self._elements(heads)]

    def inverse(self) -> list[int]:
        """The checkpoint's index for each of the file's."""
        heads = (group * self.per_group + which for which in range(self.per_group) for group in range(self.num_groups))
        return [*range(self.start), *self._elements(heads)]

    def _elements(self, heads: Iterable[int]) -> list[int]:
        return [self.start + head * self.size + element for head in heads for element in range(self.size)]


Change = OneMore | Flat | LogOfMinus | HeadOrder


def changed(shape: tuple[int, ...], changes: Sequence[Change]) -> tuple[int, ...]:
    """The shape of the checkpoint's tensor."""
    for change in changes:
        shape = change.shape(shape)
    return shape
