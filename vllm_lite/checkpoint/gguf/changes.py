"""Changes that converters make to tensors besides renaming, and their inverses as data; torch code applies them.

A change says how the checkpoint's tensor is derived from the file's. `weight_source` applies changes when it reads a
tensor; changes to the inputs of blocks (`HeadOrder` along axis 1) are left to the product, which permutes its inputs
instead: a block may have parts of several heads.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class OneMore(NamedTuple):
    """The checkpoint's tensor has an axis of size one at `axis`, which the file omits."""

    axis: int
    num_axes: int
    """Number of axes of the checkpoint's tensor; a file's tensor with as many is unchanged."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if len(stored) != self.num_axes - 1:
            return stored
        return *stored[: self.axis], 1, *stored[self.axis :]


class Flat(NamedTuple):
    """The checkpoint's tensor has one axis, which the file splits into two."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return (math.prod(stored),)


class LogOfMinus(NamedTuple):
    """The file has -exp(x) of each element x."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored


class HeadOrder(NamedTuple):
    """Order of heads in groups. The checkpoint has each group's heads together; the file has the first head of each
    group, then the second of each, and so on."""

    axis: int
    start: int
    """First element that is permuted."""
    num_groups: int
    per_group: int
    size: int
    """Number of elements of a head."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored

    @property
    def end(self) -> int:
        return self.start + self.num_groups * self.per_group * self.size

    def order(self) -> list[int]:
        """The file's index for each index of the checkpoint."""
        heads = (which * self.num_groups + group for group in range(self.num_groups) for which in range(self.per_group))
        return [*range(self.start), *self._elements(heads)]

    def inverse(self) -> list[int]:
        """The checkpoint's index for each index of the file."""
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
