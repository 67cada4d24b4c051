"""Swapping decides which blocks move between the tiers in a step, and in which order.

A preempted sequence, or one whose cached prefix lies on the host, may be parked: it waits, its `host_ids` say which of
its logical blocks are on the host, its tables which are on the device; the null block stands for "not here". Blocks
leave the device from the end and come back from the beginning, and a step moves no more than `max_blocks`: the rest
stays where it is until the next step. So a sequence of any length can move, and no step stalls longer than that.

What a parked sequence still has on the device is taken from it when a running sequence needs the place.

Cached blocks that the device reuses are demoted, and count as moves. Where a waiting sequence would evict more of them
than the step may move, the step demotes as many ahead of their eviction: they stay on the device as well, the sequence
waits, and a later step finds them on the host. A running sequence waits for no demotion: what its step may not move is
lost.
"""

from collections import abc
from collections.abc import Callable
from typing import NamedTuple

from vllm_lite.engine.blocks.groups import KVGroup
from vllm_lite.engine.blocks.pool import NULL_BLOCK, BlockPool
from vllm_lite.engine.blocks.tier import AT_HAND, Tier
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import BlockOp


class Place(NamedTuple):
    """Logical block `number` of a sequence in one group."""

    group: KVGroup
    number: int


class Swapping:
    """Writes the block program of the step being scheduled, within what is left of the bound. `cache(sequence, group,
    index, id)` makes a block findable on the device."""

    def __init__(
        self,
        pool: BlockPool,
        host: Tier | None,
        groups: abc.Sequence[KVGroup],
        max_blocks: int,
        cache: Callable[[Sequence, KVGroup, int, int], None],
    ) -> None:
        self.counters = Stats()
        """The engine's counters. They are made here and shared by all parts of the engine."""
        self.parked: list[Sequence] = []
        """The parked sequences in the order in which they were parked: under fcfs the first is admitted last."""
        self._pool = pool
        self._host = host
        self._groups = groups
        self._cache = cache
        self.max_blocks = self._left = max_blocks
        self.reserved = self.wanted = 0
        self.loading: dict[Sequence, int] = {}  # tickets of what parked sequences wait for
        self.ops: list[tuple[int, int, int]] = []
        """The block program of the step being scheduled."""
        self.on_demote: Callable[[abc.Iterable[bytes]], None] | None = None
        """Called with the keys of cached blocks that the step being scheduled moves to the host."""
        pool.on_evict = self._demote if host is not None else None

    # ---- the block program

    def begin_step(self) -> None:
        """Start the next step: it may move blocks again, first of all those that the last one had to leave."""
        self._left = self.max_blocks
        self.reserved, self.wanted = min(self.wanted, self.max_blocks), 0
        if self.loading and self._host is not None:
            ended = set(self._host.poll())
            self.loading = {sequence: ticket for sequence, ticket in self.loading.items() if ticket not in ended}

    def take_ops(self) -> list[tuple[int, int, int]]:
        """Return the block program of the step that has been made; the next one starts empty."""
        ops, self.ops = self.ops, []
        return ops

    def drop_ops(self) -> None:
        """Forget the block program of the step being scheduled, and what the step before it had to leave."""
        self.ops = []
        self.reserved = self.wanted = 0

    def copy(self, src: int, dst: int) -> None:
        """Copy a shared block that is about to be written."""
        self.ops.append((BlockOp.COPY, src, dst))
        self.counters.copied_blocks += 1

    # ---- out

    def park(self, sequence: Sequence, host_ids: list[list[int]]) -> None:
        """Let `sequence` wait with the blocks in its tables and in `host_ids`, and pin the latter."""
        if self._host is not None:
            for ids in host_ids:
                self._host.pin(_present(ids))
        sequence.host_ids = host_ids
        self.parked.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """End the parking of `sequence`, if it is parked: it needs nothing on the host any more."""
        host_ids, sequence.host_ids = sequence.host_ids, None
        self.loading.pop(sequence, None)
        if host_ids is not None and self._host is not None:
            self.parked.remove(sequence)
            for ids in host_ids:
                self._host.unpin(_present(ids))

    def swap_out(self, sequence: Sequence, keep: abc.Sequence[range]) -> bool:
        """Park `sequence` with its logical blocks `keep`, per group, and begin to move them. False: nothing is changed,
        because the host has no room for them or the step has moved enough already."""
        host = self._host
        if host is None:
            return False
        host_ids = [[NULL_BLOCK] * kept.stop for kept in keep]
        for group, ids, kept in zip(self._groups, host_ids, keep, strict=True):
            for index in kept:
                key = self._key(sequence, group, index)
                ids[index] = (host.find(key) if key else None) or NULL_BLOCK
        found = [block_id for ids in host_ids for block_id in _present(ids)]
        num_new = sum(map(len, keep)) - len(found)
        if (num_new and self._left <= 0) or num_new + host.num_unpinned(found) > host.num_free:
            return False
        for table, kept in zip(sequence.tables, keep, strict=True):
            table.trim(kept.start)
            table.cut(kept.stop)
        self.park(sequence, host_ids)
        self.push_out(sequence)
        return True

    def push_out(self, sequence: Sequence) -> int:
        """Take device blocks of a parked sequence, the last of all groups first, that are on the host or may still move
        there. Returns their number."""
        host, taken = self._host, 0
        if host is None or sequence.host_ids is None:
            raise RuntimeError(f"{sequence} is not parked")
        places = list(zip(self._groups, sequence.tables, sequence.host_ids, strict=True))
        for index in reversed(range(max(map(len, sequence.host_ids), default=0))):
            for group, table, host_ids in places:
                block_id = table.ids[index]
                if block_id == NULL_BLOCK:
                    continue
                if host_ids[index] == NULL_BLOCK:
                    if self._left <= 0 or host.num_free == 0:
                        return taken
                    (host_ids[index],) = host.reserve([self._key(sequence, group, index)])
                    self.ops.append((BlockOp.SWAP_OUT, block_id, host_ids[index]))
                    self._left -= 1
                    self.counters.swapped_out_blocks += 1
                table.ids[index] = NULL_BLOCK
                self._pool.free((block_id,))
                taken += 1
        return taken

    # ---- in

    def may_move(self, num_blocks: int) -> bool:
        """Whether this step may move `num_blocks` more."""
        return num_blocks <= max(self._left, 0)

    def next_in(self, sequence: Sequence, num_new: int, *, in_parts: bool) -> tuple[list[Place], bool]:
        """The blocks of a parked sequence that this step may load, and whether those are all, and `num_new` more may be
        allocated with them. Cached ones that are on the device need no loading; the sequence holds them from now on.
        Unless `in_parts`, it is all or nothing."""
        missing, present, ids = [], [], list[int]()
        for group, table, host_ids in zip(self._groups, sequence.tables, sequence.host_ids or (), strict=True):
            for index, host_id in enumerate(host_ids):
                if host_id == NULL_BLOCK or table.ids[index] != NULL_BLOCK:
                    continue
                key = self._key(sequence, group, index)
                block_id = self._pool.get_cached_block(key) if key else None
                if block_id is None:
                    missing.append(Place(group, index))
                else:
                    present.append((table, index, block_id))
                ids.append(host_id if block_id is None else block_id)
        if not self._is_at_hand(sequence, missing):
            return [], False
        is_all = self.may_take(sequence, len(missing) + num_new, ids, ahead=not (in_parts and missing))
        if not (in_parts or is_all):
            return [], False
        for table, index, block_id in present:
            self._pool.touch((block_id,))
            table.ids[index] = block_id
        places = missing if is_all else missing[: self._num_loadable(len(missing))]
        self._left -= len(places)
        self.wanted += len(missing) - len(places)
        return places, is_all

    def _is_at_hand(self, sequence: Sequence, places: abc.Sequence[Place]) -> bool:
        """Whether the step can read these blocks of a parked sequence. If not, they are being loaded from now on."""
        host_ids = sequence.host_ids or ()
        ids = [host_ids[group.index][index] for group, index in places]
        ticket = AT_HAND if self._host is None else self._host.begin_load(ids)
        if ticket == AT_HAND:
            return True
        self.loading[sequence] = ticket
        return False

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether a parked sequence waits for blocks that are on their way to where a step can read them."""
        return sequence in self.loading

    def _num_loadable(self, most: int) -> int:
        """Number of blocks that the step may load, at most `most`, if it also demotes the cached ones in their place.
        It may load one in any case, so that the sequence comes in at last."""
        left = self._left
        if self._host is None or left <= 0:
            return 0
        room = self._host.num_free
        blocks = self._pool.peek(min(most, left))
        for count, block in enumerate(blocks):
            moves_out = room > 0 and block.block_hash is not None and self._host.find(block.block_hash) is None
            room -= moves_out
            left -= 1 + moves_out
            if left < 0:
                return max(count, 1)
        return len(blocks)

    def load(self, sequence: Sequence, places: abc.Sequence[Place], block_ids: abc.Sequence[int]) -> None:
        """Fill new device blocks with the contents of `places` on the host."""
        host_ids = sequence.host_ids or ()
        for (group, index), block_id in zip(places, block_ids, strict=True):
            self.ops.append((BlockOp.SWAP_IN, host_ids[group.index][index], block_id))
            sequence.tables[group.index].ids[index] = block_id
            if index < sequence.num_hashed_blocks:
                self._cache(sequence, group, index, block_id)
        if sequence.status is Status.WAITING or sequence.status is Status.PREEMPTED:
            self.counters.promoted_blocks += len(places)
        else:
            self.counters.swapped_in_blocks += len(places)

    # ---- demotion

    def may_take(self, sequence: Sequence, count: int, ids: abc.Sequence[int], *, ahead: bool = True) -> bool:
        """Whether a waiting sequence may take `count` new blocks in this step: to load those of `ids` that are on the
        host, and so that no cached content is lost for which the host has room. `ids` is its prefix, on either tier.

        If not, as much as the step may move is demoted `ahead`, what was used last first. That is done for a sequence
        in as many steps as its blocks take; others may take the moves or evict as much, and then it waits no longer.
        """
        host, self.reserved = self._host, 0
        if host is None:
            return True
        on_host = [block_id for block_id in ids if block_id >= host.first_id]
        limit = self._left - len(on_host)
        if limit < 0:
            return False
        num_demoting, sequence.num_demoting = sequence.num_demoting, 0
        if count <= limit:
            return True
        lost = self._pool.would_lose(count, set(ids))
        host.pin(on_host)
        may_take = host.num_places(lost) <= limit or num_demoting * self.max_blocks >= count
        if ahead and not may_take:
            self._keep(lost, limit)
            sequence.num_demoting = num_demoting + 1
        host.unpin(on_host)
        return may_take

    def _demote(self, evicted: abc.Sequence[tuple[int, bytes]]) -> None:
        """Keep the contents of some cached blocks that the device is about to reuse. They come in the order of their
        last use, and the last used are kept first.

        A block is freed before those it continues, so the blocks it can be found through are behind it: on the device,
        or in `evicted` and thereby kept before it.
        """
        limit = self._left - self.reserved
        if limit > 0:
            self._keep({key: id_ for id_, key in reversed(evicted) if self._pool.get_cached_block(key) is None}, limit)

    def _keep(self, lost: dict[bytes, int], limit: int) -> None:
        """Move the first of the blocks `lost`, by their keys, to the host: `limit` at most, and while it has room."""
        if self._host is None:
            return
        places = self._host.demote(lost, limit)
        self.ops += [(BlockOp.SWAP_OUT, lost[key], host_id) for key, host_id in places]
        self._left -= len(places)
        self.counters.demoted_blocks += len(places)
        if self.on_demote is not None:
            self.on_demote(key for key, _ in places)

    # ---- inside

    def _key(self, sequence: Sequence, group: KVGroup, index: int) -> bytes | None:
        return sequence.block_hashes[index] + group.key if index < sequence.num_hashed_blocks else None

    def check_integrity(self, sequences: abc.Sequence[Sequence], others: abc.Sequence[abc.Sequence[int]] = ()) -> None:
        """Raise RuntimeError if an invariant of this module is broken. `sequences` are all unfinished ones; `others`
        blocks on the host that are pinned though no sequence has them."""
        parked = [sequence for sequence in sequences if sequence.host_ids is not None]
        if sorted(map(id, parked)) != sorted(map(id, self.parked)):
            raise RuntimeError("the parked sequences are not those with blocks on the host")
        for sequence in parked:
            for table, ids in zip(sequence.tables, sequence.host_ids or (), strict=True):
                if len(table.ids) != len(ids):
                    raise RuntimeError(f"{sequence} has {len(table.ids)} and {len(ids)} blocks on the two tiers")
                start = table.num_trimmed
                if not all(map(max, zip(table.ids[start:], ids[start:], strict=True))):
                    raise RuntimeError(f"{sequence} has lost a block")
        if self._host is not None:
            held = [_present(ids) for sequence in parked for ids in sequence.host_ids or ()]
            self._host.check_integrity([*held, *others])


def num_held(sequence: Sequence) -> int:
    """The number of device blocks in the tables of `sequence`."""
    return sum(len(table.ids) - table.ids.count(NULL_BLOCK) for table in sequence.tables)


def _present(ids: abc.Sequence[int]) -> list[int]:
    return [block_id for block_id in ids if block_id != NULL_BLOCK]
