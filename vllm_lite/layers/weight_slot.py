"""Which tensors of a checkpoint make a weight: the seam between checkpoint names and fused, sharded weights."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch


class Shard(NamedTuple):
    """This rank among the ranks that hold the model together."""

    rank: int = 0
    world: int = 1


SINGLE = Shard()


class Split(NamedTuple):
    """The part [start, start + size) of a dimension of `total` that one rank holds."""

    total: int
    start: int
    size: int

    @classmethod
    def whole(cls, total: int) -> "Split":
        return cls(total, 0, total)

    @classmethod
    def even(cls, total: int, shard: Shard) -> "Split":
        """An equal share for each rank; `total` must be a multiple of the number of ranks."""
        size, remainder = divmod(total, shard.world)
        if remainder:
            raise ValueError(f"a dimension of {total} cannot be split over {shard.world} ranks")
        return cls(total, shard.rank * size, size)

    @classmethod
    def kv_heads(cls, num_heads: int, head_dim: int, shard: Shard) -> "Split":
        """Whole KV heads: a share of them, or one that several ranks hold alike when there are fewer than ranks."""
        if shard.world <= num_heads:
            return cls.even(num_heads * head_dim, Shard(shard.rank, shard.world))
        head = shard.rank * num_heads // shard.world
        return cls(num_heads * head_dim, head * head_dim, head_dim)


class WeightSlot(NamedTuple):
    """The checkpoint tensor `name` of full shape `shape`: this rank holds the box of `size` that begins at `start`."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.size, strict=True))

    @property
    def num_elements(self) -> int:
        """In the box."""
        return math.prod(self.size)


def whole_slot(name: str, *shape: int) -> WeightSlot:
    """A tensor that every rank holds in full."""
    return WeightSlot(name, shape, (0,) * len(shape), shape)


class WeightGroup(NamedTuple):
    """Checkpoint tensors that a layer takes at once, each kind stacked by rows in this order: Q, K and V, or one alone.

    `take(weight, bias)` is called once, with tensors of `dtype` on `device`, and None for a bias where there are no
    `biases`. A weight that is `lent` is a buffer of the loader's or a part of a mapped file: to be read, and no longer
    than `take` runs. Any other is the layer's to keep.
    """

    weights: tuple[WeightSlot, ...]
    biases: tuple[WeightSlot, ...]
    dtype: torch.dtype
    device: torch.device
    lent: bool
    take: Callable[[torch.Tensor, torch.Tensor | None], None]

    @property
    def slots(self) -> tuple[WeightSlot, ...]:
        return self.weights + self.biases

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory for a tensor that the layer is to keep."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
