"""KVCacheManager: prefix lookup, admission and allocation for each sequence, over all parts of the cache.

It composes the parts (see `part.py`) without naming any, and owns what they share: the hashes of a sequence's tokens,
and the numbers of its computed, cached and hashed tokens. Parts choose ids and record block ops (`take_ops`); the
workers move the bytes, in that order, before the forward pass of the same step.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any, TypeVar

from vllm_lite.engine.blocks.part import CachePart, Growth, Op, PrefixHit, StoringPart
from vllm_lite.engine.blocks.tails import PromptTails
from vllm_lite.engine.blocks.verdict import Admission, Lookup, Verdict
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.api import PrefixCacheReset
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import Entry, ModelOutput
from vllm_lite.runtime.prefix_hash import PrefixHasher

_RETIRED = "computed before the cache was reset"

Part = TypeVar("Part")


class KVCacheManager:
    """Owns the parts of the cache. `counters` are the engine's, shared by all its objects."""

    def __init__(self, parts: Many[CachePart[Any]], hasher: PrefixHasher, counters: Stats) -> None:
        """The first part counts the blocks of admissions."""
        self.parts = tuple(parts)
        self.hasher = hasher
        self.block_size = hasher.block_size
        self.counters = counters
        self._first, *self._others = self.parts
        self.pool = self._first.pool
        """Pool whose blocks an admission counts."""
        self.watermark_blocks = self._first.watermark_blocks
        self.is_caching = self.pool.enable_caching
        self._first.is_asked_by_blocks = any(part.acts_by_blocks for part in self._others)
        self.wants_marks = any(part.wants_marks for part in self.parts)
        self._keeps = any(part.keeps for part in self.parts)
        self._tails = PromptTails(self.parts, lambda: self.hasher)

    def part(self, kind: type[Part]) -> Part:
        """The part of class `kind`, for its observers. Raises LookupError if there is none."""
        if (found := self.optional_part(kind)) is None:
            raise LookupError(f"the cache has no {kind.__name__}")
        return found

    def optional_part(self, kind: type[Part]) -> Part | None:
        """The part of class `kind`, if there is one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def storing(self) -> StoringPart:
        """The part that keeps contents on a disk tier. Raises LookupError if there is none."""
        for part in self.parts:
            if (found := part.storing) is not None:
                return found
        raise LookupError("the cache keeps nothing beside memory")

    # ---- the step

    def begin_step(self) -> None:
        """Start the next step: blocks that the previous step moved or freed become available."""
        for part in self.parts:
            part.begin_step()

    @property
    def is_moving(self) -> bool:
        """Whether the step being scheduled moves or copies anything."""
        for part in self.parts:  # noqa: SIM110  # called in every step: a generator expression is slower
            if part.is_moving:
                return True
        return False

    @property
    def is_freeing(self) -> bool:
        """Whether the next step can use something that this one cannot, even if nothing is computed in between."""
        return any(part.is_freeing for part in self.parts)

    @property
    def is_aside(self) -> bool:
        """Whether workers compute something beside the steps, which slows the steps down."""
        for part in self._others:  # noqa: SIM110  # as above
            if part.is_aside:
                return True
        return False

    def take_ops(self) -> list[Op]:
        """Take the block ops of the step being scheduled; the next step starts without any."""
        ops = self._first.take_ops()
        for part in self._others:
            ops += part.take_ops()
        return ops

    def take_entries(self) -> list[Entry]:
        """Take the parts' entries for the workers, which are sent with the step being scheduled."""
        return [entry for part in self._others for entry in part.take_entries()]

    # ---- sizes

    def max_tokens(self, limit: int, chunk: int) -> int:
        """Length of the longest sequence, at most `limit`, that can be admitted again after any preemption."""
        return min(part.max_tokens(limit, chunk) for part in self.parts)

    def num_blocks(self, num_tokens: int, chunk: int) -> int:
        """Maximum number of blocks that a sequence of `num_tokens` holds at once, computed `chunk` tokens at a time."""
        return self._first.num_blocks(num_tokens, chunk)

    def num_full_blocks(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` fill, in all groups."""
        return self._first.num_full_blocks(num_tokens)

    def num_moved(self, num_tokens: int) -> int:
        """Cost of moving all parts' contents of `num_tokens`, in KV blocks."""
        return sum(part.num_moved(num_tokens) for part in self.parts)

    # ---- lookup

    def register(self, sequence: Sequence, extra_keys: Many[str] = ()) -> None:
        """Prepare a new sequence, which holds nothing yet, and set the root of its hash chain."""
        for part in self.parts:
            part.register(sequence)
        if self.is_caching:
            sequence.hash_root = self.hasher.root(extra_keys)
        self._tails.begin(sequence)

    def register_fork(self, parent: Sequence, child: Sequence) -> None:
        """Register `child` with the hash root of `parent`, whose blocks it cannot share now but may find cached."""
        self.register(child)
        child.hash_root = parent.hash_root

    def is_hashed(self, sequence: Sequence) -> bool:
        """Whether find_cached() needs no new digest: it is then fast, and adds none that a trace would lack."""
        are_blocks = len(sequence.block_hashes) >= sequence.num_tokens // self.block_size
        return are_blocks and self._tails.are_hashed(sequence)

    def find_cached(self, sequence: Sequence) -> PrefixHit:
        """Longest cached prefix of `sequence` on all tiers. Takes no references."""
        if not self.is_caching or not self._keeps or sequence.unscored:
            return self.no_hit()
        sequence.hash_blocks(self.hasher, sequence.num_tokens)
        searches = [part.search(sequence) for part in self.parts]
        length = reach = searches[0].longest(len(sequence.block_hashes))
        num_agreed, turn = 1, 0
        while num_agreed < len(searches):  # until all parts agree on one length
            turn = (turn + 1) % len(searches)
            found = searches[turn].longest(length)
            num_agreed, length = num_agreed + 1 if found == length else 1, found
        found_by = tuple(search.find(length) for search in searches)
        return self._tails.longer(sequence, PrefixHit(length * self.block_size, found_by, reach * self.block_size))

    def no_hit(self) -> PrefixHit:
        """The hit of a sequence without a cached prefix."""
        return PrefixHit(0, tuple(part.nothing() for part in self.parts), 0)

    def num_on_host(self, hit: PrefixHit) -> int | None:
        """Number of tokens of a hit that have to be moved from the host tier; None: there is no host tier."""
        return self._first.num_on_host(hit.found[0])

    def remember(self, sequence: Sequence, hit: PrefixHit, admission: Admission) -> None:
        """Store the lookup of a sequence that is not admitted."""
        keys = self._first.next_keys(sequence, hit.num_tokens // self.block_size)
        num_cached = min(hit.num_tokens, sequence.num_tokens - 1)
        sequence.lookup = Lookup(admission, num_cached, keys, self._first.supply)

    def recall(self, sequence: Sequence) -> Lookup | None:
        """The stored lookup of a waiting sequence, if a new one would find no longer prefix. Its verdict is set to OK
        if enough blocks may be free by now."""
        known = sequence.lookup
        if known is None or self._first.has_any(known.next_keys):
            return None
        _, required, free, watermark, *_ = known.admission
        gained = self._first.supply - known.supply
        if free + gained - required < watermark:
            return known
        return known._replace(admission=known.admission._replace(verdict=Verdict.OK))

    # ---- admission

    def admission(self, sequence: Sequence, hit: PrefixHit, chunk: int) -> Admission:
        """Whether the sequence may be admitted with all its tokens."""
        result = self._first.admission(sequence, hit.found[0], chunk)
        for part, found in zip(self._others, hit.found[1:], strict=True):
            result = result.unless(part.admission(sequence, found, chunk))
        return result

    def may_admit(self, sequence: Sequence, hit: PrefixHit, num_tokens: int, *, in_parts: bool = True) -> bool:
        """Whether this step may move the blocks that admit() takes; call it after a verdict of OK. If not, the sequence
        holds nothing yet: blocks that it evicts are being demoted, or a tier is loading its prefix."""
        by_part = zip(self.parts, hit.found, strict=True)
        return all(part.may_admit(sequence, found, num_tokens, in_parts=in_parts) for part, found in by_part)

    def admit(self, sequence: Sequence, hit: PrefixHit, num_tokens: int) -> bool:
        """Share the blocks of the hit, and allocate for all tokens of the sequence; in a window for `num_tokens`.

        Call it after may_admit() for as many tokens or more. On a hit of the whole sequence all blocks are shared, and
        only the last token is computed again, for its logits; its KV is not written. False: one step may not move all
        of the hit from the host, so the sequence is parked and swap_in() continues.
        """
        by_part = list(zip(self.parts, hit.found, strict=True))
        sequence.lookup = None
        sequence.num_computed = min(hit.num_tokens, sequence.num_tokens - 1)
        sequence.num_cached = hit.num_tokens
        sequence.num_hashed_blocks = hit.num_tokens // self.block_size
        are_in = [part.admit(sequence, hit, found, num_tokens) for part, found in by_part]
        return all(are_in)

    def note_admission(self, hit: PrefixHit) -> list[tuple[str, dict[str, int]]]:
        """Update counters for a sequence that was admitted, or parked, with this hit. Returns the decisions to report,
        with their numbers."""
        by_part = zip(self.parts, hit.found, strict=True)
        return [noted for part, found in by_part for noted in part.note_admission(hit, found)]

    def arrival_entries(self, sequence: Sequence) -> list[Entry]:
        """Entries that the workers need for an admitted sequence, beside its blocks."""
        return [entry for part in self.parts for entry in part.arrival_entries(sequence)]

    # ---- growing

    def reachable(self, sequence: Sequence, start: int, count: int) -> int:
        """Number of the `count` tokens from `start` on that this step can compute; reserves what they need for it."""
        for part in self._others:
            count = part.reachable(sequence, start, count)
        return count

    def take_result(self, result: ModelOutput) -> None:
        """Let the parts read their fields of a step's result."""
        for part in self._others:
            part.take_result(result)

    def most_uncut(self, sequences: Iterable[Sequence]) -> int:
        """Maximum number of tokens that any of `sequences` must compute in one step; 0: all can be cut anywhere."""
        return max((part.uncut(each) for each in sequences for part in self._others), default=0)

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth | None:
        """Make room to compute up to `num_tokens`. None: too few blocks are free; only blocks that have left the window
        are released then."""
        growth = self._first.grow(sequence, num_tokens)
        if growth is not None:
            for part in self._others:
                more = part.grow(sequence, num_tokens)
                growth = growth if more is None else growth._replace(entries=[*growth.entries, *more.entries])
        return growth

    def most_drafts(self, sequence: Sequence, count: int) -> int:
        """Number of drafts, at most `count`, that a step may schedule after position `num_computed`."""
        for part in self.parts:
            count = part.most_drafts(sequence, count)
        return count

    def cache_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Cache the blocks that the first `num_tokens` tokens fill. These tokens must be final, and the step that
        writes their KV must be sent before any step that reads it."""
        self._tails.publish(sequence, num_tokens)
        first, last = sequence.num_hashed_blocks, num_tokens // self.block_size
        if first >= last or not self.is_caching:
            return
        sequence.hash_blocks(self.hasher, num_tokens)
        for part in self.parts:
            part.publish(sequence, first, last)
        sequence.num_hashed_blocks = last

    # ---- sharing and leaving

    def can_fork(self, parent: Sequence, child: Sequence, num_scheduled: int = 0) -> bool:
        """Whether the parent still holds everything that computing the child's last token reads. The step being
        scheduled computes `num_scheduled` tokens of the parent."""
        position = child.num_tokens - 1
        return parent.num_computed >= position and all(
            part.can_fork(parent, position, num_scheduled) for part in self.parts
        )

    def fork(self, parent: Sequence, child: Sequence, num_scheduled: int = 0) -> list[Entry]:
        """Let `child` share the parent's first blocks, as many as its tokens need. Its last token is computed again,
        for its logits. Returns entries for the workers that concern the parent."""
        child.hash_root = parent.hash_root
        child.block_hashes = parent.block_hashes[: child.num_tokens // self.block_size]
        child.num_hashed_blocks = min(parent.num_hashed_blocks, len(child.block_hashes))
        child.num_computed = child.num_tokens - 1
        child.num_cached = min(parent.num_surely_computed, child.num_tokens)
        return [entry for part in self.parts for entry in part.fork(parent, child, num_scheduled)]

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Release everything. Cached blocks stay findable until they are reused, or with `forget` are dropped now."""
        if forget:
            self._tails.forget(sequence)
        for part in self.parts:
            part.release(sequence, forget=forget)
        sequence.num_computed = sequence.num_cached = sequence.num_hashed_blocks = 0
        self._tails.begin(sequence)

    # ---- swapping

    def num_stored(self, sequence: Sequence) -> int:
        """Number of tokens that could be loaded from a disk tier if the sequence were released now."""
        return max(part.num_stored(sequence) for part in self.parts)

    def swap_out(self, sequence: Sequence) -> bool:
        """Begin to move all that the sequence holds to the host. Blocks beyond the step's limit stay on the device
        until they are reclaimed. False: nothing has changed, because the host has no room, a part cannot be swapped,
        or the step has reached its limit."""
        if not all(part.may_swap_out(sequence) for part in self.parts) or not self._first.swap_out(sequence):
            return False
        end = -(-sequence.num_computed // self.block_size)
        # A fork's last block may be full and shared before its last position is computed: that KV is never written.
        sequence.num_cached = max(sequence.num_computed, min(sequence.num_cached, end * self.block_size))
        sequence.num_hashed_blocks = min(sequence.num_hashed_blocks, end)
        for part in self._others:
            part.swap_out(sequence)
        return True

    def reclaim(self, keep: Sequence | None = None) -> bool:
        """Free the device blocks of one parked sequence other than `keep`: move them to the host, or if that is not
        possible now, release the whole sequence, which is computed again. False: there is no such sequence."""
        parked = (each for part in self.parts for each in part.parked if each is not keep)
        sequence = next((each for each in parked if any(part.holds_device(each) for part in self.parts)), None)
        if sequence is None:
            return False
        have_moved = [part.push_out(sequence) for part in self.parts]
        if not any(have_moved):
            self.release(sequence)
            if sequence.status is Status.SWAPPED:
                sequence.status = Status.PREEMPTED
        return True

    def swap_in_admission(self, sequence: Sequence, chunk: int) -> Admission:
        """Whether a parked sequence may be admitted."""
        result = self._first.swap_in_admission(sequence, chunk)
        for part in self._others:
            result = result.unless(part.swap_in_admission(sequence, chunk))
        return result

    def swap_in(self, sequence: Sequence, num_tokens: int, *, in_parts: bool = True) -> bool:
        """Load the host blocks of a parked sequence, as many as the step may move, and make room for `num_tokens`. Call
        it after a verdict of OK. False: the sequence stays parked and the next step continues; unless `in_parts`,
        nothing was loaded."""
        return all(part.swap_in(sequence, num_tokens, in_parts=in_parts) for part in self.parts)

    # ---- forgetting

    def reset_cache(self, sequences: Iterable[Sequence], *, stored: bool = False) -> PrefixCacheReset:
        """Drop all cached contents in memory, and with `stored` also those on the disk tier. `sequences`, all the
        unfinished ones, keep what they hold."""
        num_blocks, num_host_blocks = self._forget_cached()
        for part in self.parts if stored else ():
            part.forget_stored()
        holders = [each for each in sequences if any(part.holds(each) for part in self.parts)]
        if self.is_caching:
            for sequence in holders:
                self._retire(sequence)
        return PrefixCacheReset(num_blocks, num_host_blocks, len(holders))

    def lose_contents(self, sequences: Iterable[Sequence]) -> None:
        """Empty the cache after the contents of all tiers were lost: `sequences`, all the unfinished ones, hold nothing
        any more, and block ops of the step being scheduled are dropped. Block hashes stay valid, since the tokens are
        the same."""
        for sequence in sequences:  # first: a release may add to the prefix cache
            self.release(sequence)
        self._forget_cached()
        for part in self.parts:
            part.drop_ops()

    def _forget_cached(self) -> tuple[int, int]:
        """Empty the index of every part. Returns the number of blocks that were cached on each tier."""
        num_blocks, num_host_blocks = zip(*[part.reset() for part in self.parts], strict=True)
        return sum(num_blocks), sum(num_host_blocks)

    def _retire(self, sequence: Sequence) -> None:
        """Give the sequence a hash chain of its own: blocks that it caches later, when it grows or is swapped, are
        found only by itself and its forks."""
        sequence.hash_root = self.hasher.root((sequence.hash_root.hex(), _RETIRED))
        sequence.block_hashes, sequence.tail_keys = [], None
        sequence.num_hashed_blocks = 0

    def measured(self, prefill_tokens_per_s: float, load_blocks_per_s: float) -> None:
        """Use these rates from now on; 0 means not known."""
        for part in self.parts:
            part.measured(prefill_tokens_per_s, load_blocks_per_s)

    # ---- reporting

    def count(self) -> None:
        """Update the gauges of all parts in `counters`."""
        for part in self.parts:
            part.count(self.counters)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError if an invariant of a part is broken."""
        sequences = list(sequences)
        for part in self.parts:
            part.check_integrity(sequences)
        self._tails.check_integrity(sequences)
