"""State slots: the memory of recurrent layers. A sequence holds one slot, however long it is; a state exists only where
it was saved, so the prefix cache of a hybrid model keeps states at chosen positions, all at ends of blocks.

States never move. A step reads a sequence's state from one slot and leaves it in another: a cached state is read where
it lies by all that begin there, and to save one is to go on in a new slot. What a step leaves is published, for others
to find, when the step has been sent; what it reads is held until then.

While a sequence decodes, its state is saved at each end of a block, and that slot is taken back at the next but one: of
all these states the last are left when the sequence ends, and the next message of a chat begins there. The one before
the last is for forks, whose client and whose steps without results lag behind. No step drafts across such an end, as
far as earlier drafts prove right, or there would be no state there; and a state takes up those alone that are right.

Which saved state makes room for another is for StateHistories to say. It may go to the host, and so does the state of a
sequence that is swapped out; a sequence that begins with one there has it copied into the slot in which it goes on.
"""

from collections.abc import Iterable, Sequence

from vllm_lite.engine.blocks.host_states import HostStates
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.blocks.state_histories import History, StateHistories
from vllm_lite.engine.blocks.state_place import NO_SLOT, Left, Snapshot, StatePlace
from vllm_lite.engine.sequence import Sequence as Seq
from vllm_lite.engine.sequence import Status
from vllm_lite.protocol.step import States

KEY = b"state"
"""Behind the hash of a prefix: the key of the state at its end."""
LAST_MARKS = 2
"""So many of the marks nearest to a prompt's end have their states saved, beside the first: those of long prompts
would push out other chats' states."""
SNAPSHOTS = 2
"""So many states of a sequence that decodes are kept."""


