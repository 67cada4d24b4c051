"""State slots: the memory of recurrent layers. Each sequence holds one slot, whatever its length. A state exists only
where it was saved, so the prefix cache of a hybrid model has states at chosen positions, all at block boundaries.

States are not copied on the device. A step reads a sequence's state from one slot and writes it to the same or another
one: all sequences that continue from a saved state read it in place, and a sequence saves its state by continuing in a
new slot. A state is published when the step that writes it has been sent; slots that a step reads are held until then.

While a sequence decodes, its state is saved at each block boundary, and each of these states is freed two boundaries
later, so the last two remain when it ends. The next message of a chat continues from the last. The one before is for
forks, whose client and whose unconfirmed steps lag behind. No step drafts across a block boundary, where the state has
to be saved, and a state only includes accepted drafts.

StateHistories chooses the saved state to evict. It may be demoted to the host, where the states of swapped-out
sequences go, too. A sequence that continues from a state on the host gets it copied into its own slot.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_lite.engine.blocks.part import CachePart, Forgotten, Growth, Op, PrefixHit
from vllm_lite.engine.blocks.verdict import OK, Admission, Verdict
from vllm_lite.engine.sequence import Sequence as Seq
from vllm_lite.engine.sequence import Status
from vllm_lite.engine.states.histories import History
from vllm_lite.engine.states.place import NO_SLOT, Left, Snapshot, StatePlace
from vllm_lite.engine.states.store import KEY, StateStore
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import Entry, States

LAST_MARKS = 2
"""Number of marks nearest to the prompt's end at which states are saved, beside the first mark. More, in long prompts,
would evict other chats' states."""
SNAPSHOTS = 2
"""Number of states kept of a sequence that decodes."""

LACKING = Admission(Verdict.LATER, lacks="state")
COMING = LACKING._replace(is_arriving=True)


class StateHit(NamedTuple):
    """The saved state from which a sequence continues."""

    place: int = NO_SLOT
    """Slot of the state, or its place on the host."""
    is_coming: bool = False
    """Whether a running sequence is about to save a state of a longer prefix."""


