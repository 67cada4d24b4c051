"""Parts of checkpoint tensors that make up a layer's tensors, where several are fused and ranks share them."""

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch


class WeightSlot(NamedTuple):
    """The checkpoint tensor `name` of full shape `shape`: this rank holds the box of `size` that begins at `start`.

    Several slots may take parts of one tensor, as Q, K and V do of a fused one.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    order: tuple[int, ...] | None = None
    """The indices that the box has along the first axis, where they do not follow one another from start[0] on."""
    transposed: bool = False
    """Whether the checkpoint stores a matrix with its axes exchanged: shape[1] by shape[0]."""
    stacked: tuple[int, int] | None = None
    """Where the checkpoint has several matrices of this shape in one tensor, along its first axis: which one this is,
    and how many there are."""
    is_text: bool = False
    """Whether the tensor is text, in bytes: it may be shorter than `shape`, and is filled up with zeros."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = self.shape[::-1] if self.transposed else self.shape
        return shape if self.stacked is None else (self.stacked[1], *shape)

    def fits(self, stored: tuple[int, ...]) -> bool:
        """Whether the checkpoint's tensor may have this shape. A number may be a tensor of one element."""
        if self.is_text:
            return len(stored) == 1 and stored[0] <= self.shape[0]
        return stored == self.stored_shape or (stored == () and self.shape == (1,))

    def cut(self, stored: torch.Tensor) -> torch.Tensor:
        """The box of the tensor as it is stored: a view if it lies in one piece, else a copy."""
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
    """A tensor that every rank holds in full, in another `order` where one is given."""
    return WeightSlot(name, shape, (0,) * len(shape), shape, order)


class WeightStack(NamedTuple):
    """Checkpoint tensors that become one tensor of a layer: those of Q, K and V side by side, or one alone.

    Floats are converted to `dtype`; a tensor of any other type must be stored in it. What is `lent` is a buffer of the
    loader's or a part of a mapped file: the layer may read it while it takes it, and no longer. Any other tensor is
    the layer's to keep.
    """

    slots: tuple[WeightSlot, ...]
    dtype: torch.dtype
    device: torch.device
    lent: bool = False
    dim: int = 0
    """Along which the slots' boxes are put side by side; in all others they have one size."""
    packed_as: str | None = None
    """Name of the type that `kernels.cpu.weights.file_packer` makes of the slots, if the layer also takes that."""
    memory: Callable[[], torch.Tensor] | None = None
    """Gives the memory that the layer wants the tensor in; None: any."""

    @property
    def packing_key(self) -> tuple[Hashable, ...]:
        """All that a packed weight depends on, in the words of models/ahead.py."""
        return self.slots, str(self.dtype).removeprefix("torch."), self.packed_as

    @property
    def shape(self) -> tuple[int, ...]:
        size = list(self.slots[0].size)
        if not size:
            return ()  # a number
        size[self.dim] = sum(slot.size[self.dim] for slot in self.slots)
        return tuple(size)

    def empty(self) -> torch.Tensor:
        """Memory that the layer is to keep."""
        if self.memory is not None:
            return self.memory()
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class WeightGroup(NamedTuple):
    """Tensors that a layer takes at once: `take` is called with one tensor for each stack. At most one of them is
    lent."""

    stacks: tuple[WeightStack, ...]
    take: Callable[..., None]

    @property
    def slots(self) -> tuple[WeightSlot, ...]:
        return tuple(slot for stack in self.stacks for slot in stack.slots)
