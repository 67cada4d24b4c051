"""KVCacheManager: which blocks each sequence holds, what of its prefix is cached and where, and whether it may come in.

It decides ids and writes down what has to be copied (`take_block_ops`); the worker's CacheEngine moves the bytes, in
that order, before the forward pass of the same step. Hence a block may be given away as soon as its copy is written
down.

Invariants, checked by check_integrity(): a block's reference count is the number of table entries that name it (the
null block aside); free and referenced blocks are disjoint and make up the pool; a hashed block is full; the host's
pinned blocks are those of swapped sequences; nobody who waits holds device blocks.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from enum import Enum
from typing import NamedTuple

from vllm_lite.engine.block_pool import NULL_BLOCK, BlockPool
from vllm_lite.engine.block_table import BlockTable
from vllm_lite.engine.host_tier import HostTier
from vllm_lite.engine.kv_groups import KVGroup, blocks_held, common_hit, longest_sequence
from vllm_lite.engine.prefix_hash import PrefixHasher
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.step import BlockOp


class Verdict(Enum):
    OK = "fits now"
    LATER = "fits once others have left"
    NEVER = "does not fit into the whole pool"


class Admission(NamedTuple):
    """A verdict with the numbers behind it, all in blocks."""

    verdict: Verdict
    required: int
    free: int
    watermark: int
    total: int


class PrefixHit(NamedTuple):
    """Cached blocks that begin a sequence: per group, one global id for each; null where the window is past."""

    tables: list[list[int]]
    num_tokens: int


class Growth(NamedTuple):
    """What a sequence got: new block ids per group ([] if none), and shared blocks (group, index, id) replaced."""

    new_ids: list[list[int]]
    replaced: list[tuple[int, int, int]]


class KVStats:
    """Totals since the start, in blocks unless named otherwise."""

    __slots__ = ("copied", "demoted", "promoted", "swapped_in", "swapped_out")

    def __init__(self) -> None:
        self.copied = self.demoted = self.promoted = self.swapped_in = self.swapped_out = 0


def admission(total: int, free: int, required: int, watermark: int) -> Admission:
    """Whether `required` blocks may be taken from a pool of `total` of which `free` are free.

    The watermark keeps room for running sequences to grow; it holds for admission only.
    """
    if total - required < watermark:
        verdict = Verdict.NEVER
    elif free - required >= watermark:
        verdict = Verdict.OK
    else:
        verdict = Verdict.LATER
    return Admission(verdict, required, free, watermark, total)


class KVCacheManager:
    """Without groups (a model that keeps no KV) every sequence fits and every table is empty."""

    def __init__(
        self,
        pool: BlockPool,
        groups: Seq[KVGroup],
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
        self.block_size = hasher.block_size
        self.watermark_blocks = int(watermark * pool.num_blocks)
        self.stats = KVStats()
        self.on_store: Callable[[Sequence, KVGroup, int], None] | None = None
        """Told of every logical block of a sequence that has become findable on the device."""
        self._max_swap_blocks = max_swap_blocks_per_step
        self._swap_budget = max_swap_blocks_per_step
        self._block_ops: list[tuple[int, int, int]] = []
        pool.on_evict = self._demote if host is not None else None

    def max_tokens(self, limit: int, chunk: int) -> int:
        """The longest sequence, at most `limit`, that can always come in again, however often it is preempted."""
        return longest_sequence(self.groups, self.pool.num_usable - self.watermark_blocks, limit, chunk)

    def num_blocks(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at once."""
        return blocks_held(self.groups, num_tokens, chunk)

    def begin_step(self) -> None:
        """A step is about to be made: it may move blocks again."""
        self._swap_budget = self._max_swap_blocks

    def take_block_ops(self) -> list[tuple[int, int, int]]:
        """The block program of the step that has been made; the next one starts empty."""
        ops, self._block_ops = self._block_ops, []
        return ops

    # ---- coming in

    def register(self, sequence: Sequence, extra_keys: Seq[str] = ()) -> None:
        """Give a new sequence its empty tables and the root of its hash chain."""
        sequence.tables = [BlockTable(self.pool) for _ in self.groups]
        if self.pool.enable_caching:
            sequence.hash_root = self.hasher.root(extra_keys)
        if not self.groups:
            sequence.num_slots = sequence.max_len

    def find_cached(self, sequence: Sequence) -> PrefixHit:
        """The longest cached beginning of `sequence` on either tier. Takes no reference."""
        if not self.pool.enable_caching or not self.groups or sequence.unscored:
            return PrefixHit([[] for _ in self.groups], 0)
        self._hash_tokens(sequence, sequence.num_tokens)
        hashes, found = sequence.block_hashes, dict[tuple[int, int], int | None]()
        promotions = self._swap_budget

        def find(group: KVGroup, index: int) -> int | None:
            nonlocal promotions
            place = (group.index, index)
            if place not in found:
                found[place] = block_id = self._find(hashes[index] + group.key, promotions > 0)
                promotions -= block_id is not None and block_id >= self.pool.num_blocks
            return found[place]

        length = common_hit(self.groups, len(hashes), sequence.num_tokens, find)
        position = min(length * self.block_size, sequence.num_tokens - 1)
        tables = []
        for group in self.groups:
            first = min(group.first_needed(position), length)
            needed = [find(group, index) for index in range(first, length)]
            tables.append([NULL_BLOCK] * first + [block_id for block_id in needed if block_id is not None])
        return PrefixHit(tables, length * self.block_size)

    def admission(self, sequence: Sequence, hit: PrefixHit, chunk: int) -> Admission:
        """May the sequence come in with all its tokens? Cached blocks cost nothing if somebody holds them anyway."""
        required = 0
        for group, table in zip(self.groups, hit.tables, strict=True):
            in_use = sum(0 < block_id < self.pool.num_blocks and not self.pool.is_free(block_id) for block_id in table)
            required += max(0, group.num_blocks(sequence.num_tokens, chunk) - in_use)
        return admission(self.pool.num_usable, self.pool.num_free, required, self.watermark_blocks)

    def admit(self, sequence: Sequence, hit: PrefixHit, num_tokens: int) -> None:
        """Share the hit, and allocate for all the tokens the sequence has; in a window for the first `num_tokens`.

        Call after a verdict of OK. On a hit of the whole sequence every block is shared and the last token alone is
        computed again, for its logits; its KV is in the cache already and is not written.
        """
        position = min(hit.num_tokens, sequence.num_tokens - 1)
        first_host_id = self.pool.num_blocks
        on_host = [block_id for ids in hit.tables for block_id in ids if block_id >= first_host_id]
        # Hold all of it before anything is allocated: what is evicted and demoted for the new blocks must not be this.
        self.pool.touch([block_id for ids in hit.tables for block_id in ids if block_id < first_host_id])
        if self.host is not None:
            self.host.pin(on_host)
        for group, table, ids in zip(self.groups, sequence.tables, hit.tables, strict=True):
            for index, block_id in enumerate(ids):
                known = block_id < first_host_id
                table.ids.append(block_id if known else self._promote(sequence, group, index, block_id))
            table.num_trimmed = min(group.first_needed(position), len(ids))
        if self.host is not None:
            self.host.unpin(on_host)
        sequence.num_computed = position
        sequence.num_cached = hit.num_tokens
        sequence.num_hashed_blocks = hit.num_tokens // self.block_size
        self._extend(sequence, num_tokens)

    def _promote(self, sequence: Sequence, group: KVGroup, index: int, host_id: int) -> int:
        """A new device block that gets the content of a cached host block."""
        (block_id,) = self.pool.get_new_blocks(1)
        self._block_ops.append((BlockOp.SWAP_IN, host_id, block_id))
        self._cache(sequence, group, index, block_id)
        self._swap_budget -= 1
        self.stats.promoted += 1
        return block_id

    # ---- growing

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth | None:
        """Make room to compute up to `num_tokens`: new blocks, and copies of shared ones that would be written.

        Returns None, and changes nothing but for blocks out of the window, if too few are free.
        """
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if group.window is not None:
                table.trim(group.first_needed(sequence.num_computed))
        write_from = max(sequence.num_computed, sequence.num_cached)
        first_written = write_from // self.block_size
        shared = [
            group.index
            for group in self.groups
            if write_from < num_tokens and sequence.tables[group.index].is_shared(first_written)
        ]
        missing = [self._num_missing(table, num_tokens) for table in sequence.tables]
        if sum(missing) + len(shared) > self.pool.num_free:
            return None
        replaced = []
        for index in shared:
            src, dst = sequence.tables[index].copy_on_write(first_written)
            self._block_ops.append((BlockOp.COPY, src, dst))
            replaced.append((index, first_written, dst))
            self.stats.copied += 1
        new_ids = [table.append(count) for table, count in zip(sequence.tables, missing, strict=True)]
        self._set_slots(sequence)
        if write_from >= num_tokens:  # nothing is written yet, so a shared block is still to be copied
            sequence.num_slots = num_tokens
        return Growth(new_ids if any(new_ids) else [], replaced)

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        for group, table in zip(self.groups, sequence.tables, strict=True):
            end = sequence.num_tokens if group.window is None else num_tokens
            table.append(self._num_missing(table, end))
        self._set_slots(sequence)

    def _num_missing(self, table: BlockTable, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(table.ids))

    def _set_slots(self, sequence: Sequence) -> None:
        if sequence.tables:
            sequence.num_slots = min(len(table.ids) for table in sequence.tables) * self.block_size

    def cache_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the blocks findable that the first `num_tokens` tokens fill. Those tokens must be final, and their KV
        written by a step that is sent before anything that reads it."""
        first, last = sequence.num_hashed_blocks, num_tokens // self.block_size
        if first >= last or not self.pool.enable_caching:
            return
        self._hash_tokens(sequence, num_tokens)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for index in range(max(first, table.num_trimmed), last):
                if self.pool.blocks[table.ids[index]].block_hash is None:  # a fork's other holder may have been first
                    self._cache(sequence, group, index, table.ids[index])
        sequence.num_hashed_blocks = last

    # ---- sharing and leaving

    def can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """Whether the parent still holds all that computing the child's last token reads."""
        position = child.num_tokens - 1
        return parent.num_computed >= position and all(
            table.num_trimmed <= group.first_needed(position)
            for group, table in zip(self.groups, parent.tables, strict=True)
        )

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` shares the blocks of its tokens, which are the parent's first ones. Its last token is computed again,
        for its logits; whichever of the two writes to a shared block first gets a copy."""
        num_blocks = -(-child.num_tokens // self.block_size)
        child.tables = [table.fork(num_blocks) for table in parent.tables]
        for group, table in zip(self.groups, child.tables, strict=True):
            table.num_trimmed = min(parent.tables[group.index].num_trimmed, num_blocks)
        child.hash_root = parent.hash_root
        child.block_hashes = parent.block_hashes[: child.num_tokens // self.block_size]
        child.num_hashed_blocks = min(parent.num_hashed_blocks, len(child.block_hashes))
        child.num_computed = child.num_tokens - 1
        child.num_cached = min(parent.num_computed, child.num_tokens)
        child.num_slots = child.num_computed  # so that both come to grow() before they write
        parent.num_slots = min(parent.num_slots, max(parent.num_computed, parent.num_cached))

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Give all blocks back. Cached ones stay findable until they are reused, unless told to `forget` them."""
        for table in sequence.tables:
            if forget:
                self.pool.forget(table.ids)
            table.free()
        if forget and self.host is not None:
            hashes = sequence.block_hashes[: sequence.num_hashed_blocks]
            self.host.forget(block_hash + group.key for group in self.groups for block_hash in hashes)
        if sequence.host_ids is not None and self.host is not None:
            for ids in sequence.host_ids:
                self.host.unpin([block_id for block_id in ids if block_id != NULL_BLOCK])
            sequence.host_ids = None
        sequence.num_computed = sequence.num_cached = sequence.num_hashed_blocks = 0
        sequence.num_slots = 0 if self.groups else sequence.max_len

    # ---- swapping

    def swap_out(self, sequence: Sequence) -> bool:
        """Move what the sequence has computed to the host and take its device blocks. False, and nothing is changed,
        if the host has no room or the step has moved enough already."""
        if self.host is None:
            return False
        plan: list[tuple[KVGroup, int, bytes | None, int | None]] = []
        for group in self.groups:
            for index in self._needed(group, sequence):
                key = self._key(sequence, group, index)
                plan.append((group, index, key, self.host.find(key) if key else None))
        num_new = sum(found is None for *_, found in plan)
        pinned = [found for *_, found in plan if found is not None]
        revived = sum(self.host.pool.is_free(block_id - self.host.first_id) for block_id in pinned)
        if num_new > self._swap_budget or num_new + revived > self.host.pool.num_free:
            return False
        self.host.pin(pinned)
        new = iter(self.host.new_blocks([key for _, _, key, found in plan if found is None]))
        host_ids: list[list[int]] = [[NULL_BLOCK] * self._needed(group, sequence).start for group in self.groups]
        for group, index, _, found in plan:
            host_id = found
            if host_id is None:
                host_id = next(new)
                self._block_ops.append((BlockOp.SWAP_OUT, sequence.tables[group.index].ids[index], host_id))
            host_ids[group.index].append(host_id)
        self._swap_budget -= num_new
        self.stats.swapped_out += num_new
        for table in sequence.tables:
            table.free()
        sequence.host_ids = host_ids
        # A fork's last block may be full and shared while its last position is still to be computed: never written.
        held = -(-sequence.num_computed // self.block_size) * self.block_size
        sequence.num_cached = max(sequence.num_computed, min(sequence.num_cached, held))
        sequence.num_hashed_blocks = min(sequence.num_hashed_blocks, held // self.block_size)
        sequence.num_slots = 0
        return True

    def swap_in_admission(self, sequence: Sequence, chunk: int) -> Admission:
        """May a swapped sequence come back? OK also asks that this step has not moved enough blocks already."""
        required = self.num_blocks(sequence.num_tokens, chunk)
        verdict = admission(self.pool.num_usable, self.pool.num_free, required, self.watermark_blocks)
        moved = sum(len(ids) for ids in sequence.host_ids or ())
        if verdict.verdict is Verdict.OK and moved > self._swap_budget and self._swap_budget < self._max_swap_blocks:
            return verdict._replace(verdict=Verdict.LATER)
        return verdict

    def swap_in(self, sequence: Sequence, num_tokens: int) -> None:
        """Bring back what swap_out() moved, and make room for what comes next. Call after a verdict of OK."""
        if self.host is None or sequence.host_ids is None:
            raise RuntimeError(f"{sequence} is not swapped")
        found = self._still_on_device(sequence)
        for group, table, host_ids in zip(self.groups, sequence.tables, sequence.host_ids, strict=True):
            for index, host_id in enumerate(host_ids):
                block_id = found.get((group.index, index))
                if host_id == NULL_BLOCK:
                    table.num_trimmed += 1
                    block_id = NULL_BLOCK
                table.ids.append(self._load(sequence, group, index, host_id) if block_id is None else block_id)
            self.host.unpin([host_id for host_id in host_ids if host_id != NULL_BLOCK])
        sequence.host_ids = None
        self._extend(sequence, num_tokens)

    def _still_on_device(self, sequence: Sequence) -> dict[tuple[int, int], int]:
        """Blocks of a swapped sequence that need no loading, by (group, logical block); each is held from now on."""
        found = {}
        for group in self.groups:
            for index in self._needed(group, sequence):
                key = self._key(sequence, group, index)
                block_id = self.pool.get_cached_block(key) if key else None
                if block_id is not None:
                    found[group.index, index] = block_id
        self.pool.touch(list(found.values()))
        return found

    def _load(self, sequence: Sequence, group: KVGroup, index: int, host_id: int) -> int:
        """A new device block that gets what was swapped out."""
        (block_id,) = self.pool.get_new_blocks(1)
        self._block_ops.append((BlockOp.SWAP_IN, host_id, block_id))
        self._swap_budget -= 1
        self.stats.swapped_in += 1
        if index < sequence.num_hashed_blocks:
            self._cache(sequence, group, index, block_id)
        return block_id

    def _needed(self, group: KVGroup, sequence: Sequence) -> range:
        """Logical blocks that hold KV which later positions read."""
        last = -(-sequence.num_computed // self.block_size)
        return range(min(group.first_needed(sequence.num_computed), last), last)

    def _key(self, sequence: Sequence, group: KVGroup, index: int) -> bytes | None:
        return sequence.block_hashes[index] + group.key if index < sequence.num_hashed_blocks else None

    def _demote(self, block_id: int, key: bytes) -> None:
        """The device is about to reuse a cached block: keep its content on the host if there is room."""
        if self.host is None or self._swap_budget <= 0:
            return
        host_id = self.host.demote(key)
        if host_id is not None:
            self._block_ops.append((BlockOp.SWAP_OUT, block_id, host_id))
            self._swap_budget -= 1
            self.stats.demoted += 1

    # ---- inside

    def _cache(self, sequence: Sequence, group: KVGroup, index: int, block_id: int) -> None:
        self.pool.cache_block(block_id, sequence.block_hashes[index] + group.key)
        if self.on_store is not None:
            self.on_store(sequence, group, index)

    def _find(self, key: bytes, may_promote: bool) -> int | None:
        block_id = self.pool.get_cached_block(key)
        if block_id is None and self.host is not None and may_promote:
            return self.host.find(key)
        return block_id

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
        if self.host is not None:
            first = self.host.first_id
            pinned = [ids for sequence in sequences if sequence.host_ids for ids in sequence.host_ids]
            self.host.pool.check_integrity([[i - first for i in ids if i != NULL_BLOCK] for ids in pinned])
