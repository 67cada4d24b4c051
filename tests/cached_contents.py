"""Checks that every cached block has the KV of the prefix under which it is found, by the contents of a simulated
worker."""

from collections.abc import Iterable

from tests.simulated_worker import SimulatedWorker, Slot
from tests.state_contents import StateContents
from vllm_lite.engine.blocks.groups import KVGroup
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.sequence import Sequence


class CachedContents:
    """Follows the events of the prefix cache and compares cached blocks with the worker's contents. So a wrong block is
    found when it becomes wrong, and not only when a request happens to use it."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._wanted: dict[bytes, list[Slot | None]] = {}
        self.states = StateContents(kv)
        self._blocks = kv.part(KVBlocks)
        self._also = self._blocks.on_store
        self._blocks.on_store = self._stored

    def _stored(self, sequence: Sequence, group: KVGroup, index: int) -> None:
        start, size = index * group.block_size, group.block_size
        tokens = tuple(sequence.tokens[: start + size])
        adapter = 0 if sequence.request.adapter is None else sequence.request.adapter.number
        slots: list[Slot | None] = [(group.index, adapter, tokens[: start + count]) for count in range(1, size + 1)]
        self._wanted[sequence.block_hashes[index] + group.key] = slots
        if self._also is not None:
            self._also(sequence, group, index)

    def check(self, worker: SimulatedWorker, sequences: Iterable[Sequence]) -> None:
        """Check all cached blocks. Call it when the worker has run every scheduled step; `sequences`: all unfinished
        ones."""
        tiers = [(self._blocks.pool, 0)]
        if isinstance(host := self._blocks.host, HostTier):
            tiers.append((host.pool, host.first_id))
        for pool, first_id in tiers:
            for block in pool.blocks:
                if block.block_hash is not None:
                    wanted, found = self._wanted[block.block_hash], worker.kv[first_id + block.block_id]
                    assert found == wanted, f"{block} is cached and holds {found}, not {wanted}"
        self.states.check(worker, sequences)
