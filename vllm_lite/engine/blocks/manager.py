"""KVCacheManager: which blocks each sequence holds, what of its prefix is cached and where, and whether it is admitted.

It decides ids and records what has to be copied (`swapping.take_ops`); the worker's CacheEngine moves the bytes, in
that order, before the forward pass of the same step. Hence a block may be given away as soon as its copy is recorded.

Invariants, checked by check_integrity(): a block's reference count is the number of table entries that name it (the
null block aside); free and referenced blocks are disjoint and make up the pool; a hashed block is full; nobody writes
to a block that is hashed or has another reader; the host's pinned blocks are those of parked sequences; of the waiting
sequences only these hold device blocks.
"""

from collections import abc
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_lite.engine.blocks.groups import KVGroup, blocks_held, common_hit, longest_sequence
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.pool import NULL_BLOCK, BlockPool
from vllm_lite.engine.blocks.prefix_hit import Lookup, PrefixHit
from vllm_lite.engine.blocks.state_place import NO_SLOT
from vllm_lite.engine.blocks.state_slots import StateSlots
from vllm_lite.engine.blocks.swapping import Place, Swapping, num_held
from vllm_lite.engine.blocks.table import BlockTable
from vllm_lite.engine.blocks.verdict import Admission, Verdict, admission
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.api import PrefixCacheReset
from vllm_lite.protocol.step import States
from vllm_lite.runtime.prefix_hash import PrefixHasher

_RETIRED = "computed before the cache was reset"


class Growth(NamedTuple):
    """The blocks that a sequence got: new ids per group ([] if none), and replaced shared ones (group, index, id).
    `states`: where its state goes on, if that is another slot."""

    new_ids: list[list[int]]
    replaced: list[tuple[int, int, int]]
    states: abc.Sequence[States] = ()


