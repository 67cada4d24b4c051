"""Preload: which contents of a tier below memory are loaded before anybody asks for them.

After a start the pool is empty, and the chats that go on are below it. What is there before the first request, the
latest first, is loaded into blocks that nobody has used yet, a few at a time and only while there is no sequence. So a
chat's next message finds its prefix in the pool. Who comes meanwhile waits for one such load at most, and only if it
needs the same blocks. States are not loaded: one of them is as long as many blocks, and a message needs one alone.
"""

from collections import deque
from collections.abc import Container, Iterable

from vllm_lite.engine.blocks.groups import KVGroup
from vllm_lite.engine.blocks.kv_blocks import KVBlocks

CHUNK = 32
"""Blocks of one load: as many as one of the workers' threads reads, so that another is there for who comes."""


class Preload:
    """Chooses for one pool."""

    def __init__(self, blocks: KVBlocks, share: float) -> None:
        """At most `share` of the pool is filled."""
        self._blocks = blocks
        self._groups = {group.key: group for group in blocks.groups}
        self._room = int(share * blocks.pool.num_usable)
        self._wanted = deque[bytes]()
        self._is_open = self._room > 0

    def offer(self, keys: Iterable[bytes], index: Container[bytes]) -> None:
        """The tier has these, the latest first. They count until somebody asks, but for those of the `index`, which
        were known before."""
        if self._is_open:
            new = (key for key in keys if key[-1:] in self._groups and key not in index)
            for key in new:
                if len(self._wanted) >= self._room:
                    return
                self._wanted.append(key)

    def close(self) -> None:
        """Somebody has asked: what the tier has from now on was written by those who have it in memory."""
        self._is_open = False

    def stop(self) -> None:
        """Load nothing more until a restart."""
        self._wanted.clear()
        self._is_open = False

    def restart(self, *, is_idle: bool) -> None:
        """The contents are to be said anew, by other workers. Who waits for these loads what it needs."""
        self._wanted.clear()
        self._is_open = is_idle and self._room > 0

    def take(self, index: Container[bytes]) -> list[tuple[bytes, KVGroup]]:
        """Take what is to be loaded next, of what the `index` has; nothing when it would push out anything."""
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
