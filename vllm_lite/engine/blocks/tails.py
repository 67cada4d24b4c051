"""BlockTails: blocks that prompts go on from in their middle, where a mark says that prompts part.

A block's tokens before the mark are never written again until the block is given to another sequence, though its own
may go on behind them. So they can be found until then without a reference, and sequences that find them get a copy.
"""

from collections.abc import Iterable, Sequence

from vllm_lite.engine.blocks.pool import BlockPool, PoolObserver


class BlockTails(PoolObserver):
    """At most one for each block of the pool: the last that was added. Keys name the tokens up to the mark."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._keys: dict[int, bytes] = {}
        self._ids: dict[bytes, int] = {}
        self._new: dict[bytes, int] = {}
        """Tails that the step in the making writes: a copy made by the same step would come too early."""
        pool.observers.append(self)

    def begin_step(self) -> None:
        """Let others find the tails of the step before, which has been sent."""
        for key, block_id in self._new.items():
            self._drop(block_id)
            self._keys[block_id], self._ids[key] = key, block_id
        self._new.clear()

    def add(self, key: bytes, block_id: int) -> None:
        """From the next step on, `block_id` is found by `key`."""
        self._new[key] = block_id

    def find(self, key: bytes) -> int | None:
        return self._ids.get(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._new.pop(key, None)
            if (block_id := self._ids.get(key)) is not None:
                self._drop(block_id)

    def allocated(self, ids: Sequence[int]) -> None:
        """See PoolObserver: others will write to these blocks."""
        if self._keys:
            for block_id in ids:
                self._drop(block_id)
        if self._new:
            taken = set(ids)
            self._new = {key: block_id for key, block_id in self._new.items() if block_id not in taken}

    def cleared(self) -> None:
        """See PoolObserver."""
        self._keys.clear()
        self._ids.clear()
        self._new.clear()

    def _drop(self, block_id: int) -> None:
        key = self._keys.pop(block_id, None)
        if key is not None and self._ids.get(key) == block_id:
            del self._ids[key]

    def check_integrity(self) -> None:
        """Raise RuntimeError if a tail is found in a block that is not its own, or in the null block."""
        if any(self._keys.get(block_id) != key for key, block_id in self._ids.items()):
            raise RuntimeError("a tail is found in a block that has another one")
        if not all(0 < block_id < self._pool.num_blocks for block_id in (*self._keys, *self._new.values())):
            raise RuntimeError("a tail is in a block that does not exist")