class KVCacheManager:
    """Without groups (a model that keeps no KV) every sequence fits and every table is empty."""

    def __init__(
        self,
        pool: BlockPool,
        groups: abc.Sequence[KVGroup],
        hasher: PrefixHasher,
        *,
        host: HostTier | None = None,
        watermark: float = 0.01,
        max_swap_blocks_per_step: int = 10**9,
    ) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self.hasher = hasher
        self.host = host
        self.states: StateSlots | None = None
        """Those of a model with recurrent layers; set before there are sequences."""
        self.block_size = hasher.block_size
        self.watermark_blocks = int(watermark * pool.num_blocks)
        self.on_store: Callable[[Sequence, KVGroup, int], None] | None = None
        """Called with every logical block of a sequence that can be found on the device from now on."""
        self.swapping = Swapping(pool, host, self.groups, max_swap_blocks_per_step, self._cache)
        self.counters = self.swapping.counters

    def begin_step(self) -> None:
        """Start the next step: what the one before moves and leaves is there for it."""
        self.swapping.begin_step()
        if self.states is not None:
            self.states.begin_step()

    @property
    def is_moving(self) -> bool:
        """Whether the step being made moves or copies anything."""
        return self.swapping.is_moving or bool(self.states and self.states.host and self.states.host.ops)

    def take_ops(self) -> list[tuple[int, int, int]]:
        """Return the block program of the step that has been made; the next one starts empty."""
        return self.swapping.take_ops() + (self.states.host.take_ops() if self.states and self.states.host else [])

    def max_tokens(self, limit: int, chunk: int) -> int:
        """The longest sequence, at most `limit`, that can always come in again, however often it is preempted."""
        return longest_sequence(self.groups, self.pool.num_usable - self.watermark_blocks, limit, chunk)

    def num_blocks(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at once."""
        return blocks_held(self.groups, num_tokens, chunk)

    # ---- admission

    def register(self, sequence: Sequence, extra_keys: abc.Sequence[str] = ()) -> None:
        """Give a new sequence its empty tables and the root of its hash chain."""
        sequence.tables = [BlockTable(self.pool) for _ in self.groups]
        sequence.forks_state = self.states is not None
        if self.pool.enable_caching:
            sequence.hash_root = self.hasher.root(extra_keys)
        sequence.num_slots = self._num_slots(sequence, 0)

    def register_fork(self, parent: Sequence, child: Sequence) -> None:
        """Register `child`, which cannot share the blocks of `parent` now and finds those that are cached."""
        self.register(child)
        child.hash_root = parent.hash_root

    def find_cached(self, sequence: Sequence) -> PrefixHit:
        """The longest cached beginning of `sequence` on either tier. Takes no reference."""
        keeps_nothing = not self.groups and self.states is None
        if not self.pool.enable_caching or keeps_nothing or sequence.unscored:
            return PrefixHit([[] for _ in self.groups], 0)
        self._hash_tokens(sequence, sequence.num_tokens)
        hashes, found = sequence.block_hashes, dict[tuple[int, int], int | None]()

        def find(group: KVGroup, index: int) -> int | None:
            place = (group.index, index)
            if place not in found:
                found[place] = self._find(hashes[index] + group.key)
            return found[place]

        length = reach = common_hit(self.groups, len(hashes), sequence.num_tokens, find)
        state, is_coming = NO_SLOT, False
        if self.states is not None:
            length = self._with_state(sequence, length, find)
            state = self.states.find(hashes, length)
            is_coming = self.states.is_coming(sequence, length, (sequence.num_tokens - 1) // self.block_size)
        position = min(length * self.block_size, sequence.num_tokens - 1)
        tables = []
        for group in self.groups:
            first = min(group.first_needed(position), length)
            needed = [find(group, index) for index in range(first, length)]
            tables.append([NULL_BLOCK] * first + [block_id for block_id in needed if block_id is not None])
        return PrefixHit(tables, length * self.block_size, state, reach * self.block_size, is_coming)

    def _with_state(self, sequence: Sequence, length: int, find: Callable[[KVGroup, int], int | None]) -> int:
        """The longest prefix, in blocks and at most `length`, behind which there is a state, too, and a token left to
        compute: unlike attention a state cannot do so without taking it up."""
        if self.states is None:
            return length
        length = min(length, (sequence.num_tokens - 1) // self.block_size)
        while True:
            found = self.states.longest(sequence.block_hashes, length)
            length = common_hit(self.groups, found, sequence.num_tokens, find)
            if length == found:
                return found

    def admission(self, sequence: Sequence, hit: PrefixHit, chunk: int) -> Admission:
        """Whether the sequence may be admitted with all its tokens. Cached blocks that are referenced cost nothing."""
        required = 0
        for group, table in zip(self.groups, hit.tables, strict=True):
            in_use = sum(0 < block_id < self.pool.num_blocks and not self.pool.is_free(block_id) for block_id in table)
            required += max(0, group.num_blocks(sequence.num_tokens, chunk) - in_use)
        result = admission(self.pool.num_usable, self.pool.num_free, required, self.watermark_blocks)
        if (
            self.states is not None
            and result.verdict is Verdict.OK
            and (hit.is_coming or not self.states.has_room_for(hit.state))
        ):
            return result._replace(verdict=Verdict.LATER, lacks_state=True)
        return result

    def loads_state(self, hit: PrefixHit) -> bool:
        """Whether the state behind a hit lies on the host."""
        return self.states is not None and self.states.is_on_host(hit.state)

    def remember(self, sequence: Sequence, hit: PrefixHit, admission: Admission) -> None:
        """Keep the lookup of a sequence that goes on waiting."""
        index = hit.num_tokens // self.block_size
        keys = [
            block_hash + group.key for block_hash in sequence.block_hashes[index : index + 1] for group in self.groups
        ]
        num_cached = min(hit.num_tokens, sequence.num_tokens - 1)
        sequence.lookup = Lookup(admission, num_cached, keys, self._supply())

    def recall(self, sequence: Sequence) -> Lookup | None:
        """The last lookup of a waiting sequence, if another would find no more cached. Its verdict is OK if that may
        have changed by now.

        Blocks of its prefix that are referenced cost it nothing. When one of them is freed, `free` and what it needs
        grow by one; when a free one is revived, both fall: only the supply, in which the two cancel out, can help.
        """
        known = sequence.lookup
        if known is None or any(self._find(key) is not None for key in known.next_keys):
            return None
        _, required, free, watermark, *_ = known.admission
        gained = self._supply() - known.supply
        if free + gained - required < watermark:
            return known
        return known._replace(admission=known.admission._replace(verdict=Verdict.OK))

    def _supply(self) -> int:
        return self.pool.num_free + self.pool.num_revived

    def admit(self, sequence: Sequence, hit: PrefixHit, num_tokens: int, *, in_parts: bool = True) -> bool:
        """Share the hit, and allocate for all the tokens the sequence has; in a window for the first `num_tokens`.

        Call it after a verdict of OK. On a hit of the whole sequence every block is shared and only the last token is
        computed again, for its logits; its KV is in the cache already and is not written. False: a step moves only so
        many blocks. If the hit lies on the host, the sequence is parked, and swap_in() goes on with it; else, and
        unless `in_parts`, it holds nothing, and what its blocks evict is being demoted.
        """
        position = min(hit.num_tokens, sequence.num_tokens - 1)
        first_host_id = self.pool.num_blocks
        num_on_host = sum(block_id >= first_host_id for ids in hit.tables for block_id in ids)
        if self.host is not None and not (in_parts and num_on_host):
            count = num_on_host + sum(self._num_missing(sequence, num_tokens, hit.tables))
            if not self.swapping.may_take(sequence, count, [block_id for ids in hit.tables for block_id in ids]):
                return False
        # Hold all of it before anything is allocated: what is evicted and demoted for the new blocks must not be this.
        for group, table, ids in zip(self.groups, sequence.tables, hit.tables, strict=True):
            table.share([block_id if block_id < first_host_id else NULL_BLOCK for block_id in ids])
            table.num_trimmed = min(group.first_needed(position), len(ids))
        sequence.lookup = None
        sequence.num_computed = position
        sequence.num_cached = hit.num_tokens
        sequence.num_hashed_blocks = hit.num_tokens // self.block_size
        if self.states is not None:
            self.states.begin(sequence, hit.state, position, hit.reach)
        host_ids = [[block_id if block_id >= first_host_id else NULL_BLOCK for block_id in ids] for ids in hit.tables]
        if num_on_host:
            self.swapping.park(sequence, host_ids)
            return self.swap_in(sequence, num_tokens)
        self._extend(sequence, num_tokens, [])
        return True

    # ---- growing

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth | None:
        """Make room to compute up to `num_tokens`: new blocks, and copies of shared ones that would be written.

        None: too few blocks are free, and nothing is changed but for blocks out of the window.
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
        replaced = []
        for index in shared:
            src, dst = sequence.tables[index].copy_on_write(first_written)
            self.swapping.copy(src, dst)
            replaced.append((index, first_written, dst))
        new_ids = [table.append(count) for table, count in zip(sequence.tables, missing, strict=True)]
        sequence.num_slots = self._num_slots(sequence, num_tokens)
        if write_from >= num_tokens:  # nothing is written yet, so a shared block is still to be copied
            sequence.num_slots = num_tokens
        states = () if self.states is None else self.states.next_places(sequence)
        return Growth(new_ids if any(new_ids) else [], replaced, states)

    def most_drafts(self, sequence: Sequence, count: int) -> int:
        """How many of `count` drafts a step may have that computes `sequence` up to `num_computed` otherwise."""
        saves = self.states is not None and self.pool.enable_caching
        return min(count, -sequence.num_computed % self.block_size) if saves else count

    def arrival_entries(self, sequence: Sequence) -> list[States]:
        """What the workers have to know of a sequence that comes in, beside its blocks."""
        return [] if self.states is None else [self.states.entry(sequence)]

    def _extend(self, sequence: Sequence, num_tokens: int, places: abc.Sequence[Place]) -> None:
        """Allocate the blocks that the sequence lacks, and load `places`. It is one allocation, so that of all blocks
        evicted for it those are demoted that are worth most."""
        missing = self._num_missing(sequence, num_tokens, [table.ids for table in sequence.tables])
        ids = self.pool.get_new_blocks(len(places) + sum(missing))
        at = len(places)
        self.swapping.load(sequence, places, ids[:at])
        for table, count in zip(sequence.tables, missing, strict=True):
            table.ids += ids[at : at + count]
            at += count
        sequence.num_slots = self._num_slots(sequence, sequence.num_tokens)

    def _num_missing(self, sequence: Sequence, num_tokens: int, held: Iterable[abc.Sequence[int]]) -> list[int]:
        """How many blocks each group lacks beside those `held` to admit a sequence: for all its tokens, and in a window
        for the first `num_tokens`."""
        ends = (sequence.num_tokens if group.window is None else num_tokens for group in self.groups)
        return [max(0, -(-end // self.block_size) - len(ids)) for end, ids in zip(ends, held, strict=True)]

    def _num_slots(self, sequence: Sequence, num_tokens: int) -> int:
        """How many positions can be computed before the next call of grow(), which has made room for `num_tokens`.
        States alone take no room, but are saved by grow() at the end of each block."""
        if sequence.tables:
            return min(len(table.ids) for table in sequence.tables) * self.block_size
        return sequence.max_len if self.states is None else -(-num_tokens // self.block_size) * self.block_size

    def cache_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Cache the blocks that the first `num_tokens` tokens fill. Those tokens must be final, and their KV written by
        a step that is sent before any that reads it."""
        first, last = sequence.num_hashed_blocks, num_tokens // self.block_size
        if first >= last or not self.pool.enable_caching:
            return
        self._hash_tokens(sequence, num_tokens)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for index in range(max(first, table.num_trimmed), last):
                if self.pool.blocks[table.ids[index]].block_hash is None:  # a fork's other holder may have been first
                    self._cache(sequence, group, index, table.ids[index])
        sequence.num_hashed_blocks = last
        if self.states is not None:
            self.states.publish(sequence, last * self.block_size)

    # ---- sharing and leaving

    def can_fork(self, parent: Sequence, child: Sequence, num_scheduled: int = 0) -> bool:
        """Whether the parent still holds all that computing the child's last token reads; the step in the making
        computes `num_scheduled` tokens of the parent. A state has no past: where it is ahead the child finds the one
        that was saved last."""
        position = child.num_tokens - 1
        return (
            (self.states is None or self.states.can_fork(parent, position, num_scheduled))
            and parent.num_computed >= position
            and all(
                table.num_trimmed <= group.first_needed(position)
                for group, table in zip(self.groups, parent.tables, strict=True)
            )
        )

    def fork(self, parent: Sequence, child: Sequence, num_scheduled: int = 0) -> abc.Sequence[States]:
        """`child` shares the blocks of its tokens, which are the parent's first ones. Its last token is computed again,
        for its logits; whichever of the two writes to a shared block first gets a copy, drafts that may have been wrong
        included. Returns where the parent's state goes on, if the step in the making moves it."""
        num_blocks = -(-child.num_tokens // self.block_size)
        child.tables = [table.fork(num_blocks) for table in parent.tables]
        for group, table in zip(self.groups, child.tables, strict=True):
            table.num_trimmed = min(parent.tables[group.index].num_trimmed, num_blocks)
        child.hash_root = parent.hash_root
        child.block_hashes = parent.block_hashes[: child.num_tokens // self.block_size]
        child.num_hashed_blocks = min(parent.num_hashed_blocks, len(child.block_hashes))
        child.num_computed = child.num_tokens - 1
        child.num_cached = min(parent.num_surely_computed, child.num_tokens)
        child.num_slots = child.num_computed  # so that both come to grow() before they write
        parent.num_slots = min(parent.num_slots, max(parent.num_surely_computed, parent.num_cached))
        return () if self.states is None else self.states.fork(parent, child, num_scheduled)

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Give all blocks back. Cached ones can be found until they are reused, or at once no more with `forget`."""
        if self.states is not None:
            self.states.release(sequence)
        if forget:  # also equal blocks of other sequences, and those left on a tier that the sequence has moved from
            hashes = sequence.block_hashes[: sequence.num_hashed_blocks]
            keys = [block_hash + group.key for group in self.groups for block_hash in hashes]
            for pool in (self.pool, self.host.pool) if self.host is not None else (self.pool,):
                pool.forget_contents(keys)
            if self.states is not None:
                self.states.forget(hashes)
        for table in sequence.tables:
            table.free()
        self.swapping.leave(sequence)
        sequence.num_computed = sequence.num_cached = sequence.num_hashed_blocks = 0
        sequence.num_slots = self._num_slots(sequence, 0)

    # ---- swapping

    def swap_out(self, sequence: Sequence) -> bool:
        """Begin to move the sequence's KV to the host. Blocks that the step may not move any more, and its state if the
        host has no room for it, stay on the device until they are reclaimed. False: nothing is changed, because the
        host has no room, its state is ahead of its KV, or the step has moved enough already, or too much for a fork
        that has not parted."""
        if sequence.state is not None and sequence.state.is_ahead:
            return False
        num_computed, end = sequence.num_computed, -(-sequence.num_computed // self.block_size)
        # It will write to its last blocks, one of each group. Those that leave come back as its own; one that stayed
        # would still be others' too.
        is_bound = not self.swapping.may_move(len(self.groups))
        if is_bound and num_computed % self.block_size and any(table.is_shared(end - 1) for table in sequence.tables):
            return False
        needed = [range(min(group.first_needed(num_computed), end), end) for group in self.groups]
        if not self.swapping.swap_out(sequence, needed):
            return False
        # A fork's last block may be full and shared while its last position is still to be computed: never written.
        sequence.num_cached = max(num_computed, min(sequence.num_cached, end * self.block_size))
        sequence.num_hashed_blocks = min(sequence.num_hashed_blocks, end)
        sequence.num_slots = 0
        if self.states is not None:
            self.states.swap_out(sequence)
        return True

    def reclaim(self, keep: Sequence | None = None) -> bool:
        """Take device blocks of a parked sequence other than `keep`. They go to the host; if that is not possible now,
        the sequence gives up all its KV and is computed again. False: there is no such sequence."""
        parked = (each for each in self.swapping.parked if each is not keep)
        sequence = next((each for each in parked if num_held(each) or (each.state and each.state.live)), None)
        if sequence is None:
            return False
        has_moved = self.states is not None and self.states.swap_out(sequence)
        if not self.swapping.push_out(sequence) and not has_moved:
            self.release(sequence)
            if sequence.status is Status.SWAPPED:
                sequence.status = Status.PREEMPTED
        return True

    def swap_in_admission(self, sequence: Sequence, chunk: int) -> Admission:
        """Whether a parked sequence may be admitted."""
        required = self.num_blocks(sequence.num_tokens, chunk) - num_held(sequence)
        result = admission(self.pool.num_usable, self.pool.num_free, required, self.watermark_blocks)
        if self.states is not None and result.verdict is Verdict.OK and not self.states.may_swap_in(sequence):
            return result._replace(verdict=Verdict.LATER, lacks_state=True)
        return result

    def swap_in(self, sequence: Sequence, num_tokens: int, *, in_parts: bool = True) -> bool:
        """Load the KV of a parked sequence, as much as the step may move, and make room for `num_tokens`. Call it after
        a verdict of OK. False: the sequence stays parked, and the next step goes on; unless `in_parts`, it got no block
        then."""
        missing = self._num_missing(sequence, num_tokens, [table.ids for table in sequence.tables])
        places, is_all = self.swapping.next_in(sequence, sum(missing), in_parts=in_parts)
        if not is_all:
            self.swapping.load(sequence, places, self.pool.get_new_blocks(len(places)))
            return False
        self._extend(sequence, num_tokens, places)
        self.swapping.leave(sequence)
        if self.states is not None:
            self.states.swap_in(sequence)
        return True

    # ---- forgetting

    def reset_cache(self, sequences: Iterable[Sequence]) -> PrefixCacheReset:
        """Forget every cached block of both tiers. Those of `sequences`, all the unfinished ones, stay allocated."""
        num_blocks, num_host_blocks = self._forget_cached()
        holders = [each for each in sequences if each.host_ids is not None or any(table.ids for table in each.tables)]
        if self.pool.enable_caching:
            for sequence in holders:
                self._retire(sequence)
        return PrefixCacheReset(num_blocks, num_host_blocks, len(holders))

    def lose_contents(self, sequences: Iterable[Sequence]) -> None:
        """The KV of both tiers is lost: nothing of it is found any more, and `sequences`, all the unfinished ones, hold
        no block. What the step in the making would have moved is dropped. Their hashes stay true of their tokens."""
        for sequence in sequences:  # first of all: it leaves what others could find
            self.release(sequence)
        self._forget_cached()
        self.swapping.drop_ops()
        if self.states is not None and self.states.host is not None:
            self.states.host.take_ops()

    def _forget_cached(self) -> tuple[int, int]:
        """Empty the index of both tiers, and that of states. Returns how many blocks could be found on each."""
        if self.states is not None:
            self.states.reset_cache()
        return self.pool.reset_cache(), self.host.pool.reset_cache() if self.host is not None else 0

    def _retire(self, sequence: Sequence) -> None:
        """Give the sequence a hash chain of its own: its blocks are cached again when it grows, moves to the host or
        comes back, and only itself and its forks may find them."""
        sequence.hash_root = self.hasher.root((sequence.hash_root.hex(), _RETIRED))
        sequence.block_hashes = []
        sequence.num_hashed_blocks = 0

    # ---- inside

    def _cache(self, sequence: Sequence, group: KVGroup, index: int, block_id: int) -> None:
        self.pool.cache_block(block_id, sequence.block_hashes[index] + group.key)
        if self.on_store is not None:
            self.on_store(sequence, group, index)

    def _find(self, key: bytes) -> int | None:
        block_id = self.pool.get_cached_block(key)
        return self.host.find(key) if block_id is None and self.host is not None else block_id

    def _hash_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens // self.block_size > len(sequence.block_hashes):
            tokens = memoryview(sequence.tokens).cast("B")
            self.hasher.extend(sequence.block_hashes, sequence.hash_root, tokens, num_tokens)
            tokens.release()  # an exported array cannot grow

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError if an invariant of this module is broken."""
        sequences = list(sequences)
        self.pool.check_integrity(table.ids for sequence in sequences for table in sequence.tables)
        for sequence in sequences:
            for table in sequence.tables:
                if len(table.ids) * self.block_size < sequence.num_slots:
                    raise RuntimeError(f"{sequence} holds {len(table.ids)} blocks for {sequence.num_slots} slots")
                next_slot = max(sequence.num_surely_computed, sequence.num_cached)
                if next_slot < sequence.num_slots and table.is_shared(next_slot // self.block_size):
                    raise RuntimeError(f"{sequence} would write to a block that others read")
        self.swapping.check_integrity(sequences)
        if self.states is not None:
            self.states.check_integrity(sequences)
