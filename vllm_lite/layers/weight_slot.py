"""Where a tensor of a checkpoint goes: the seam between checkpoint names and fused, sharded weights."""

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
    """The destination of one checkpoint tensor of full shape `shape`.

    `view` is the part of a weight that it fills; it takes the box of the checkpoint tensor that begins at `start`.
    """

    view: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]


def whole_slot(view: torch.Tensor) -> WeightSlot:
    """A tensor that every rank holds in full."""
    return WeightSlot(view, tuple(view.shape), (0,) * view.dim())