class StateSlots:
    """Decides slots; the workers' kernels read and write them. A slot that nobody holds is blank or has a state that
    can be found."""

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        enable_caching: bool = True,
        *,
        num_host_states: int = 0,
        max_moves: int = 1,
        blocks_each: int = 0,
    ) -> None:
        """`num_slots` with number 0, which is none; at most `max_moves` states move to or from the host in a step, each
        as long as `blocks_each` KV blocks."""
        self.pool = BlockPool(num_slots, enable_caching)
        self.histories = StateHistories(num_slots + num_host_states)
        self.host = HostStates(num_host_states, num_slots, max_moves, self.histories) if num_host_states else None
        self.blocks_moved = blocks_each if num_host_states else 0
        """How many KV blocks take as long to move as the state of a sequence that is swapped out."""
        self._block_size = block_size
        self._blank = self.pool.get_new_blocks(self.pool.num_free)[::-1]  # with nothing in them, held here
        self._read: list[int] = []  # sources of the step in the making
        self._begins: dict[Seq, int] = {}  # where sequences are read that go on elsewhere in the step in the making
        self._unpublished: list[Left] = []
        self._promised: dict[bytes, Seq] = {}
        """States that steps to come will leave, and of which sequence."""
        self.num_saved = self.num_evicted = 0
        """States that could be found, and those of them that were pushed out, since the start."""

    @property
    def num_free(self) -> int:
        """Slots that can be had, those of cached states that nobody reads included."""
        return len(self._blank) + self.pool.num_free

    @property
    def num_held(self) -> int:
        """Slots that sequences hold."""
        others = {*self._blank, *self._read, *(left.slot for left in self._unpublished)}  # some are two of these
        return self.pool.num_used - len(others)

    @property
    def is_freeing(self) -> bool:
        """Whether the next step can have slots that this one cannot."""
        return bool(self._unpublished)

    def begin_step(self) -> None:
        """The step before has been sent: what it left may be read, and what it read may be written."""
        if self.host is not None:
            self.host.begin_step()
        self._let_go(self._read)
        self._read = []
        self._begins = {}
        for slot, key, history, snapshot in self._unpublished:
            if snapshot is not None:
                snapshot.key = key
            if key in self.histories.kept:  # another sequence has left the same
                self._blank.append(slot)
                continue
            if self.host is not None:
                self.host.forget((key,))
            self.histories.add(key, history)
            self.pool.cache_block(slot, key)
            self.pool.free((slot,))
            self.num_saved += 1
        self._unpublished = []

    # ---- finding

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """The largest number of blocks, at most `num_blocks`, behind which there is a state; 0 is always one."""
        find = self._find
        return next((count for count in range(num_blocks, 0, -1) if find(hashes[count - 1] + KEY) is not None), 0)

    def find(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """The slot with the state behind so many blocks, which `longest` has found, or its place on the host."""
        return (self._find(hashes[num_blocks - 1] + KEY) if num_blocks else None) or NO_SLOT

    def _find(self, key: bytes) -> int | None:
        slot = self.pool.get_cached_block(key)
        return self.host.find(key) if slot is None and self.host is not None else slot

    def is_on_host(self, place: int) -> bool:
        """Whether `find` has found it there."""
        return place >= self.pool.num_blocks

    def is_coming(self, sequence: Seq, found: int, num_blocks: int) -> bool:
        """Whether another sequence that runs is about to leave a state behind more than the first `found` blocks of
        this one, and at most `num_blocks`: it would be computed a second time."""
        if not (self._promised or self._unpublished):
            return False
        sent = {left.key for left in self._unpublished}
        for count in range(num_blocks, found, -1):
            key = sequence.block_hashes[count - 1] + KEY
            maker = self._promised.get(key)
            if key in sent or (maker is not None and maker.status is Status.RUNNING):
                return True
        return False

    def has_room_for(self, source: int) -> bool:
        """Whether a sequence can have a slot and begin with `source`, which `find` has found; if need be it takes over
        that one. A state on the host has to be loaded by this step."""
        return self.num_free > 0 and (not self.is_on_host(source) or (self.host is not None and self.host.may_move))

    # ---- a sequence's state

    def begin(self, sequence: Seq, source: int, num_computed: int, reach: int) -> None:
        """Give a sequence that is admitted a slot, to begin with the state `source` at `num_computed`; KV is cached up
        to `reach`, where the prefixes of others part from it. Call it after `has_room_for`."""
        history = self._history(sequence, num_computed // self._block_size if source else 0)
        key = self._key(sequence, num_computed) if self.is_on_host(source) else None
        if key is not None and self.host is not None:
            self.host.reserve(key)
        elif source:
            self.pool.touch((source,))
        live = self._take()
        if key is not None and self.host is not None and live is not None:
            self.host.load(key, live)
            source = NO_SLOT
        if live is None:  # it is the only slot
            self._forget(source)
            live = source
            self.pool.touch((source,))
        sequence.state = state = StatePlace(live, history, source, saved_at=num_computed)
        self._plan_saves(sequence, state, num_computed, reach)

    def _plan_saves(self, sequence: Seq, state: StatePlace, num_computed: int, reach: int) -> None:
        """Take slots for the states that are worth saving, as far as there are any."""
        if not self.pool.enable_caching:
            return
        for number, position in enumerate(self._worth_saving(sequence, num_computed, reach)):
            slot = self._take(only_superseded=number > 0)
            if slot is None:
                break
            state.saves.append((position, slot))
            if len(sequence.block_hashes) * self._block_size >= position:
                self._promised.setdefault(self._key(sequence, position), sequence)
        state.saves.sort()
        if state.saves:
            state.saved_at = state.saves[-1][0]

    def _history(self, sequence: Seq, num_found: int) -> History:
        """The history with which the sequence goes on, having found the state behind so many blocks. If it was
        preempted, its prompt is not a new one."""
        found = sequence.block_hashes[num_found - 1] + KEY if num_found else None
        if sequence.status is Status.PREEMPTED:
            return self.histories.again(found)
        longer = (block_hash + KEY for block_hash in reversed(sequence.block_hashes[num_found:]))
        return self.histories.begin(found, longer)

    def _worth_saving(self, sequence: Seq, num_computed: int, reach: int) -> list[int]:
        """Positions behind `num_computed`, the most useful first: the end of what is known, the last marks, where
        prefixes part, the first mark."""
        size = self._block_size
        marks = list(dict.fromkeys(mark // size * size for mark in sequence.request.marks if mark >= size))
        end = (sequence.num_tokens - 1) // size * size
        wanted = dict.fromkeys([end, *reversed(marks[-LAST_MARKS:]), reach, *marks[:1]])
        return [position for position in wanted if num_computed < position < sequence.num_tokens]

    def entry(self, sequence: Seq) -> States:
        """What the workers must know of a sequence that comes in."""
        state = sequence.state
        if state is None:
            raise RuntimeError(f"{sequence} has no state")
        source = state.source
        if source:
            self._read.append(source)
            self._begins[sequence] = source
            state.source = NO_SLOT
        elif sequence.num_computed:
            source = state.live  # it was swapped out
        return States(sequence.handle, source, state.live, list(state.saves))

    def can_fork(self, parent: Seq, position: int, num_scheduled: int) -> bool:
        """Whether the state of a running sequence is at `position`, and there are slots for `fork`; the step in the
        making computes `num_scheduled` tokens of it."""
        state = parent.state
        if state is None or state.saves or state.is_ahead or parent.num_drafted:
            return False
        return parent.num_computed - num_scheduled == position > 0 and self.num_free >= 2

    def fork(self, parent: Seq, child: Seq, num_scheduled: int) -> list[States]:
        """Let `child` begin with the state where `parent` is. Both read it where it lies, and each goes on in a slot of
        its own. Call it after `can_fork`; the workers hear of it when the two are scheduled. Returns what they are to
        hear of the parent, if it is already."""
        state, own = parent.state, self._take()
        if state is None or own is None:
            raise RuntimeError(f"{parent} has no state to fork, or there is no slot")
        entries: list[States] = []
        if num_scheduled:
            if parent not in self._begins:
                state.source, state.live, own = state.live, own, self._take()
                entries.append(self.entry(parent))
            if own is None:
                raise RuntimeError(f"there is no slot for a fork of {parent}")
            source = self._begins[parent]
            self.pool.touch((source,))
            child.state = StatePlace(own, state.history, source, saved_at=child.num_computed)
            return entries
        if state.source == NO_SLOT:
            source, state.live = state.live, own
            state.source, own = source, self._take()
        if own is None:
            raise RuntimeError(f"there is no slot for a fork of {parent}")
        self.pool.touch((state.source,))
        child.state = StatePlace(own, state.history, state.source, saved_at=parent.num_computed)
        return entries

    def next_places(self, sequence: Seq) -> list[States]:
        """What the workers must know of a running sequence before it goes on. At the end of a block its state is saved,
        if there is a slot for it."""
        state, position = sequence.state, sequence.num_computed
        if state is not None and state.source:
            return [self.entry(sequence)]
        if sequence.num_drafted or position % self._block_size or not self.pool.enable_caching:
            return []
        if state is None or state.saves or position <= state.saved_at:
            return []
        slot = self._for_snapshot(state.snapshots)
        if slot is None:
            return []
        source, state.live, state.saved_at = state.live, slot, position
        state.snapshots.append(Snapshot(position, source))
        self._begins[sequence] = source
        self.publish(sequence, sequence.num_hashed_blocks * self._block_size)
        return [States(sequence.handle, source, slot, [])]

    def _for_snapshot(self, snapshots: list[Snapshot]) -> int | None:
        """A slot in which a sequence goes on that leaves one more snapshot: that of its oldest, if it has as many as it
        may have or there is none that nobody misses."""
        if len(snapshots) < SNAPSHOTS:
            slot = self._take(only_superseded=bool(snapshots))
            if slot is not None or not snapshots:
                return slot
        return self._taken_back(snapshots.pop(0))

    def _taken_back(self, snapshot: Snapshot) -> int | None:
        """The slot of a snapshot that newer ones replace, if nobody else has it by now; else another one."""
        if snapshot.key is None:
            return snapshot.slot
        block = self.pool.blocks[snapshot.slot]
        if block.block_hash != snapshot.key or block.ref_count:
            return self._take()
        self.pool.touch((snapshot.slot,))
        self._forget(snapshot.slot)
        return snapshot.slot

    def publish(self, sequence: Seq, num_tokens: int) -> None:
        """The hashes of the first `num_tokens` are known, and their steps made: others may find the states there from
        the next step on."""
        state = sequence.state
        if state is None:
            return
        while state.saves and state.saves[0][0] <= num_tokens:
            position, slot = state.saves.pop(0)
            self._break_promise(sequence, position)
            self._unpublished.append(Left(slot, self._key(sequence, position), state.history))
        for snapshot in state.snapshots:
            if snapshot.key is None and snapshot.position <= num_tokens:
                key = self._key(sequence, snapshot.position)
                self._unpublished.append(Left(snapshot.slot, key, state.history, snapshot))
                snapshot.key = b""

    def release(self, sequence: Seq) -> None:
        """Take the slots of a sequence. A snapshot of it can be found from now on, if its tokens are known."""
        state, sequence.state = sequence.state, None
        if state is None:
            return
        if state.host is not None and self.host is not None:
            self.host.unpin(state.host)
        for snapshot in state.snapshots:
            if snapshot.key is not None:
                continue
            if snapshot.position <= sequence.num_hashed_blocks * self._block_size:
                key = self._key(sequence, snapshot.position)
                self._unpublished.append(Left(snapshot.slot, key, state.history))
            else:
                self._blank.append(snapshot.slot)
        for position, _ in state.saves:
            self._break_promise(sequence, position)
        position, num_hashed = sequence.num_computed, sequence.num_hashed_blocks * self._block_size
        is_whole = position % self._block_size == 0 and not state.source and not state.is_ahead
        if state.live == NO_SLOT:
            return
        if state.saved_at < position <= num_hashed and is_whole:
            self._unpublished.append(Left(state.live, self._key(sequence, position), state.history))
        else:
            self._blank.append(state.live)
        if state.source:
            self._let_go((state.source,))
        self._blank += (slot for _, slot in state.saves)

    def swap_out(self, sequence: Seq) -> bool:
        """Move the state of a sequence that is swapped out to the host, and take its slots. False: it stays in its
        slot."""
        state = sequence.state
        if self.host is None or state is None or state.live == NO_SLOT:
            return False
        place = self.host.pin(state.source or state.live)
        if place is None:
            return False
        self.release(sequence)
        saved_at = min(state.saved_at, sequence.num_computed)  # what was to be saved behind it has no slot any more
        sequence.state = StatePlace(NO_SLOT, state.history, saved_at=saved_at, host=place)
        return True

    def may_swap_in(self, sequence: Seq) -> bool:
        """Whether the step can have the sequence go on in a slot."""
        if sequence.state is None or sequence.state.host is None or self.host is None:
            return True
        return self.num_free > 0 and self.host.may_move

    def swap_in(self, sequence: Seq) -> None:
        """Have the sequence go on in a slot of the device. Call it after `may_swap_in`."""
        state = sequence.state
        if state is None or state.host is None or self.host is None:
            return
        self.host.reserve()
        slot = self._take()
        if slot is None:
            raise RuntimeError(f"there is no slot for {sequence}")
        self.host.unpin(state.host, slot)
        state.live, state.host = slot, None
        self._plan_saves(sequence, state, sequence.num_computed, 0)

    def _break_promise(self, sequence: Seq, position: int) -> None:
        if len(sequence.block_hashes) * self._block_size >= position:
            key = self._key(sequence, position)
            if self._promised.get(key) is sequence:
                del self._promised[key]

    # ---- forgetting

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let no state behind these prefixes be found any more."""
        lost = dict.fromkeys(key + KEY for key in keys)  # in order: a replay, with other hashes, forgets as this does
        self._unpublished, others = [], self._unpublished
        for left in others:
            if left.key in lost:
                self._blank.append(left.slot)
            else:
                self._unpublished.append(left)
        if self.host is not None:
            self.host.forget(lost)
        for slot in [self.pool.get_cached_block(key) for key in lost if key in self.histories.kept]:
            if slot is not None:
                self.pool.touch((slot,))
                self._forget(slot)
                self._let_go((slot,))

    def reset_cache(self) -> int:
        """Let no state be found any more. Returns how many could be."""
        self._blank += [left.slot for left in self._unpublished]
        self._unpublished, self._promised = [], {}
        if self.host is not None:
            self.host.clear()
        self.histories.clear()
        num_forgotten = self.pool.reset_cache()
        self._blank += self.pool.get_new_blocks(self.pool.num_free)
        return num_forgotten

    # ---- inside

    def _take(self, *, only_superseded: bool = False) -> int | None:
        """A slot with one reference; None if there is none. Blank ones go first; states that are the latest of their
        chats are spared with `only_superseded`."""
        if self._blank:
            return self._blank.pop()
        kept = self.histories.kept
        key = self.histories.worst(kept, self._may_go, only_superseded=only_superseded)
        slot = None if key is None else self.pool.get_cached_block(key)
        if key is None or slot is None:
            return None
        if self.host is not None:
            self.host.demote(key, kept[key], slot)
        self.pool.touch((slot,))
        self._forget(slot, is_remembered=key not in self.histories.demoted)
        self.num_evicted += 1
        return slot

    def _may_go(self, key: bytes) -> bool:
        slot = self.pool.get_cached_block(key)
        return slot is not None and self.pool.is_free(slot)

    def _forget(self, slot: int, *, is_remembered: bool = False) -> None:
        """Let the state in a slot that is held be found no more."""
        key = self.pool.blocks[slot].block_hash
        if key is not None:
            self.pool.forget((slot,))
            self.histories.remove(self.histories.kept, key, is_remembered=is_remembered)

    def _let_go(self, slots: Iterable[int]) -> None:
        """Drop a reference of each slot; those of states that cannot be found any more become blank."""
        for slot in slots:
            block = self.pool.blocks[slot]
            if block.ref_count == 1 and block.block_hash is None:
                self._blank.append(slot)
            else:
                self.pool.free((slot,))

    def _key(self, sequence: Seq, position: int) -> bytes:
        return sequence.block_hashes[position // self._block_size - 1] + KEY

    def check_integrity(self, sequences: Iterable[Seq]) -> None:
        """Raise RuntimeError if a slot's references are not those of its holders, or two sequences write to one."""
        held = [sequence.state.held() for sequence in sequences if sequence.state is not None]
        held += [self._blank, self._read, [left.slot for left in self._unpublished]]
        self.pool.check_integrity(held)
        found = {block.block_hash for block in self.pool.blocks if block.block_hash is not None}
        if found != self.histories.kept.keys() or len(found) != self.pool.num_cached:
            raise RuntimeError("the states that can be found are not those with a history, each once")
        if self.pool.num_free != sum(map(self._may_go, found)):
            raise RuntimeError("a slot that nobody holds is neither blank nor has a state that can be found")
        written = [each.state.live for each in sequences if each.state is not None and each.state.live]
        if len(set(written)) < len(written) or any(self.pool.blocks[slot].block_hash for slot in written):
            raise RuntimeError(f"slots {written} are written by several sequences, or are cached")
        if self.host is not None:
            places = [each.state.host for each in sequences if each.state is not None]
            self.host.check_integrity(place for place in places if place is not None)