class StateSlots(CachePart[StateHit]):
    """Assigns a slot of the store to each sequence, and chooses the positions at which states are saved."""

    acts_by_blocks = wants_marks = True

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
        """`num_slots` includes slot 0 (NO_SLOT). A step moves at most `max_moves` states to or from the host, each as
        large as `blocks_each` KV blocks."""
        self.store = StateStore(num_slots, enable_caching, num_host_states, max_moves)
        self.pool, self.host, self.histories = self.store.pool, self.store.host, self.store.histories
        self.blocks_moved = blocks_each if num_host_states else 0
        """Cost of swapping one state, in KV blocks."""
        self.block_size = block_size
        self.others_hold: Callable[[], list[list[int]]] = list
        """Returns referenced slots that no sequence holds: those in transfer to or from the disk tier."""
        self._begins: dict[Seq, int] = {}  # slots that the step being scheduled reads, of sequences that write another
        self._promised: dict[bytes, Seq] = {}
        """Key -> sequence, for states that later steps will save."""
        self.num_missing_tokens = 0
        """Tokens whose KV was cached without a state at their end, since the start."""

    def num_moved(self, num_tokens: int) -> int:  # noqa: ARG002  # a state is as large for any number
        return self.blocks_moved

    # ---- the step

    @property
    def is_moving(self) -> bool:
        return self.host is not None and bool(self.host.ops)

    @property
    def is_freeing(self) -> bool:
        return bool(self.store.unpublished)

    def take_ops(self) -> list[Op]:
        return self.host.take_ops() if self.host is not None else []

    def begin_step(self) -> None:
        """Publish the states that the previous step, sent by now, writes, and release the slots that it reads."""
        self.store.begin_step()
        self._begins = {}

    # ---- finding

    def register(self, sequence: Seq) -> None:
        sequence.forks_state = True

    def search(self, sequence: Seq) -> "StateSearch":
        return StateSearch(self, sequence)

    def nothing(self) -> StateHit:
        return StateHit()

    def is_coming(self, sequence: Seq, found: int, num_blocks: int) -> bool:
        """Whether another running sequence is about to save a state of more than the first `found` blocks of this one,
        and at most `num_blocks`. Waiting for it saves computing it twice."""
        if not (self._promised or self.store.unpublished):
            return False
        sent = {left.key for left in self.store.unpublished}
        for count in range(num_blocks, found, -1):
            key = sequence.block_hashes[count - 1] + KEY
            maker = self._promised.get(key)
            if key in sent or (maker is not None and maker.status is Status.RUNNING):
                return True
        return False

    def admission(self, sequence: Seq, found: StateHit, chunk: int) -> Admission:  # noqa: ARG002
        """Whether a slot is free (the slot of the hit itself counts) and, for a state on the host, this step may load
        it. A state that is about to be saved is waited for."""
        may_load = not self.store.is_on_host(found.place) or (self.host is not None and self.host.may_move)
        if found.is_coming:
            return COMING
        return OK if self.store.num_free > 0 and may_load else LACKING

    # ---- a sequence's state

    def admit(self, sequence: Seq, hit: PrefixHit, found: StateHit, num_tokens: int) -> bool:  # noqa: ARG002
        """Allocate a slot for the sequence, which continues from the state that was found. KV is cached up to
        `hit.reach`, where earlier prompts diverge from this one."""
        source, num_computed = found.place, sequence.num_computed
        history = self._history(sequence, num_computed // self.block_size if source else 0, hit.reach)
        key = self._key(sequence, num_computed) if self.store.is_on_host(source) else None
        if key is not None and self.host is not None:
            self.host.reserve(key)
        elif source:
            self.pool.touch((source,))
        live = self.store.take()
        if key is not None and self.host is not None and live is not None:
            self.host.load(key, live)
            source = NO_SLOT
        if live is None:  # it is the only slot
            self.store.drop(source)
            live = source
            self.pool.touch((source,))
        sequence.state = state = StatePlace(live, history, source, saved_at=num_computed)
        self._plan_saves(sequence, state, num_computed, hit.reach)
        return True

    def note_admission(self, hit: PrefixHit, found: StateHit) -> list[tuple[str, dict[str, int]]]:
        noted: list[tuple[str, dict[str, int]]] = []
        if hit.reach > hit.num_tokens + self.block_size:
            self.num_missing_tokens += hit.reach - hit.num_tokens
            noted.append(("state_missing", {"kv": hit.reach, "state": hit.num_tokens}))
        if self.store.is_on_host(found.place):
            noted.append(("state_loaded", {"state": hit.num_tokens}))
        return noted

    def _plan_saves(self, sequence: Seq, state: StatePlace, num_computed: int, reach: int) -> None:
        """Allocate slots for the states that are worth saving, while there are any."""
        if not self.pool.enable_caching:
            return
        for number, position in enumerate(self._worth_saving(sequence, num_computed, reach)):
            slot = self.store.take(only_superseded=number > 0)
            if slot is None:
                break
            state.saves.append((position, slot))
            if len(sequence.block_hashes) * self.block_size >= position:
                self._promised.setdefault(self._key(sequence, position), sequence)
        state.saves.sort()
        if state.saves:
            state.saved_at = state.saves[-1][0]

    def _history(self, sequence: Seq, num_found: int, reach: int) -> History:
        """History of a sequence that continues from the state after `num_found` blocks, with KV cached up to `reach`.
        The prompt of a preempted sequence is not counted again."""
        found = sequence.block_hashes[num_found - 1] + KEY if num_found else None
        if sequence.status is Status.PREEMPTED:
            return self.histories.again(found)
        longer = (block_hash + KEY for block_hash in reversed(sequence.block_hashes[num_found:]))
        return self.histories.begin(found, longer, repeats=reach > num_found * self.block_size)

    def _worth_saving(self, sequence: Seq, num_computed: int, reach: int) -> list[int]:
        """Positions after `num_computed` to save states at, the most useful first: the end of the known tokens, the
        last marks, the ends of the last media, the position where earlier prompts diverge, the first mark."""
        marks = self._last_ends(sequence.request.marks)
        media = self._last_ends([medium.end for medium in sequence.request.media])
        end = self._last_ends([sequence.num_tokens - 1])
        last = [*reversed(marks[-LAST_MARKS:]), *reversed(media[-LAST_MARKS:])]
        wanted = dict.fromkeys([*end, *last, reach, *marks[:1]])
        return [position for position in wanted if num_computed < position < sequence.num_tokens]

    def _ends_prompt(self, sequence: Seq, position: int) -> bool:
        """Whether the chat's next prompt may continue there if it does not repeat the answer: at the prompt's last
        block boundary, or up to two blocks before the end, after the last message. After the first mark other chats
        continue, too."""
        left, marks = sequence.num_prompt - position, sequence.request.marks
        is_near = 0 <= left <= 2 * self.block_size and bool(marks) and position > marks[0]
        return is_near or 0 <= left <= self.block_size

    def _last_ends(self, positions: Sequence[int]) -> list[int]:
        """The last block boundary before or at each position, without duplicates."""
        return list(dict.fromkeys(at // self.block_size * self.block_size for at in positions if at >= self.block_size))

    def arrival_entries(self, sequence: Seq) -> list[Entry]:
        return [self._entry(sequence)]

    def _entry(self, sequence: Seq) -> States:
        """The entry with the slot that the workers read a sequence's state from, and the one they write it to."""
        state = sequence.state
        if state is None:
            raise RuntimeError(f"{sequence} has no state")
        source = state.source
        if source:
            self.store.read.append(source)
            self._begins[sequence] = source
            state.source = NO_SLOT
        elif sequence.num_computed:
            source = state.live  # it was swapped out
        return States(sequence.handle, source, state.live, list(state.saves))

    def can_fork(self, parent: Seq, position: int, num_scheduled: int) -> bool:
        """Whether the parent's state is at `position`. A state cannot be rewound: if the parent's is past `position`,
        the child continues from a saved one instead."""
        state = parent.state
        if state is None or state.saves or state.is_ahead or parent.num_drafted:
            return False
        return parent.num_computed - num_scheduled == position > 0 and self.store.num_free >= 2

    def fork(self, parent: Seq, child: Seq, num_scheduled: int) -> list[Entry]:
        """Let the child continue from the parent's state. Both read it in place and continue in slots of their own,
        which the workers learn when each is scheduled; this step may have scheduled the parent already."""
        state, own = parent.state, self.store.take()
        if state is None or own is None:
            raise RuntimeError(f"{parent} has no state to fork, or there is no slot")
        entries: list[Entry] = []
        if num_scheduled:
            if parent not in self._begins:
                state.source, state.live, own = state.live, own, self.store.take()
                entries.append(self._entry(parent))
            if own is None:
                raise RuntimeError(f"there is no slot for a fork of {parent}")
            source = self._begins[parent]
            self.pool.touch((source,))
            child.state = StatePlace(own, state.history, source, saved_at=child.num_computed)
            return entries
        if state.source == NO_SLOT:
            source, state.live = state.live, own
            state.source, own = source, self.store.take()
        if own is None:
            raise RuntimeError(f"there is no slot for a fork of {parent}")
        self.pool.touch((state.source,))
        child.state = StatePlace(own, state.history, state.source, saved_at=parent.num_computed)
        return entries

    def grow(self, sequence: Seq, num_tokens: int) -> Growth:  # noqa: ARG002  # a state does not grow
        """Send the workers a change of the sequence's slot. At a block boundary its state is saved, if a slot is
        free."""
        return Growth([], self._next_places(sequence))

    def most_drafts(self, sequence: Seq, count: int) -> int:
        """Limit drafts to the next block boundary, where the state is saved."""
        return min(count, -sequence.num_computed % self.block_size) if self.pool.enable_caching else count

    def _next_places(self, sequence: Seq) -> list[States]:
        state, position = sequence.state, sequence.num_computed
        if state is not None and state.source:
            return [self._entry(sequence)]
        if sequence.num_drafted or position % self.block_size or not self.pool.enable_caching:
            return []
        if state is None or state.saves or position <= state.saved_at:
            return []
        slot = self._for_snapshot(state)
        if slot is None:
            return []
        source, state.live, state.saved_at = state.live, slot, position
        state.snapshots.append(Snapshot(position, source))
        self._begins[sequence] = source
        self._publish(sequence, sequence.num_hashed_blocks * self.block_size)
        return [States(sequence.handle, source, slot, [])]

    def _for_snapshot(self, state: StatePlace) -> int | None:
        """Slot in which a sequence continues after one more snapshot: a new one, or that of its oldest snapshot if it
        has SNAPSHOTS of them or no slot is free. A chat that does not repeat answers takes no other chat's state."""
        snapshots = state.snapshots
        if len(snapshots) < SNAPSHOTS:
            slot = self.store.take(only_superseded=bool(snapshots) or state.history.rewrites)
            if slot is not None or not snapshots:
                return slot
        return self._taken_back(snapshots.pop(0))

    def _taken_back(self, snapshot: Snapshot) -> int | None:
        """Reuse the slot of an outdated snapshot, unless another sequence holds it by now; then allocate one."""
        if snapshot.key is None:
            return snapshot.slot
        block = self.pool.blocks[snapshot.slot]
        if block.block_hash != snapshot.key or block.ref_count:
            return self.store.take()
        self.pool.touch((snapshot.slot,))
        self.store.drop(snapshot.slot)
        return snapshot.slot

    def publish(self, sequence: Seq, first: int, last: int) -> None:  # noqa: ARG002
        self._publish(sequence, last * self.block_size)

    def _publish(self, sequence: Seq, num_tokens: int) -> None:
        """Queue saved states within the first `num_tokens`, whose hashes are known, to be published by the next
        step."""
        state = sequence.state
        if state is None:
            return
        while state.saves and state.saves[0][0] <= num_tokens:
            position, slot = state.saves.pop(0)
            self._break_promise(sequence, position)
            key, at_end = self._key(sequence, position), self._ends_prompt(sequence, position)
            self.store.unpublished.append(Left(slot, key, state.history, ends_prompt=at_end))
        for snapshot in state.snapshots:
            if snapshot.key is None and snapshot.position <= num_tokens:
                key = self._key(sequence, snapshot.position)
                self.store.unpublished.append(Left(snapshot.slot, key, state.history, snapshot))
                snapshot.key = b""

    def release(self, sequence: Seq, *, forget: bool = False) -> None:
        """Release the slots of the sequence. Its snapshots are published, if their tokens are known."""
        self._leave(sequence)
        if forget:
            self.store.forget(sequence.block_hashes[: sequence.num_hashed_blocks])

    def _leave(self, sequence: Seq) -> None:
        """Release the slots of a sequence, publishing the states in them that are final."""
        state, sequence.state = sequence.state, None
        if state is None:
            return
        if state.host is not None and self.host is not None:
            self.host.unpin(state.host)
        for snapshot in state.snapshots:
            if snapshot.key is not None:
                continue
            if snapshot.position <= sequence.num_hashed_blocks * self.block_size:
                key = self._key(sequence, snapshot.position)
                self.store.unpublished.append(Left(snapshot.slot, key, state.history))
            else:
                self.store.blank.append(snapshot.slot)
        for position, _ in state.saves:
            self._break_promise(sequence, position)
        position, num_hashed = sequence.num_computed, sequence.num_hashed_blocks * self.block_size
        is_whole = position % self.block_size == 0 and not state.source and not state.is_ahead
        if state.live == NO_SLOT:
            return
        if state.saved_at < position <= num_hashed and is_whole:
            self.store.unpublished.append(Left(state.live, self._key(sequence, position), state.history))
        else:
            self.store.blank.append(state.live)
        if state.source:
            self.store.let_go((state.source,))
        self.store.blank += (slot for _, slot in state.saves)

    # ---- swapping

    def may_swap_out(self, sequence: Seq) -> bool:
        return sequence.state is None or not sequence.state.is_ahead

    def swap_out(self, sequence: Seq) -> bool:
        """Move the state to the host. It stays in its slot if the step may not move it or the host has no room."""
        self.push_out(sequence)
        return True

    def holds(self, sequence: Seq) -> bool:
        return sequence.state is not None

    def holds_device(self, sequence: Seq) -> bool:
        return sequence.state is not None and sequence.state.live != NO_SLOT

    def push_out(self, sequence: Seq) -> bool:
        state = sequence.state
        if self.host is None or state is None or state.live == NO_SLOT:
            return False
        place = self.host.pin(state.source or state.live)
        if place is None:
            return False
        self._leave(sequence)
        saved_at = min(state.saved_at, sequence.num_computed)  # planned saves have lost their slots
        sequence.state = StatePlace(NO_SLOT, state.history, saved_at=saved_at, host=place)
        return True

    def swap_in_admission(self, sequence: Seq, chunk: int) -> Admission:  # noqa: ARG002
        if sequence.state is None or sequence.state.host is None or self.host is None:
            return OK
        return OK if self.store.num_free > 0 and self.host.may_move else LACKING

    def swap_in(self, sequence: Seq, num_tokens: int, *, in_parts: bool = True) -> bool:  # noqa: ARG002
        """Move the state back into a slot of the device, if it is on the host."""
        state = sequence.state
        if state is None or state.host is None or self.host is None:
            return True
        self.host.reserve()
        slot = self.store.take()
        if slot is None:
            raise RuntimeError(f"there is no slot for {sequence}")
        self.host.unpin(state.host, slot)
        state.live, state.host = slot, None
        self._plan_saves(sequence, state, sequence.num_computed, 0)
        return True

    def _break_promise(self, sequence: Seq, position: int) -> None:
        if len(sequence.block_hashes) * self.block_size >= position:
            key = self._key(sequence, position)
            if self._promised.get(key) is sequence:
                del self._promised[key]

    # ---- forgetting and reporting

    def reset(self) -> Forgotten:
        """Drop all saved states, which are not counted as blocks."""
        self.store.reset()
        self._promised = {}
        return Forgotten()

    def count(self, stats: Stats) -> None:
        self.store.count(stats)
        stats.state_missing_tokens = self.num_missing_tokens

    def _key(self, sequence: Seq, position: int) -> bytes:
        return sequence.block_hashes[position // self.block_size - 1] + KEY

    def check_integrity(self, sequences: Sequence[Seq]) -> None:
        """Raise RuntimeError if a slot's references are not those of its holders, or two sequences write to one."""
        places = [sequence.state for sequence in sequences if sequence.state is not None]
        self.store.check_integrity([*(place.held() for place in places), *self.others_hold()])
        written = [place.live for place in places if place.live]
        if len(set(written)) < len(written) or any(self.pool.blocks[slot].block_hash for slot in written):
            raise RuntimeError(f"slots {written} are written by several sequences, or are cached")
        if self.host is not None:
            self.host.check_integrity(place.host for place in places if place.host is not None)


class StateSearch:
    """Looks up the saved state from which one sequence can continue."""

    def __init__(self, slots: StateSlots, sequence: Seq) -> None:
        self._slots = slots
        self._sequence = sequence
        self._most = (sequence.num_tokens - 1) // slots.block_size

    def longest(self, num_blocks: int) -> int:
        """Largest number of blocks with a saved state at their end and at least one token left to compute: unlike KV, a
        state that includes the last token cannot be used to compute it again."""
        hashes, find = self._sequence.block_hashes, self._slots.store.find
        counts = range(min(num_blocks, self._most), 0, -1)
        return next((count for count in counts if find(hashes[count - 1] + KEY) is not None), 0)

    def find(self, num_blocks: int) -> StateHit:
        hashes = self._sequence.block_hashes
        place = self._slots.store.find(hashes[num_blocks - 1] + KEY) if num_blocks else None
        return StateHit(place or NO_SLOT, self._slots.is_coming(self._sequence, num_blocks, self._most))
