"""StateStore: the slots on the device and the places on the host in which recurrent states are, and which can be found.

A slot that nobody holds is blank or has a state that can be found. What a step leaves can be found when that step has
been sent; what it reads is held until then. StateSlots decides what each sequence does with its slots.
"""

from collections.abc import Iterable

from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.states.histories import StateHistories
from vllm_lite.engine.states.host import HostStates
from vllm_lite.engine.states.place import Left
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.transfers import STATE

KEY = STATE
"""Behind the hash of a prefix: the key of the state at its end."""


class StateStore:
    """Gives out slots; the workers' kernels read and write them.

    blank        slots with nothing in them, held here
    read         sources of the step being scheduled, each held once
    unpublished  states that the step being scheduled leaves, for others to find
    num_saved    states that could be found since the start; `num_evicted` of them were pushed out
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
        """Slots that can be had, those of cached states that nobody reads included."""
        return len(self.blank) + self.pool.num_free

    @property
    def num_held(self) -> int:
        """Slots that sequences hold."""
        others = {*self.blank, *self.read, *(left.slot for left in self.unpublished)}  # some are two of these
        return self.pool.num_used - len(others)

    def begin_step(self) -> None:
        """The step before has been sent: what it left may be read, and what it read may be written."""
        if self.host is not None:
            self.host.begin_step()
        self.let_go(self.read)
        self.read = []
        for slot, key, history, snapshot, ends_prompt in self.unpublished:
            if snapshot is not None:
                snapshot.key = key
            if key in self.histories.kept:  # another sequence has left the same
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
        """The slot with the state of this key, or its place on the host."""
        slot = self.pool.get_cached_block(key)
        return self.host.find(key) if slot is None and self.host is not None else slot

    def is_on_host(self, place: int) -> bool:
        """Whether `find` has found it there."""
        return place >= self.pool.num_blocks

    # ---- taking and giving back

    def take(self, *, only_superseded: bool = False) -> int | None:
        """A slot with one reference; None if there is none. Blank ones go first; states that are the latest of their
        chats are spared with `only_superseded`."""
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
        """Let the state in a slot that is held be found no more."""
        key = self.pool.blocks[slot].block_hash
        if key is not None:
            self.pool.forget((slot,))
            self.histories.remove(self.histories.kept, key, is_remembered=is_remembered)

    def let_go(self, slots: Iterable[int]) -> None:
        """Drop a reference of each slot; those of states that cannot be found any more become blank."""
        for slot in slots:
            block = self.pool.blocks[slot]
            if block.ref_count == 1 and block.block_hash is None:
                self.blank.append(slot)
            else:
                self.pool.free((slot,))

    # ---- forgetting and reporting

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let no state behind these prefixes be found any more."""
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
        """Let no state be found any more."""
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
        """Raise RuntimeError if a slot's references are not those of the sequences, which hold `held`, and of this."""
        self.pool.check_integrity([*held, self.blank, self.read, [left.slot for left in self.unpublished]])
        found = {block.block_hash for block in self.pool.blocks if block.block_hash is not None}
        if found != self.histories.kept.keys() or len(found) != self.pool.num_cached:
            raise RuntimeError("the states that can be found are not those with a history, each once")
        if self.pool.num_free != sum(map(self._may_go, found)):
            raise RuntimeError("a slot that nobody holds is neither blank nor has a state that can be found")
