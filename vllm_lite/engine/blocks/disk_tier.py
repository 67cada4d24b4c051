"""DiskTier: cached KV and states on disk. They outlive the workers, and other engines may have written them.

It is a part of the cache beside those that own pools: sequences hold nothing in it; it extends their cached prefixes.
If the disk has more of a waiting sequence than memory, the sequence is not admitted yet: blocks are allocated for the
missing contents, a load is started, and the verdict is LATER (arriving). When the load has ended, its contents are
published in the pools and unpinned, and the sequence finds them like any cached prefix; no sequence waits for blocks
that another waiting one pins. A load that fails or is late is a miss, and the sequence computes. Each sequence loads at
most once.

Contents are named by keys. Workers move the bytes, as transfer messages ask them to.
"""

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from vllm_lite.engine.blocks.groups import KVGroup, common_hit
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.part import Forgotten, PrefixHit, SidePart
from vllm_lite.engine.blocks.preload import Preload
from vllm_lite.engine.blocks.swapping import Place
from vllm_lite.engine.blocks.tier_index import TierIndex
from vllm_lite.engine.blocks.verdict import OK, Admission, Verdict
from vllm_lite.engine.blocks.write_through import WriteThrough
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.engine.states.place import Left
from vllm_lite.engine.states.slots import StateSlots
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import Entry
from vllm_lite.protocol.transfers import STATE, LoadBlocks, Ticket, Transfer

ARRIVING = Admission(Verdict.LATER, lacks="load", is_arriving=True)
"""Verdict while the tier loads a longer prefix for a waiting sequence."""


class Item(NamedTuple):
    """Something to load: logical block `number` of `group`, or without a group the state after `number` blocks."""

    key: bytes
    group: KVGroup | None
    number: int


class DiskHit(NamedTuple):
    """Contents of a sequence's prefix that the tier has and the pools lack."""

    lacking: Many[Item] = ()
    num_tokens: int = 0
    """Number of tokens that would have to be computed instead of loading `lacking`."""
    is_loading: bool = False
    num_loaded: int = 0
    """Number of tokens that were loaded for the sequence while it waited."""


class TransferOwner(Protocol):
    """A part that uses this tier's transfers for contents of its own."""

    def ended(self, ticket: Ticket, failed: Collection[int]) -> None:
        """Complete one of its transfers. `failed` are the indices of items that could not be moved."""

    def give_up(self, ticket: Ticket) -> None:
        """Let no sequence wait any longer for one of its transfers, which takes too long."""


class _Load:
    """A load of `items` into blocks and slots `ids`, instead of computing `num_tokens`, for `sequence` or as a preload
    (None). The items are published when it ends, unless the cache was reset meanwhile (`is_stale`)."""

    def __init__(self, sequence: Sequence | None, items: list[Item], ids: list[int], num_tokens: int) -> None:
        self.sequence = sequence
        self.items = items
        self.ids = ids
        self.num_tokens = num_tokens
        self.is_stale = False


