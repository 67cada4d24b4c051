"""Swapping chooses which blocks move between device and host in a step, and in which order.

A preempted sequence, or one whose cached prefix is on the host, may be parked: while it waits, `host_ids` has its
blocks on the host and its tables have those on the device, with the null block for "not here". Blocks leave the device
from the end of the sequence and return from its beginning. A step moves at most `max_blocks`; the rest waits for later
steps. So a sequence of any length can move, and the stall of each step is bounded.

Device blocks of a parked sequence are taken from it when a running sequence needs them.

Cached blocks that the device reuses are demoted, which counts as a move. If a waiting sequence would evict more of them
than the step may move, the step demotes as many as it may ahead of their eviction: they stay on the device, too, the
sequence waits, and a later step finds them on the host. A running sequence waits for no demotion: blocks beyond the
step's limit are lost.
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
    """Position of a block: logical block `number` of a sequence in one group."""

    group: KVGroup
    number: int


class Swapping:
    """Writes the block ops of the step being scheduled, within the limit of moved blocks. `cache(sequence, group,
    index, id)` adds a block to the device's prefix cache."""

    def __init__(
        self,
        pool: BlockPool,
        host: Tier | None,
        groups: abc.Sequence[KVGroup],
        max_blocks: int,
        cache: Callable[[Sequence, KVGroup, int, int], None],
    ) -> None:
        self.counters = Stats()
        """The engine's counters, created here and shared by all its objects."""
        self.parked: list[Sequence] = []
        """Parked sequences in the order of parking: under fcfs the first is admitted last."""
        self._pool = pool
        self._host = host
        self._groups = groups
        self._cache = cache
        self.max_blocks = self._left = max_blocks
        self.reserved = self.wanted = 0
        self.loading: dict[Sequence, int] = {}  # parked sequence -> ticket of the load for which it waits
        self.ops: list[tuple[int, int, int]] = []
        """Block ops of the step being scheduled."""
        self.on_demote: Callable[[abc.Iterable[bytes]], None] | None = None
        """Called with the keys of cached blocks that the step being scheduled demotes to the host."""
        pool.on_evict = self._demote if host is not None else None

    # ---- the block program

    def begin_step(self) -> None:
        """Start the next step, with a new limit of moved blocks, of which postponed moves get the first part."""
        self._left = self.max_blocks
        self.reserved, self.wanted = min(self.wanted, self.max_blocks), 0
        if self.loading and self._host is not None:
            ended = set(self._host.poll())
            self.loading = {sequence: ticket for sequence, ticket in self.loading.items() if ticket not in ended}

    def take_ops(self) -> list[tuple[int, int, int]]:
        """Take the block ops of the step being scheduled; the next step starts without any."""
        ops, self.ops = self.ops, []
        return ops

    def drop_ops(self) -> None:
        """Drop the block ops of the step being scheduled, and the postponed moves of the previous step."""
        self.ops = []
        self.reserved = self.wanted = 0

    def copy(self, src: int, dst: int) -> None:
        """Copy a shared block that is about to be written."""
        self.ops.append((BlockOp.COPY, src, dst))
        self.counters.copied_blocks += 1

    # ---- out

    def park(self, sequence: Sequence, host_ids: list[list[int]]) -> None:
        """Park `sequence` with the device blocks in its tables and the host blocks `host_ids`, which are pinned."""
        if self._host is not None:
            for ids in host_ids:
                self._host.pin(_present(ids))
        sequence.host_ids = host_ids
        self.parked.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Unpark `sequence`, if it is parked, and unpin its host blocks."""
        host_ids, sequence.host_ids = sequence.host_ids, None
        self.loading.pop(sequence, None)
        if host_ids is not None and self._host is not None:
            self.parked.remove(sequence)
            for ids in host_ids:
                self._host.unpin(_present(ids))

    def swap_out(self, sequence: Sequence, keep: abc.Sequence[range]) -> bool:
        """Park `sequence` with its logical blocks `keep`, per group, and begin to move them. False: nothing has
        changed, because the host has no room or the step has reached its limit."""
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
        """Free the device blocks of a parked sequence, from its end, that are on the host or can be moved there by this
        step. Returns their number."""
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
        """Whether this step may move `num_blocks` more blocks."""
        return num_blocks <= max(self._left, 0)

    def next_in(self, sequence: Sequence, num_new: int, *, in_parts: bool) -> tuple[list[Place], bool]:
        """Choose the blocks of a parked sequence that this step loads. Returns them, and whether they are all and
        `num_new` blocks may be allocated with them. Blocks that are cached on the device are referenced instead of
        loaded. Unless `in_parts`, it is all or nothing."""
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
        """Whether the step can read these blocks of a parked sequence. If not, a load of them is started."""
        host_ids = sequence.host_ids or ()
        ids = [host_ids[group.index][index] for group, index in places]
        ticket = AT_HAND if self._host is None else self._host.begin_load(ids)
        if ticket == AT_HAND:
            return True
        self.loading[sequence] = ticket
        return False

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether a parked sequence waits for a load that makes its blocks readable by a step."""
        return sequence in self.loading

    def _num_loadable(self, most: int) -> int:
        """Number of blocks, at most `most`, that the step may load if it also demotes the cached blocks that they
        replace. At least one while any move is left, so that every load completes in time."""
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
        """Fill new device blocks with the host blocks of `places`."""
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
        """Whether a waiting sequence may take `count` new blocks in this step: its prefix `ids` (on either tier) can be
        loaded, and no cached content for which the host has room is lost, within the step's limit.

        If not, cached blocks are demoted `ahead`, up to the limit, the most recently used first. A sequence waits for
        this only as many steps as moving `count` blocks takes, since others may use up the moves.
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
        """Demote cached blocks that the device is about to reuse. `evicted` has the least recently used first; the most
        recently used are kept first.

        A block is freed before its predecessors in the hash chain. So these come after it in `evicted`, and are kept
        before it, or stay on the device.
        """
        limit = self._left - self.reserved
        if limit > 0:
            self._keep({key: id_ for id_, key in reversed(evicted) if self._pool.get_cached_block(key) is None}, limit)

    def _keep(self, lost: dict[bytes, int], limit: int) -> None:
        """Move the first blocks of `lost` (key -> block id) to the host: at most `limit`, as long as it has room."""
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
        are host blocks pinned for transfers."""
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
    """Number of device blocks in the tables of `sequence`."""
    return sum(len(table.ids) - table.ids.count(NULL_BLOCK) for table in sequence.tables)


def _present(ids: abc.Sequence[int]) -> list[int]:
    return [block_id for block_id in ids if block_id != NULL_BLOCK]
