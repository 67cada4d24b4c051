"""Parts of checkpoint tensors that make up a layer's tensors, which may be fused and split over ranks."""

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch


class WeightSlot(NamedTuple):
    """This rank's box of the checkpoint tensor `name` of full shape `shape`: of `size`, beginning at `start`.

    Several slots may take parts of one tensor, for example Q, K and V of a fused one.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    order: tuple[int, ...] | None = None
    """Indices of the box along the first axis, if they are not consecutive from start[0]."""
    transposed: bool = False
    """Whether the checkpoint stores a matrix with its axes exchanged: shape[1] by shape[0]."""
    stacked: tuple[int, int] | None = None
    """Index of this matrix and number of matrices, if the checkpoint stacks several of this shape in one tensor along
    its first axis."""
    is_text: bool = False
    """Whether the tensor is text, in bytes; it may be shorter than `shape`, and is padded with zeros."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = self.shape[::-1] if self.transposed else self.shape
        return shape if self.stacked is None else (self.stacked[1], *shape)

    def fits(self, stored: tuple[int, ...]) -> bool:
        """Whether the checkpoint's tensor may have the shape `stored`; a tensor of one element fits a scalar."""
        if self.is_text:
            return len(stored) == 1 and stored[0] <= self.shape[0]
        return stored == self.stored_shape or (stored == () and self.shape == (1,))

    def cut(self, stored: torch.Tensor) -> torch.Tensor:
        """Cut the box from the stored tensor: a view if it is contiguous there, else a copy."""
        if self.is_text:
            return torch.nn.functional.pad(stored, (0, self.shape[0] - len(stored)))
        if stored.dim() == 0:
            return stored.view(self.shape)
        tensor = stored if self.stacked is None else stored[self.stacked[0]]
        tensor = tensor.t() if self.transposed else tensor
        if self.order is None:
            return tensor[self.box]
        return tensor[(slice(None), *self.box[1:])].index_select(0, torch.tensor(self.order))

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.size, strict=True))

    @property
    def num_elements(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.size)


def whole_slot(name: str, *shape: int, order: tuple[int, ...] | None = None) -> WeightSlot:
    """Slot of a tensor that every rank holds in full, permuted to `order` if given."""
    return WeightSlot(name, shape, (0,) * len(shape), shape, order)


class WeightStack(NamedTuple):
    """Checkpoint tensors that are concatenated to one tensor of a layer, for example Q, K and V; or a single one.

    Floats are converted to `dtype`; a tensor of any other type must be stored in it. A `lent` tensor is a buffer of the
    loader or part of a mapped file: the layer may read it only during `take`. The layer may keep any other tensor.
    """

    slots: tuple[WeightSlot, ...]
    dtype: torch.dtype
    device: torch.device
    lent: bool = False
    dim: int = 0
    """Dimension along which the slots' boxes are concatenated; all other sizes are equal."""
    packed_as: str | None = None
    """Name of the packed type that `kernels.cpu.weights.file_packer` makes of the slots; None: plain tensors only."""
    memory: Callable[[], torch.Tensor] | None = None
    """Returns the memory into which to load the tensor; None: any memory."""

    @property
    def packing_key(self) -> tuple[Hashable, ...]:
        """Key of all that a packed weight depends on, for models/ahead.py."""
        return self.slots, str(self.dtype).removeprefix("torch."), self.packed_as

    @property
    def shape(self) -> tuple[int, ...]:
        size = list(self.slots[0].size)
        if not size:
            return ()  # a scalar
        size[self.dim] = sum(slot.size[self.dim] for slot in self.slots)
        return tuple(size)

    def empty(self) -> torch.Tensor:
        """Allocate memory for a tensor that the layer keeps."""
        if self.memory is not None:
            return self.memory()
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class WeightGroup(NamedTuple):
    """Tensors that a layer takes together: `take` is called with one tensor per stack, at most one of which is lent."""

    stacks: tuple[WeightStack, ...]
    take: Callable[..., None]

    @property
    def slots(self) -> tuple[WeightSlot, ...]:
        return tuple(slot for stack in self.stacks for slot in stack.slots)
