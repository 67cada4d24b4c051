"""Preload: chooses the blocks of the disk tier to load after a start, before any request needs them.

After a start the pool is empty, while the KV of earlier chats is on disk. As long as there is no sequence, the most
recently written blocks are loaded into unused blocks, a few at a time, so that a chat's next message finds its prefix
in the pool. A request that arrives meanwhile waits for at most one such load, and only if it needs the same blocks.
Recurrent states are not preloaded: one is as large as many blocks, and a message needs only one.
"""

from collections import deque
from collections.abc import Container, Iterable

from vllm_lite.engine.blocks.groups import KVGroup
from vllm_lite.engine.blocks.kv_blocks import KVBlocks

CHUNK = 32
"""Blocks per load. One worker thread reads them, so that another is free for the loads of requests."""


class Preload:
    """Chooses the blocks to preload into one pool."""

    def __init__(self, blocks: KVBlocks, share: float) -> None:
        """Fills at most `share` of the pool."""
        self._blocks = blocks
        self._groups = {group.key: group for group in blocks.groups}
        self._room = int(share * blocks.pool.num_usable)
        self._wanted = deque[bytes]()
        self._is_open = self._room > 0

    def offer(self, keys: Iterable[bytes], index: Container[bytes]) -> None:
        """Queue keys that the tier has reported, the latest first, except those that are in `index` already. Ignored
        after close()."""
        if self._is_open:
            new = (key for key in keys if key[-1:] in self._groups and key not in index)
            for key in new:
                if len(self._wanted) >= self._room:
                    return
                self._wanted.append(key)

    def close(self) -> None:
        """Ignore further keys once there is a sequence: what the tier gains from now on is in memory already."""
        self._is_open = False

    def stop(self) -> None:
        """Drop all queued keys and accept none until restart()."""
        self._wanted.clear()
        self._is_open = False

    def restart(self, *, is_idle: bool) -> None:
        """Start again with new workers, which will report the tier's keys, unless sequences wait for them: these load
        what they need themselves."""
        self._wanted.clear()
        self._is_open = is_idle and self._room > 0

    def take(self, index: Container[bytes]) -> list[tuple[bytes, KVGroup]]:
        """Take the next keys to load, of those still in `index`; none, and stop, if that would evict a cached block or
        exceed the share of cached blocks."""
        pool, taken = self._blocks.pool, list[tuple[bytes, KVGroup]]()
        while self._wanted and len(taken) < CHUNK:
            key = self._wanted.popleft()
            if key in index and self._blocks.find(key) is None:
                taken.append((key, self._groups[key[-1:]]))
        unused = pool.peek(len(taken))
        is_full = len(taken) > len(unused) or pool.num_cached + len(taken) > self._room
        if is_full or any(block.block_hash is not None for block in unused):
            self.stop()
            return []
        return taken
