"""Shard and Split: a rank's position among those that hold a model together, and its part of each dimension. No torch.

There are two axes: the ranks of a stage divide the heads, rows and columns of its layers (tensor parallelism); stages
divide the layers (pipeline parallelism).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_lite.config import EngineConfig, ResolvedConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage with its own layers. The first embeds tokens, the last computes logits."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """The stage's layers of a model: all stages have equally many, or the first ones have one more."""
        held = Split.near_even(num_layers, Shard(self.index, self.count))
        return range(held.start, held.end)

    def kept(self, layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """Layers of a KV group that the stage keeps: its own layers of the model, and all further ones, such as a
        drafter's."""
        held = self.layers(num_layers)
        return tuple(layer for layer in layers if layer in held or layer >= num_layers)


class Shard(NamedTuple):
    """A rank's position: its number among the ranks of its stage, and the stage."""

    rank: int = 0
    world: int = 1
    expert_parallel: bool = False
    """Whether each rank holds some experts whole, instead of a part of each."""
    stage: Stage = Stage()

    @classmethod
    def of(cls, config: EngineConfig, rank: int = 0, num_stages: int = 1) -> "Shard":
        """The position of worker `rank`. Workers are numbered stage by stage."""
        world = config.tensor_parallel_size
        stage = Stage(rank // world, num_stages)
        return cls(rank % world, world, config.enable_expert_parallel, stage)

    @property
    def all_ranks(self) -> tuple["Shard", ...]:
        """The ranks of the stage."""
        return tuple(self._replace(rank=rank) for rank in range(self.world))

    @property
    def all_stages(self) -> tuple["Shard", ...]:
        """The ranks with this number in each stage."""
        count = self.stage.count
        return tuple(self._replace(stage=Stage(index, count)) for index in range(count))


SINGLE = Shard()


def num_ranks(config: ResolvedConfig) -> int:
    """Number of workers of an engine, over all stages."""
    return config.tensor_parallel_size * config.num_stages


def answering_rank(config: ResolvedConfig) -> int:
    """The worker that returns results: the first one of the last stage."""
    return num_ranks(config) - config.tensor_parallel_size


VOCABULARY_UNIT = 64
"""Unit, in tokens, by which ranks divide a vocabulary, so that rows of float32 logits are cut at cache lines."""


class Split(NamedTuple):
    """A rank's part [start, start + size) of a dimension of `total`, or its `size` indices `order`."""

    total: int
    start: int
    size: int
    order: tuple[int, ...] | None = None
    """The part's indices, if they are not consecutive."""

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def is_whole(self) -> bool:
        return self.size == self.total

    def times(self, factor: int) -> "Split":
        """The same part of a dimension in which each element is expanded to `factor` elements, like heads to their
        elements."""
        return Split(self.total * factor, self.start * factor, self.size * factor)

    @classmethod
    def of(cls, total: int, indices: Sequence[int]) -> "Split":
        """The part with these indices, in this order."""
        start = indices[0] if indices else 0
        if list(indices) == list(range(start, start + len(indices))):
            return cls(total, start, len(indices))
        return cls(total, 0, len(indices), tuple(indices))

    @classmethod
    def whole(cls, total: int) -> "Split":
        return cls(total, 0, total)

    @classmethod
    def even(cls, total: int, shard: Shard) -> "Split":
        """Equal parts; `total` must be a multiple of the number of ranks."""
        size, remainder = divmod(total, shard.world)
        if remainder:
            raise ValueError(f"a dimension of {total} cannot be split over {shard.world} ranks")
        return cls(total, shard.rank * size, size)

    @classmethod
    def near_even(cls, total: int, shard: Shard, unit: int = 1) -> "Split":
        """Parts that differ by at most one `unit`, the larger ones first; the last unit may be incomplete."""
        num_units = -(-total // unit)
        size, num_larger = divmod(num_units, shard.world)
        first = shard.rank * size + min(shard.rank, num_larger)
        start = min(first * unit, total)
        return cls(total, start, min((first + size + (shard.rank < num_larger)) * unit, total) - start)

    @classmethod
    def vocabulary(cls, size: int, shard: Shard) -> "Split":
        """A rank's tokens of a vocabulary. Ranks may have different numbers of them, but at least one."""
        return cls.near_even(size, shard, VOCABULARY_UNIT if size >= VOCABULARY_UNIT * shard.world else 1)


class HeadSplit(NamedTuple):
    """The heads of one rank: its query heads attend only to its KV heads.

    KV heads are divided among ranks. If there are fewer than ranks, several ranks hold the same KV head, and divide its
    query heads: 7 query heads of one KV head become 4 and 3 on two ranks.
    """

    query: Split
    kv: Split

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, shard: Shard) -> "HeadSplit":
        """Divide the heads. Raises ValueError unless all ranks get equally many KV heads, and at least one query
        head."""
        if num_kv_heads % shard.world == 0:
            return cls(Split.even(num_heads, shard), Split.even(num_kv_heads, shard))
        group = num_heads // num_kv_heads
        num_sharing, remainder = divmod(shard.world, num_kv_heads)
        if remainder or num_sharing > group:
            raise ValueError(f"{num_heads} heads with {num_kv_heads} KV heads cannot be split over {shard.world} ranks")
        kv_head, place = divmod(shard.rank, num_sharing)
        own = Split.near_even(group, Shard(place, num_sharing))
        return cls(Split(num_heads, kv_head * group + own.start, own.size), Split(num_kv_heads, kv_head, 1))
