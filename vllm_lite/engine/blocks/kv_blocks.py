"""KVBlocks: the KV of every sequence, in blocks of one pool and, if there is a host tier, in CPU memory.

It chooses block ids and records copies as block ops; the worker's CacheEngine moves the bytes, in that order, before
the forward pass of the same step. So a block may be reused as soon as its copy is recorded.

Invariants, checked by check_integrity(): a block's reference count is the number of table entries that name it (the
null block aside); free and referenced blocks are disjoint and make up the pool; a hashed block is full; no sequence
writes to a block that is hashed or that another one reads; the host's pinned blocks are those of parked sequences; the
only waiting sequences with device blocks are parked ones.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from vllm_lite.engine.blocks.groups import KVGroup, blocks_held, common_hit, longest_sequence
from vllm_lite.engine.blocks.part import CachePart, Forgotten, Growth, Op, PrefixHit
from vllm_lite.engine.blocks.pool import NULL_BLOCK, BlockPool
from vllm_lite.engine.blocks.swapping import Place, Swapping, num_held
from vllm_lite.engine.blocks.table import BlockTable
from vllm_lite.engine.blocks.tails import BlockTails
from vllm_lite.engine.blocks.tier import Tier
from vllm_lite.engine.blocks.verdict import OK, Admission, Verdict, admission
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import Entry, ReplaceBlock

ON_ITS_WAY = Admission(Verdict.LATER, lacks="swap", is_arriving=True)
"""Verdict while a tier loads blocks of a parked sequence."""
Tables = list[list[int]]
"""Global block ids, [group][logical block]; the null block before the window."""


class KVBlocks(CachePart[Tables]):
    """Owns the block pool, the host tier and the block tables of all sequences. Without KV groups (a model that keeps
    no KV), tables are empty and admission always succeeds."""

    has_tails = True

    def __init__(
        self,
        pool: BlockPool,
        groups: Many[KVGroup],
        block_size: int,
        *,
        host: Tier | None = None,
        watermark: float = 0.01,
        max_swap_blocks_per_step: int = 10**9,
    ) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self.host = host
        self.keeps = bool(groups)
        self.block_size = block_size
        self.watermark_blocks = int(watermark * pool.num_blocks)
        self.on_store: Callable[[Sequence, KVGroup, int], None] | None = None
        """Called with (sequence, group, logical block) of each block that is added to the device's prefix cache."""
        self.others_hold: Callable[[], list[list[int]]] = list
        """Returns the referenced blocks that are in no table: those in transfer to or from another tier."""
        self.swapping = Swapping(pool, host, self.groups, max_swap_blocks_per_step, self._cache)
        self.tails = BlockTails(pool)
        self.counters = self.swapping.counters

    # ---- the step

    def begin_step(self) -> None:
        self.swapping.begin_step()
        self.tails.begin_step()

    @property
    def is_moving(self) -> bool:
        return bool(self.swapping.ops)

    def take_ops(self) -> list[Op]:
        return self.swapping.take_ops()

    def drop_ops(self) -> None:
        self.swapping.drop_ops()

    # ---- sizes

    @property
    def total_tokens(self) -> int:
        """Number of tokens whose KV the pool holds in all groups."""
        return self.pool.num_usable // len(self.groups) * self.block_size if self.groups else 0

    def num_requests(self, num_tokens: int, chunk: int) -> float:
        """Number of sequences of `num_tokens` that the pool holds at once; 0 for a model that keeps no KV."""
        held = self.num_blocks(num_tokens, chunk)
        return self.pool.num_usable / held if held else 0.0

    def max_tokens(self, limit: int, chunk: int) -> int:
        return longest_sequence(self.groups, self.pool.num_usable - self.watermark_blocks, limit, chunk)

    def num_blocks(self, num_tokens: int, chunk: int) -> int:
        return blocks_held(self.groups, num_tokens, chunk)

    def num_full_blocks(self, num_tokens: int) -> int:
        return num_tokens // self.block_size * len(self.groups)

    def num_moved(self, num_tokens: int) -> int:
        return blocks_held(self.groups, num_tokens, 1)

    # ---- lookup and admission

    def register(self, sequence: Sequence) -> None:
        sequence.tables = [BlockTable(self.pool) for _ in self.groups]
        sequence.num_slots = self._num_slots(sequence, 0)

    def search(self, sequence: Sequence) -> "BlockSearch":
        return BlockSearch(self, sequence)

    def nothing(self) -> Tables:
        return [[] for _ in self.groups]

    def num_on_host(self, found: Tables) -> int | None:
        if self.host is None:
            return None
        first_id = self.pool.num_blocks
        num_blocks: int = sum(max(ids) >= first_id for ids in zip(*found, strict=True))
        return num_blocks * self.block_size

    def next_keys(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        next_hash = sequence.block_hashes[num_blocks : num_blocks + 1]
        return [block_hash + group.key for block_hash in next_hash for group in self.groups]

    def has_any(self, keys: Iterable[bytes]) -> bool:
        for key in keys:  # noqa: SIM110  # asked for each waiting sequence in every step
            if self.find(key) is not None:
                return True
        return False

    @property
    def supply(self) -> int:
        """Free blocks plus all revivals so far. When a referenced block of a waiting sequence's prefix is freed, the
        free blocks and those that it needs both grow by one; when a free one is revived, both fall by one. The sum
        leaves out the second case, so if it has not grown, the sequence lacks no fewer blocks."""
        return self.pool.num_free + self.pool.num_revived

    def admission(self, sequence: Sequence, found: Tables, chunk: int) -> Admission:
        """Whether enough blocks are free. Cached blocks that are referenced already cost nothing."""
        required = 0
        for group, table in zip(self.groups, found, strict=True):
            in_use = sum(0 < block_id < self.pool.num_blocks and not self.pool.is_free(block_id) for block_id in table)
            required += max(0, group.num_blocks(sequence.num_tokens, chunk) - in_use)
        return admission(self.pool.num_usable, self.pool.num_free, required, self.watermark_blocks)

    def may_admit(self, sequence: Sequence, found: Tables, num_tokens: int, *, in_parts: bool) -> bool:
        """Whether the step's limit of moved blocks allows the admission; `in_parts`, a hit on the host may exceed it
        and is loaded over several steps. False: cached blocks that the admission evicts are demoted first."""
        num_on_host = self._num_on_host(found)
        if self.host is None or (in_parts and num_on_host):
            return True
        count = num_on_host + sum(self._num_missing(sequence, num_tokens, found))
        return self.swapping.may_take(sequence, count, [block_id for ids in found for block_id in ids])

    def admit(self, sequence: Sequence, hit: PrefixHit, found: Tables, num_tokens: int) -> bool:
        """Share `found` and allocate the rest; in a window, blocks are allocated for the first `num_tokens` only."""
        first_host_id = self.pool.num_blocks
        # Reference the whole hit before allocating: the new blocks must not evict or demote any of it.
        for group, table, ids in zip(self.groups, sequence.tables, found, strict=True):
            table.share([block_id if block_id < first_host_id else NULL_BLOCK for block_id in ids])
            # A tail does not move the window: grow() does, and frees the blocks that have left it.
            position = min(sequence.num_computed, len(ids) * self.block_size)
            table.num_trimmed = min(group.first_needed(position), len(ids))
        if not self._num_on_host(found):
            tail = [self.tails.find(hit.tail + group.key) for group in self.groups if hit.tail]
            self._extend(sequence, num_tokens, [])
            self._copy_tail(sequence, hit.num_tokens // self.block_size, tail)
            return True
        host_ids = [[block_id if block_id >= first_host_id else NULL_BLOCK for block_id in ids] for ids in found]
        self.swapping.park(sequence, host_ids)
        return self.swap_in(sequence, num_tokens)

    def _copy_tail(self, sequence: Sequence, number: int, sources: Many[int | None]) -> None:
        """Copy a cached tail into logical block `number`, from one source block per group. Sources are unreferenced, so
        one may be the very block that the sequence has just got: its contents stay until a step writes to it, after
        all copies. A source that another group has just got is exchanged, so that no copy is written over it."""
        for table, source in zip(sequence.tables, sources, strict=False):
            if source is None:
                raise RuntimeError("the cached tail from which a sequence continues is gone")
            for other in sequence.tables:
                if other.ids[number] == source:
                    table.ids[number], other.ids[number] = source, table.ids[number]
        for table, source in zip(sequence.tables, sources, strict=False):
            if source is not None and source != table.ids[number]:
                self.swapping.copy(source, table.ids[number])

    def note_admission(self, hit: PrefixHit, found: Tables) -> list[tuple[str, dict[str, int]]]:  # noqa: ARG002
        num_tokens = self.num_on_host(found)
        return [("promoted", {"tokens": num_tokens})] if num_tokens else []

    # ---- growing

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth | None:
        """Allocate new blocks, and copies of shared ones that would be written.

        None: too few blocks are free; only blocks that have left the window are released.
        """
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if group.window is not None:
                table.trim(group.first_needed(sequence.num_surely_computed))
        write_from = max(sequence.num_surely_computed, sequence.num_cached)
        first_written = write_from // self.block_size
        shared = [
            group.index
            for group in self.groups
            if write_from < num_tokens and sequence.tables[group.index].is_shared(first_written)
        ]
        num_blocks = -(-num_tokens // self.block_size)
        missing = [max(0, num_blocks - len(table.ids)) for table in sequence.tables]
        if sum(missing) + len(shared) > self.pool.num_free:
            return None
        replaced: list[Entry] = []
        for index in shared:
            src, dst = sequence.tables[index].copy_on_write(first_written)
            self.swapping.copy(src, dst)
            replaced.append(ReplaceBlock(sequence.handle, index, first_written, dst))
        new_ids = [table.append(count) for table, count in zip(sequence.tables, missing, strict=True)]
        sequence.num_slots = self._num_slots(sequence, num_tokens)
        if write_from >= num_tokens:  # nothing is written yet: grow() must be called again to copy a shared block
            sequence.num_slots = num_tokens
        return Growth(new_ids if any(new_ids) else [], replaced)

    def publish(self, sequence: Sequence, first: int, last: int) -> None:
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for index in range(max(first, table.num_trimmed), last):
                if self.pool.blocks[table.ids[index]].block_hash is None:  # a fork that shares it may have cached it
                    self._cache(sequence, group, index, table.ids[index])

    def publish_tail(self, sequence: Sequence, number: int, key: bytes) -> None:
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if number >= table.num_trimmed and table.ids[number] != NULL_BLOCK:
                self.tails.add(key + group.key, table.ids[number])

    def has_tail(self, key: bytes) -> bool:
        return all(self.tails.find(key + group.key) is not None for group in self.groups)

    def forget_tails(self, keys: Iterable[bytes]) -> None:
        self.tails.forget(key + group.key for key in keys for group in self.groups)

    # ---- sharing and leaving

    def can_fork(self, parent: Sequence, position: int, num_scheduled: int) -> bool:  # noqa: ARG002
        return all(
            table.num_trimmed <= group.first_needed(position)
            for group, table in zip(self.groups, parent.tables, strict=True)
        )

    def fork(self, parent: Sequence, child: Sequence, num_scheduled: int) -> Many[Entry]:  # noqa: ARG002
        """Share the parent's blocks. Whichever of the two first writes to a shared block gets a copy; positions of
        drafts in flight count as written again."""
        num_blocks = -(-child.num_tokens // self.block_size)
        child.tables = [table.fork(num_blocks) for table in parent.tables]
        for group, table in zip(self.groups, child.tables, strict=True):
            table.num_trimmed = min(parent.tables[group.index].num_trimmed, num_blocks)
        child.num_slots = child.num_computed  # so that both come to grow() before they write
        parent.num_slots = min(parent.num_slots, max(parent.num_surely_computed, parent.num_cached))
        return ()

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Release the tables and host blocks. `forget` also drops equal blocks of other sequences from the cache, and
        copies on the tier that the sequence has left."""
        if forget:
            hashes = sequence.block_hashes[: sequence.num_hashed_blocks]
            keys = [block_hash + group.key for group in self.groups for block_hash in hashes]
            self.pool.forget_contents(keys)
            if self.host is not None:
                self.host.forget(keys)
        for table in sequence.tables:
            table.free()
        self.swapping.leave(sequence)
        sequence.num_slots = self._num_slots(sequence, 0)

    # ---- swapping

    @property
    def parked(self) -> Many[Sequence]:
        return self.swapping.parked

    def may_swap_out(self, sequence: Sequence) -> bool:
        """Whether the sequence's last block of each group, to which it will write, can be moved by this step or is not
        shared. Swapped blocks return unshared, but a shared one that stays on the device must not be written."""
        num_computed = sequence.num_computed
        if self.swapping.may_move(len(self.groups)) or num_computed % self.block_size == 0:
            return True
        return not any(table.is_shared(num_computed // self.block_size) for table in sequence.tables)

    def swap_out(self, sequence: Sequence) -> bool:
        """Park the sequence. Blocks beyond the step's limit stay on the device until they are reclaimed. False: the
        host has no room, or the step has reached its limit."""
        end = -(-sequence.num_computed // self.block_size)
        needed = [range(min(group.first_needed(sequence.num_computed), end), end) for group in self.groups]
        if not self.swapping.swap_out(sequence, needed):
            return False
        sequence.num_slots = 0
        return True

    def holds(self, sequence: Sequence) -> bool:
        return sequence.host_ids is not None or any(table.ids for table in sequence.tables)

    def holds_device(self, sequence: Sequence) -> bool:
        return num_held(sequence) > 0

    def push_out(self, sequence: Sequence) -> bool:
        return self.swapping.push_out(sequence) > 0

    def swap_in_admission(self, sequence: Sequence, chunk: int) -> Admission:
        required = self.num_blocks(sequence.num_tokens, chunk) - num_held(sequence)
        result = admission(self.pool.num_usable, self.pool.num_free, required, self.watermark_blocks)
        return result.unless(ON_ITS_WAY if self.swapping.is_loading(sequence) else OK)

    def swap_in(self, sequence: Sequence, num_tokens: int, *, in_parts: bool = True) -> bool:
        """Load as many host blocks as the step may move. False: not all are loaded; unless `in_parts`, none is."""
        missing = self._num_missing(sequence, num_tokens, [table.ids for table in sequence.tables])
        places, is_all = self.swapping.next_in(sequence, sum(missing), in_parts=in_parts)
        if not is_all:
            self.swapping.load(sequence, places, self.pool.get_new_blocks(len(places)))
            return False
        self._extend(sequence, num_tokens, places)
        self.swapping.leave(sequence)
        return True

    # ---- forgetting and reporting

    def reset(self) -> Forgotten:
        return Forgotten(self.pool.reset_cache(), self.host.reset() if self.host is not None else 0)

    def count(self, stats: Stats) -> None:
        pool, host = self.pool, self.host
        stats.num_blocks, stats.num_used_blocks = pool.num_usable, pool.num_used
        stats.num_cached_blocks, stats.peak_used_blocks = pool.num_cached, pool.peak_used
        if host is not None:
            stats.num_host_blocks, stats.num_used_host_blocks = host.num_usable, host.num_used

    def check_integrity(self, sequences: Many[Sequence]) -> None:
        tables = [table.ids for sequence in sequences for table in sequence.tables]
        others = [self._by_tier(ids) for ids in self.others_hold()]
        self.pool.check_integrity([*tables, *[on_device for on_device, _ in others]])
        for sequence in sequences:
            for table in sequence.tables:
                if any(table.ids[: table.num_trimmed]):
                    raise RuntimeError(f"{sequence} holds a block that it counts as given back")
                if len(table.ids) * self.block_size < sequence.num_slots:
                    raise RuntimeError(f"{sequence} holds {len(table.ids)} blocks for {sequence.num_slots} slots")
                next_slot = max(sequence.num_surely_computed, sequence.num_cached)
                if next_slot < sequence.num_slots and table.is_shared(next_slot // self.block_size):
                    raise RuntimeError(f"{sequence} would write to a block that others read")
        self.swapping.check_integrity(sequences, [on_host for _, on_host in others])
        self.tails.check_integrity()

    def publish_loaded(self, sequence: Sequence | None, place: Place, key: bytes, block_id: int) -> None:
        """Cache a block that was filled from another tier, on behalf of `sequence` if that still has its tokens."""
        self.pool.cache_block(block_id, key)
        if self.on_store is not None and sequence is not None:
            self.on_store(sequence, place.group, place.number)

    def may_pin(self, ids: Many[int]) -> bool:
        """Whether blocks of both tiers may be pinned for a transfer: at most half of the free blocks of each tier."""
        on_device, on_host = self._by_tier(ids)
        if 2 * sum(map(self.pool.is_free, on_device)) > self.pool.num_free:
            return False
        return self.host is None or 2 * self.host.num_unpinned(on_host) <= self.host.num_free

    def pin(self, ids: Many[int]) -> None:
        """Reference blocks of both tiers, so that they keep their contents."""
        on_device, on_host = self._by_tier(ids)
        self.pool.touch(on_device)
        if self.host is not None:
            self.host.pin(on_host)

    def unpin(self, ids: Many[int]) -> None:
        """Drop the references of pin(), last block first."""
        on_device, on_host = self._by_tier(ids)
        self.pool.free(reversed(on_device))
        if self.host is not None:
            self.host.unpin(on_host)

    # ---- inside

    def _by_tier(self, ids: Iterable[int]) -> tuple[list[int], list[int]]:
        on_device, on_host = list[int](), list[int]()
        for block_id in ids:
            (on_device if block_id < self.pool.num_blocks else on_host).append(block_id)
        return on_device, on_host

    def find(self, key: bytes) -> int | None:
        """Global id of a block with the content of `key`, preferably on the device."""
        block_id = self.pool.get_cached_block(key)
        return self.host.find(key) if block_id is None and self.host is not None else block_id

    def _num_on_host(self, found: Tables) -> int:
        first_host_id = self.pool.num_blocks
        return sum(block_id >= first_host_id for ids in found for block_id in ids)

    def _extend(self, sequence: Sequence, num_tokens: int, places: Many[Place]) -> None:
        """Allocate the blocks that the sequence lacks, and load `places` from the host. A single allocation lets the
        demotion choose among all evicted blocks."""
        missing = self._num_missing(sequence, num_tokens, [table.ids for table in sequence.tables])
        ids = self.pool.get_new_blocks(len(places) + sum(missing))
        at = len(places)
        self.swapping.load(sequence, places, ids[:at])
        for table, count in zip(sequence.tables, missing, strict=True):
            table.ids += ids[at : at + count]
            at += count
        sequence.num_slots = self._num_slots(sequence, sequence.num_tokens)

    def _num_missing(self, sequence: Sequence, num_tokens: int, held: Iterable[Many[int]]) -> list[int]:
        """Number of blocks per group that an admission allocates beside those `held`: for all tokens of the sequence,
        or in a window for the first `num_tokens`."""
        ends = (sequence.num_tokens if group.window is None else num_tokens for group in self.groups)
        return [max(0, -(-end // self.block_size) - len(ids)) for end, ids in zip(ends, held, strict=True)]

    def _num_slots(self, sequence: Sequence, num_tokens: int) -> int:
        """Value of `Sequence.num_slots` after room was made for `num_tokens`: the position at which grow() has to be
        called again."""
        if sequence.tables:
            return min(len(table.ids) for table in sequence.tables) * self.block_size
        return -(-num_tokens // self.block_size) * self.block_size if self.is_asked_by_blocks else sequence.max_len

    def _cache(self, sequence: Sequence, group: KVGroup, index: int, block_id: int) -> None:
        self.pool.cache_block(block_id, sequence.block_hashes[index] + group.key)
        if self.on_store is not None:
            self.on_store(sequence, group, index)


class BlockSearch:
    """Looks up the blocks of one sequence, each at most once, without taking references."""

    def __init__(self, blocks: KVBlocks, sequence: Sequence) -> None:
        self._blocks = blocks
        self._hashes = sequence.block_hashes
        self._num_tokens = sequence.num_tokens
        self._found: dict[tuple[int, int], int | None] = {}

    def longest(self, num_blocks: int) -> int:
        """The longest prefix that is cached in every group."""
        return common_hit(self._blocks.groups, num_blocks, self._num_tokens, self._find)

    def find(self, num_blocks: int) -> Tables:
        position, tables = min(num_blocks * self._blocks.block_size, self._num_tokens - 1), []
        for group in self._blocks.groups:
            first = min(group.first_needed(position), num_blocks)
            needed = [self._find(group, index) for index in range(first, num_blocks)]
            tables.append([NULL_BLOCK] * first + [block_id for block_id in needed if block_id is not None])
        return tables

    def _find(self, group: KVGroup, index: int) -> int | None:
        place = group.index, index
        if place not in self._found:
            self._found[place] = self._blocks.find(self._hashes[index] + group.key)
        return self._found[place]
