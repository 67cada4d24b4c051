"""StateStore: the slots on the device and places on the host of recurrent states, and the index of saved states.

An unreferenced slot is blank or has a saved state. A state that a step writes is published when that step has been
sent; slots that it reads are held until then. StateSlots decides how each sequence uses its slots.
"""

from collections.abc import Iterable

from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.states.histories import StateHistories
from vllm_lite.engine.states.host import HostStates
from vllm_lite.engine.states.place import Left
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.transfers import STATE

KEY = STATE
"""Suffix of a state's key: the key is the block hash at its position and this."""


class StateStore:
    """Allocates slots; the workers' kernels read and write the states in them.

    blank        slots without a state, referenced by the store
    read         slots that the step being scheduled reads, each referenced once
    unpublished  states that the step being scheduled writes, to be published after it
    num_saved    states published since the start; `num_evicted` of them were evicted
    """

    def __init__(self, num_slots: int, enable_caching: bool, num_host_states: int, max_moves: int) -> None:
        self.pool = BlockPool(num_slots, enable_caching)
        self.histories = StateHistories(num_slots + num_host_states)
        self.host = HostStates(num_host_states, num_slots, max_moves, self.histories) if num_host_states else None
        self.blank = self.pool.get_new_blocks(self.pool.num_free)[::-1]
        self.read: list[int] = []
        self.unpublished: list[Left] = []
        self.num_saved = self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Number of slots that can be allocated, those of unreferenced saved states included."""
        return len(self.blank) + self.pool.num_free

    @property
    def num_held(self) -> int:
        """Number of slots that sequences hold."""
        others = {*self.blank, *self.read, *(left.slot for left in self.unpublished)}  # some are two of these
        return self.pool.num_used - len(others)

    def begin_step(self) -> None:
        """Publish the states that the previous step, sent by now, writes, and release the slots that it reads."""
        if self.host is not None:
            self.host.begin_step()
        self.let_go(self.read)
        self.read = []
        for slot, key, history, snapshot, ends_prompt in self.unpublished:
            if snapshot is not None:
                snapshot.key = key
            if key in self.histories.kept:  # another sequence has saved the same state
                self.blank.append(slot)
                continue
            if self.host is not None:
                self.host.forget((key,))
            self.histories.add(key, history, ends_prompt=ends_prompt)
            self.pool.cache_block(slot, key)
            self.pool.free((slot,))
            self.num_saved += 1
        self.unpublished = []

    # ---- finding

    def find(self, key: bytes) -> int | None:
        """Slot of the saved state of `key`, or its place on the host, or None."""
        slot = self.pool.get_cached_block(key)
        return self.host.find(key) if slot is None and self.host is not None else slot

    def is_on_host(self, place: int) -> bool:
        """Whether `place`, which find() returned, is on the host."""
        return place >= self.pool.num_blocks

    # ---- taking and giving back

    def take(self, *, only_superseded: bool = False) -> int | None:
        """Allocate a slot with one reference; None if there is none. Blank slots are used first, then a saved state is
        evicted; with `only_superseded` not the latest one of a chat."""
        if self.blank:
            return self.blank.pop()
        kept = self.histories.kept
        key = self.histories.worst(kept, self._may_go, only_superseded=only_superseded)
        slot = None if key is None else self.pool.get_cached_block(key)
        if key is None or slot is None:
            return None
        if self.host is not None:
            self.host.demote(key, kept[key], slot)
        self.pool.touch((slot,))
        self.drop(slot, is_remembered=key not in self.histories.demoted)
        self.num_evicted += 1
        return slot

    def _may_go(self, key: bytes) -> bool:
        slot = self.pool.get_cached_block(key)
        return slot is not None and self.pool.is_free(slot)

    def drop(self, slot: int, *, is_remembered: bool = False) -> None:
        """Remove the state in a referenced slot from the index."""
        key = self.pool.blocks[slot].block_hash
        if key is not None:
            self.pool.forget((slot,))
            self.histories.remove(self.histories.kept, key, is_remembered=is_remembered)

    def let_go(self, slots: Iterable[int]) -> None:
        """Drop one reference of each slot; an unreferenced slot without a saved state becomes blank."""
        for slot in slots:
            block = self.pool.blocks[slot]
            if block.ref_count == 1 and block.block_hash is None:
                self.blank.append(slot)
            else:
                self.pool.free((slot,))

    # ---- forgetting and reporting

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the saved states at these block hashes."""
        lost = dict.fromkeys(key + KEY for key in keys)  # in order: a replay, with other hashes, forgets as this does
        self.unpublished, others = [], self.unpublished
        for left in others:
            if left.key in lost:
                self.blank.append(left.slot)
            else:
                self.unpublished.append(left)
        if self.host is not None:
            self.host.forget(lost)
        for slot in [self.pool.get_cached_block(key) for key in lost if key in self.histories.kept]:
            if slot is not None:
                self.pool.touch((slot,))
                self.drop(slot)
                self.let_go((slot,))

    def reset(self) -> None:
        """Drop all saved states."""
        self.blank += [left.slot for left in self.unpublished]
        self.unpublished = []
        if self.host is not None:
            self.host.clear()
        self.histories.clear()
        self.pool.reset_cache()
        self.blank += self.pool.get_new_blocks(self.pool.num_free)

    def count(self, stats: Stats) -> None:
        """Write the gauges and counters of the states."""
        stats.num_state_slots, stats.num_used_state_slots = self.pool.num_usable, self.num_held
        stats.num_cached_states = self.pool.num_cached
        stats.saved_states, stats.evicted_states = self.num_saved, self.num_evicted
        if self.host is not None:
            stats.num_host_states, stats.num_used_host_states = self.host.num_states, self.host.num_pinned
            stats.num_cached_states += self.host.num_cached
            stats.demoted_states, stats.promoted_states = self.host.num_demoted, self.host.num_promoted

    def check_integrity(self, held: list[list[int]]) -> None:
        """Raise RuntimeError if the slots' references are not those of the sequences (`held`) and the store."""
        self.pool.check_integrity([*held, self.blank, self.read, [left.slot for left in self.unpublished]])
        found = {block.block_hash for block in self.pool.blocks if block.block_hash is not None}
        if found != self.histories.kept.keys() or len(found) != self.pool.num_cached:
            raise RuntimeError("the states that can be found are not those with a history, each once")
        if self.pool.num_free != sum(map(self._may_go, found)):
            raise RuntimeError("a slot that nobody holds is neither blank nor has a state that can be found")
