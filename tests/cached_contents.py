"""Does every block that a prefix can be found in hold the KV of that prefix? A simulated worker knows."""

from tests.simulated_worker import SimulatedWorker, Slot
from vllm_lite.engine.blocks.groups import KVGroup
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.state_slots import KEY
from vllm_lite.engine.sequence import Sequence


class CachedContents:
    """Listens to what is cached, and compares it with what the worker has: a wrong block is found when it becomes
    wrong, and not when somebody happens to need it."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._wanted: dict[bytes, list[Slot | None]] = {}
        self._prefixes: dict[bytes, tuple[int, ...]] = {}
        self._also = kv.on_store
        kv.on_store = self._stored

    def _stored(self, sequence: Sequence, group: KVGroup, index: int) -> None:
        start, size = index * group.block_size, group.block_size
        tokens = tuple(sequence.tokens[: start + size])
        adapter = 0 if sequence.request.adapter is None else sequence.request.adapter.number
        slots: list[Slot | None] = [(group.index, adapter, tokens[: start + count]) for count in range(1, size + 1)]
        self._wanted[sequence.block_hashes[index] + group.key] = slots
        self._prefixes[sequence.block_hashes[index] + KEY] = tokens
        if self._also is not None:
            self._also(sequence, group, index)

    def check(self, worker: SimulatedWorker) -> None:
        """To be called when the worker has run every step that was scheduled."""
        tiers = [(self._kv.pool, 0)]
        if self._kv.host is not None:
            tiers.append((self._kv.host.pool, self._kv.host.first_id))
        for pool, first_id in tiers:
            for block in pool.blocks:
                if block.block_hash is not None:
                    wanted, found = self._wanted[block.block_hash], worker.kv[first_id + block.block_id]
                    assert found == wanted, f"{block} is cached and holds {found}, not {wanted}"
        if self._kv.states is None or worker.states is None:
            return
        for slot in self._kv.states.pool.blocks:
            if slot.block_hash in self._prefixes:
                found_state = worker.states[slot.block_id]
                assert found_state == self._prefixes[slot.block_hash], f"{slot} holds the state of {found_state}"
        for key in self._kv.states.histories.demoted.keys() & self._prefixes.keys():
            place = None if self._kv.states.host is None else self._kv.states.host.find(key)
            assert place is not None
            assert worker.states[place] == self._prefixes[key], f"place {place} holds {worker.states[place]}"