class DiskTier(SidePart[DiskHit]):
    """Looks up, loads and writes contents; `index` has the keys of all that can be loaded."""

    keeps = False
    has_tails = True

    def __init__(self, blocks: KVBlocks, states: StateSlots | None = None, *, preload: float = 0.0) -> None:
        """`preload` is the share of the pool that may be filled from disk before the first sequence arrives."""
        self.pool = blocks.pool
        self.index = TierIndex()
        self.prefill_tokens_per_s = self.load_blocks_per_s = 0.0
        """Rates that decide whether to load or to compute; 0 until they are known."""
        self.num_loaded_tokens = self.num_failed = 0
        """Tokens that were loaded, and items that failed to load, since the start."""
        self._blocks = blocks
        self._states = None if states is None else states.store
        self.writes = WriteThrough(blocks, self._states, self.index)
        self._loads: dict[Ticket, _Load] = {}
        self._arriving: dict[bytes, Ticket] = {}
        self._waits: dict[Sequence, set[Ticket]] = {}
        self._tried: dict[Sequence, int] = {}
        """Sequence -> tokens that it got, for each sequence whose loads have ended."""
        self._preload = Preload(blocks, preload)
        self._present: set[Sequence] = set()
        """All sequences that have not ended."""
        self._open: set[Sequence] = set()
        """Sequences whose blocks are written to disk."""
        self._owners: dict[Ticket, TransferOwner] = {}
        """Transfers of other parts."""
        blocks.others_hold = self._pinned_blocks
        blocks.swapping.on_demote = self.writes.demoted
        if states is not None:
            states.others_hold = self._pinned_slots

    # ---- messages

    @property
    def storing(self) -> "DiskTier":
        return self

    def take_messages(self) -> list[Transfer]:
        """Take the transfer messages for the workers, which are sent after the steps scheduled so far."""
        messages, self.writes.messages = self.writes.messages, []
        return messages

    def learn(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Update the index by keys that workers have reported as added to or removed from the disk."""
        added = list(added)
        self._preload.offer(added, self.index)
        self.writes.learn(added, removed)
        self._load_early()

    def move(self, owner: TransferOwner, make: Callable[[Ticket], Transfer]) -> Ticket:
        """Start a transfer for another part: `make` builds its message from the ticket, and `owner` is called at its
        end."""
        ticket = self.writes.next_ticket()
        self._owners[ticket] = owner
        self.writes.messages.append(make(ticket))
        return ticket

    def ended(self, ticket: Ticket, failed: Collection[int] = ()) -> None:
        """Complete a transfer. `failed` are the indices of its items that could not be moved."""
        if (owner := self._owners.pop(ticket, None)) is not None:
            owner.ended(ticket, failed)
            return
        load = self._loads.pop(ticket, None)
        if load is None:
            self.writes.ended(ticket, failed)
            return
        lost = set(failed)
        self.num_failed += len(lost)
        num_loaded = 0
        for place, (item, block_id) in enumerate(zip(load.items, load.ids, strict=True)):
            self._arriving.pop(item.key, None)
            if place in lost:
                self.index.lose((item.key,))
            elif not load.is_stale:
                self._publish(load.sequence, item, block_id)
                num_loaded += item.group is not None and item.group.index == 0
        self._give_back(load, published=set() if load.is_stale else set(range(len(load.ids))) - lost)
        if load.sequence is None:
            num_loaded = 0  # a preload is not counted as loaded for the sequences that wait for it
        self.num_loaded_tokens += num_loaded * self._blocks.block_size
        for sequence, tickets in list(self._waits.items()):
            tickets.discard(ticket)
            if not tickets:
                del self._waits[sequence]
                self._tried[sequence] = num_loaded * self._blocks.block_size
        self._load_early()

    def give_up(self, ticket: Ticket) -> None:
        """Let no sequence wait any longer for a load that takes too long. Its blocks stay allocated until it ends."""
        if (owner := self._owners.get(ticket)) is not None:
            owner.give_up(ticket)
            return
        for sequence in [sequence for sequence, tickets in self._waits.items() if ticket in tickets]:
            del self._waits[sequence]
            self._tried[sequence] = 0

    def num_tokens(self, ticket: Ticket) -> int:
        """Number of tokens that would be computed without this load; 0 if the load has ended."""
        load = self._loads.get(ticket)
        return 0 if load is None else load.num_tokens

    def forget_stored(self) -> None:
        for load in self._loads.values():
            load.is_stale = True
        self._preload.stop()
        self.writes.forget_all()

    def measured(self, prefill_tokens_per_s: float, load_blocks_per_s: float) -> None:
        self.prefill_tokens_per_s, self.load_blocks_per_s = prefill_tokens_per_s, load_blocks_per_s

    def _publish(self, sequence: Sequence | None, item: Item, block_id: int) -> None:
        if item.group is None:
            return
        if self.pool.get_cached_block(item.key) is None:
            hashes = [] if sequence is None else sequence.block_hashes[item.number : item.number + 1]
            is_own = item.key[:-1] == b"".join(hashes)
            place = Place(item.group, item.number)
            self._blocks.publish_loaded(sequence if is_own else None, place, item.key, block_id)

    def _give_back(self, load: _Load, published: set[int]) -> None:
        """Release the blocks and slots of a load, last first; states at the indices `published` are published."""
        store = self._states
        for place in reversed(range(len(load.ids))):
            item, block_id = load.items[place], load.ids[place]
            if item.group is not None:
                self.pool.free((block_id,))
            elif store is not None and place in published:
                store.unpublished.append(Left(block_id, item.key, store.histories.again(None)))
            elif store is not None:
                store.let_go((block_id,))

    # ---- the step

    def begin_step(self) -> None:
        if self.writes.has_states:
            self.writes.write_states()
        if self.writes.num_waiting:
            self.writes.go_on()

    @property
    def is_freeing(self) -> bool:
        return self.writes.has_states

    def drop_ops(self) -> None:
        """Drop loads, writes and the index after the workers were lost; new workers report the tier's keys again."""
        loads, self._loads = self._loads, {}
        for load in loads.values():
            self._give_back(load, set())
        self.writes.lose()
        self.index.lose(self.index)
        self._arriving, self._waits, self._tried, self._owners = {}, {}, {}, {}
        self._preload.restart(is_idle=not self._present)

    # ---- lookup and admission

    def register(self, sequence: Sequence) -> None:
        self._preload.close()
        self._present.add(sequence)
        request = sequence.request
        if request.pooling is None and request.params.prompt_logprobs is None:
            self._open.add(sequence)

    def search(self, sequence: Sequence) -> "DiskSearch":
        return DiskSearch(self, sequence)

    def nothing(self) -> DiskHit:
        return DiskHit()

    def admission(self, sequence: Sequence, found: DiskHit, chunk: int) -> Admission:  # noqa: ARG002
        return ARRIVING if found.is_loading else OK

    def may_admit(self, sequence: Sequence, found: DiskHit, num_tokens: int, *, in_parts: bool) -> bool:  # noqa: ARG002
        """Whether to admit the sequence without loading. False: a load has been started."""
        if not found.lacking or not self._is_worth_it(found):
            return True
        return not self._begin_load(sequence, found)

    def _is_worth_it(self, found: DiskHit) -> bool:
        """Whether loading takes less time than computing. While a rate is unknown, load, in order to measure it."""
        if not self.prefill_tokens_per_s or not self.load_blocks_per_s:
            return True
        return len(found.lacking) / self.load_blocks_per_s < found.num_tokens / self.prefill_tokens_per_s

    def _begin_load(self, sequence: Sequence, found: DiskHit) -> bool:
        """Start to load the items that are not in transfer already, and let the sequence wait. False: there is no
        room."""
        new = [item for item in found.lacking if item.key not in self._arriving]
        num_blocks = sum(item.group is not None for item in new)
        if num_blocks > self.pool.num_free - self._blocks.watermark_blocks:
            return False
        slots = [self._states.take() for item in new if item.group is None] if self._states is not None else []
        if None in slots:
            return False
        waits = {self._arriving[item.key] for item in found.lacking if item.key in self._arriving}
        if new:
            ids = self.pool.get_new_blocks(num_blocks)
            ids += [slot for slot in slots if slot is not None]
            new.sort(key=lambda item: item.group is None)  # blocks first, then states, like their ids
            waits.add(self._send(_Load(sequence, new, ids, found.num_tokens)))
        self._waits[sequence] = waits
        return True

    def _send(self, load: _Load) -> Ticket:
        """Queue the message of a load whose blocks and slots are allocated."""
        ticket, keys = self.writes.next_ticket(), [item.key for item in load.items]
        self._loads[ticket] = load
        self._arriving.update(dict.fromkeys(keys, ticket))
        self.writes.messages.append(LoadBlocks(ticket, keys, load.ids))
        return ticket

    def _load_early(self) -> None:
        """Start the next preload, if there is no sequence and no load."""
        if not self._present and not self._loads and (chosen := self._preload.take(self.index)):
            items = [Item(key, group, 0) for key, group in chosen]
            self._send(_Load(None, items, self.pool.get_new_blocks(len(items)), 0))

    def note_admission(self, hit: PrefixHit, found: DiskHit) -> list[tuple[str, dict[str, int]]]:  # noqa: ARG002
        return [("loaded", {"tokens": found.num_loaded})] if found.num_loaded else []

    def reach(self, sequence: Sequence, num_found: int) -> int:
        """Largest number of blocks after which the sequence could continue with contents of the tier or the pools."""
        find, index = self._blocks.find, self.index
        return self._reach(
            sequence,
            num_found,
            lambda key: key in index or (self._has_state(key) if key.endswith(STATE) else find(key) is not None),
        )

    def _reach(self, sequence: Sequence, num_found: int, has: Callable[[bytes], bool]) -> int:
        """Largest number of blocks, at least `num_found`, after which the sequence could continue if the contents of
        each key are available for which `has(key)` is true."""
        hashes, groups = sequence.block_hashes, self._blocks.groups

        def find(group: KVGroup, number: int) -> int | None:
            return 0 if has(hashes[number] + group.key) else None

        length = len(hashes)
        while (length := common_hit(groups, length, sequence.num_tokens, find)) > num_found:
            behind = length
            if self._states is not None:
                most = min(length, (sequence.num_tokens - 1) // self._blocks.block_size)
                ends = range(most, num_found, -1)
                behind = next((count for count in ends if has(hashes[count - 1] + STATE)), num_found)
            if behind == length:
                return length
            length = behind
        return num_found

    def _has_state(self, key: bytes) -> bool:
        return self._states is not None and self._states.find(key) is not None

    def hit(self, sequence: Sequence, num_found: int) -> DiskHit:
        """Look up what the tier has beyond the `num_found` blocks that the other parts found."""
        if sequence in self._waits:
            return DiskHit(is_loading=True)
        if sequence in self._tried or not self.index or sequence.status is Status.SWAPPED:
            return DiskHit(num_loaded=self._tried.get(sequence, 0))
        length = self.reach(sequence, num_found)
        if length <= num_found:
            return DiskHit()
        size, lacking = self._blocks.block_size, list[Item]()
        position = min(length * size, sequence.num_tokens - 1)
        for group in self._blocks.groups:
            for number in range(min(group.first_needed(position), length), length):
                key = sequence.block_hashes[number] + group.key
                if self._blocks.find(key) is None:
                    lacking.append(Item(key, group, number))
        if self._states is not None and not self._has_state(key := sequence.block_hashes[length - 1] + STATE):
            lacking.append(Item(key, None, length))
        return DiskHit(lacking, position - num_found * size)

    # ---- growing and leaving

    def publish(self, sequence: Sequence, first: int, last: int) -> None:
        """Write the prompt's blocks when the prompt is complete; release() writes those of the answer."""
        if first < sequence.num_prompt // self._blocks.block_size <= last:
            self._write(sequence, last)

    def fork(self, parent: Sequence, child: Sequence, num_scheduled: int) -> Many[Entry]:  # noqa: ARG002
        self._present.add(child)
        return ()

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        num_blocks = sequence.num_hashed_blocks
        if forget:
            groups = [group.key for group in self._blocks.groups]
            keys = [each + end for each in sequence.block_hashes[:num_blocks] for end in (*groups, STATE)]
            self.writes.forget(keys)
        else:
            self._write(sequence, num_blocks, comes_back=sequence.status is not Status.FINISHED)
        self._waits.pop(sequence, None)
        self._tried.pop(sequence, None)
        if sequence.status is Status.FINISHED:
            self._open.discard(sequence)
            self._present.discard(sequence)
            self._load_early()

    def _write(self, sequence: Sequence, num_blocks: int, *, comes_back: bool = False) -> None:
        if num_blocks and sequence in self._open and sequence.request.has_lasting_keys:
            self.writes.add(sequence.block_hashes[:num_blocks], is_urgent=comes_back)

    # ---- swapping

    def num_stored(self, sequence: Sequence) -> int:
        """Number of tokens whose KV is on disk or being written."""
        if not self.index and not self.writes.num_writing:
            return 0
        return self._reach(sequence, 0, self.writes.is_kept) * self._blocks.block_size

    # ---- forgetting and reporting

    def reset(self) -> Forgotten:
        """Write nothing of the sequences that are live now, and do not publish running loads. Contents on disk stay,
        since other engines use them, too."""
        for load in self._loads.values():
            load.is_stale = True
        self._preload.stop()
        self.writes.stop()
        self._open.clear()
        return Forgotten()

    def count(self, stats: Stats) -> None:
        stats.num_stored_keys, stats.num_writing_blocks = len(self.index), self.writes.num_writing
        stats.loaded_tokens, stats.failed_loads = self.num_loaded_tokens, self.num_failed
        stats.dropped_writes = self.writes.num_dropped

    def _pinned_blocks(self) -> list[list[int]]:
        loading = [
            [block_id for item, block_id in zip(load.items, load.ids, strict=True) if item.group is not None]
            for load in self._loads.values()
        ]
        return [*loading, *self.writes.pinned(states=False)]

    def _pinned_slots(self) -> list[list[int]]:
        loading = [
            [slot for item, slot in zip(load.items, load.ids, strict=True) if item.group is None]
            for load in self._loads.values()
        ]
        return [*loading, *self.writes.pinned(states=True)]

    def check_integrity(self, sequences: Many[Sequence]) -> None:
        """Raise RuntimeError if a sequence waits for a load that does not exist, or has ended itself."""
        waiting = {ticket for tickets in self._waits.values() for ticket in tickets}
        if not waiting <= self._loads.keys() or not self._waits.keys() <= set(sequences):
            raise RuntimeError("a sequence waits for a load that is not under way, or is gone")
        if set(self._arriving.values()) - self._loads.keys():
            raise RuntimeError("contents are said to arrive by a load that is not under way")


class DiskSearch:
    """Looks up a longer prefix of one sequence than the pools have."""

    def __init__(self, tier: DiskTier, sequence: Sequence) -> None:
        self._tier = tier
        self._sequence = sequence

    def longest(self, num_blocks: int) -> int:
        """All `num_blocks`: what is only on disk cannot be used yet."""
        return num_blocks

    def find(self, num_blocks: int) -> DiskHit:
        return self._tier.hit(self._sequence, num_blocks)
