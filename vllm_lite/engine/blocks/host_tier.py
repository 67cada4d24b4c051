"""HostTier: KV blocks in CPU memory, which a step's block ops can read and write without a load.

Ids are global: the device's are [0, first_id), the host's [first_id, first_id + num_blocks).
"""

from collections.abc import Callable, Iterable, Sequence

from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.blocks.tier import Tier


class HostTier(Tier):
    """Chooses block ids; the worker's CacheEngine moves the bytes."""

    def __init__(self, num_blocks: int, first_id: int, enable_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks, enable_caching, has_null=False)
        self.first_id = first_id
        self.on_cached: Callable[[bytes], None] | None = None
        """Called with each key that is newly cached on the host."""

    @property
    def num_usable(self) -> int:
        return self.pool.num_usable

    @property
    def num_used(self) -> int:
        return self.pool.num_used

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def num_unpinned(self, ids: Iterable[int]) -> int:
        return sum(self.pool.is_free(block_id - self.first_id) for block_id in ids)

    def find(self, key: bytes) -> int | None:
        block_id = self.pool.get_cached_block(key)
        return None if block_id is None else block_id + self.first_id

    def reserve(self, keys: Sequence[bytes | None]) -> list[int]:
        ids = self.pool.get_new_blocks(len(keys))
        for block_id, key in zip(ids, keys, strict=True):
            if key is not None:
                is_new = self.on_cached is not None and self.pool.get_cached_block(key) is None
                self.pool.cache_block(block_id, key)
                if is_new and self.on_cached is not None:
                    self.on_cached(key)
        return [block_id + self.first_id for block_id in ids]

    def pin(self, ids: Sequence[int]) -> None:
        self.pool.touch([block_id - self.first_id for block_id in ids])

    def unpin(self, ids: Sequence[int]) -> None:
        self.pool.free([block_id - self.first_id for block_id in reversed(ids)])

    def num_places(self, keys: Iterable[bytes]) -> int:
        return sum(host_id is None for host_id in self._fitting(keys).values())

    def demote(self, keys: Iterable[bytes], limit: int) -> list[tuple[bytes, int]]:
        kept = self._fitting(keys)
        self.pin([host_id for host_id in kept.values() if host_id is not None])  # so that reserve() does not evict them
        lacking = [key for key, host_id in kept.items() if host_id is None][:limit]
        places = list(zip(lacking, self.reserve(lacking), strict=True))
        kept.update(places)
        self.unpin([host_id for host_id in kept.values() if host_id is not None])
        return places

    def forget(self, keys: Iterable[bytes]) -> None:
        self.pool.forget_contents(keys)

    def reset(self) -> int:
        return self.pool.reset_cache()

    def check_integrity(self, pinned: Iterable[Sequence[int]]) -> None:
        self.pool.check_integrity([block_id - self.first_id for block_id in ids] for ids in pinned)

    def _fitting(self, keys: Iterable[bytes]) -> dict[bytes, int | None]:
        """The first of `keys`, as many as fit beside the pinned blocks, with the block id of each that is here."""
        fitting: dict[bytes, int | None] = {}
        room = self.pool.num_free
        for key in keys:
            if not room:
                break
            fitting[key] = block_id = self.find(key)
            room -= block_id is None or self.pool.is_free(block_id - self.first_id)
        return fitting
