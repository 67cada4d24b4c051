"""How the ranks that hold a model together share its dimensions: which part of each is whose. No torch."""

from typing import NamedTuple


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
    def kv_heads(cls, num_heads: int, head_size: int, shard: Shard) -> "Split":
        """Whole KV heads: a share of them, or one that several ranks hold alike when there are fewer than ranks."""
        if shard.world <= num_heads:
            return cls.even(num_heads * head_size, Shard(shard.rank, shard.world))
        head = shard.rank * num_heads // shard.world
        return cls(num_heads * head_size, head * head_size, head_size)
