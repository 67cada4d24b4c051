"""Tails: tokens of a block before a mark, where prompts part, so that later ones go on in the middle of that block.

A block's tokens before the mark are never written again until the block is given to another sequence, though its own
may go on behind them. So they can be found until then without a reference, and sequences that find them get a copy.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any

from vllm_lite.engine.blocks.part import CachePart, PrefixHit
from vllm_lite.engine.blocks.pool import BlockPool, PoolObserver
from vllm_lite.engine.sequence import NO_TAIL, Sequence
from vllm_lite.runtime.prefix_hash import PrefixHasher


class PromptTails:
    """Tails of sequences in all parts of the cache: their keys, which are published, and which make a hit longer."""

    def __init__(self, parts: Many[CachePart[Any]], hasher: Callable[[], PrefixHasher]) -> None:
        """`hasher` returns that of the manager, which a recorder exchanges."""
        self._parts = parts
        self._hasher = hasher
        self._are_kept = parts[0].pool.enable_caching and all(part.has_tails for part in parts)

    def begin(self, sequence: Sequence) -> None:
        """None of its tails is published yet."""
        marks = sequence.request.marks
        sequence.next_tail = marks[0] if marks and self._are_kept else NO_TAIL

    def are_hashed(self, sequence: Sequence) -> bool:
        """Whether longer() computes no key."""
        return sequence.next_tail == NO_TAIL or sequence.tail_keys is not None

    def longer(self, sequence: Sequence, hit: PrefixHit) -> PrefixHit:
        """The hit, up to a mark of the prompt in the block behind it, if that is cached and the rest is on the
        device."""
        marks = sequence.request.marks
        if not (marks and self._are_kept):
            return hit
        keys = self._keys(sequence)
        if self._parts[0].num_on_host(hit.found[0]):
            return hit
        past = min(hit.num_tokens + self._hasher().block_size, sequence.num_tokens)
        for mark in reversed([mark for mark in marks if hit.num_tokens < mark < past]):
            if all(part.has_tail(keys[mark]) for part in self._parts):
                return PrefixHit(mark, hit.found, max(hit.reach, mark), keys[mark])
        return hit

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the tails before those marks that the first `num_tokens` have reached."""
        if num_tokens < sequence.next_tail:
            return
        marks, block_size = sequence.request.marks, self._hasher().block_size
        for mark in marks:
            if sequence.next_tail <= mark <= num_tokens and mark % block_size:
                key = self._keys(sequence)[mark]
                for part in self._parts:
                    part.publish_tail(sequence, mark // block_size, key)
        sequence.next_tail = min((mark for mark in marks if mark > num_tokens), default=NO_TAIL)

    def forget(self, sequence: Sequence) -> None:
        """Let its tails be found no more, nor equal ones of others."""
        if self._are_kept:
            keys = self._keys(sequence).values()
            for part in self._parts:
                part.forget_tails(keys)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError if a sequence has keys or goes on to publish at a place that is no mark of its prompt."""
        for sequence in sequences:
            marks = sequence.request.marks
            if sequence.next_tail != NO_TAIL and not (self._are_kept and sequence.next_tail in marks):
                raise RuntimeError(f"{sequence} would publish a tail at {sequence.next_tail}; its marks are {marks}")
            if sequence.tail_keys is not None and tuple(sequence.tail_keys) != marks:
                raise RuntimeError(f"{sequence} has keys of tails at {tuple(sequence.tail_keys)}, not at {marks}")

    def _keys(self, sequence: Sequence) -> dict[int, bytes]:
        """The keys of all its marks, computed once: a trace has them with what was decided then."""
        if sequence.tail_keys is None:
            sequence.hash_blocks(self._hasher(), sequence.num_prompt)
            sequence.tail_keys = {mark: self._key(sequence, mark) for mark in sequence.request.marks}
        return sequence.tail_keys

    def _key(self, sequence: Sequence, mark: int) -> bytes:
        """The key of the tokens from the last end of a block before `mark` on."""
        hasher = self._hasher()
        number = mark // hasher.block_size
        parent = sequence.block_hashes[number - 1] if number else sequence.hash_root
        tokens = sequence.tokens[number * hasher.block_size : mark].tobytes()
        return hasher.tail(parent, tokens, number, sequence.request.media)


class BlockTails(PoolObserver):
    """Tails in one pool, at most one for each block: the last that was added. Keys name the tokens up to the mark."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._keys: dict[int, bytes] = {}
        self._ids: dict[bytes, int] = {}
        self._new: dict[bytes, int] = {}
        """Tails that the step being scheduled writes: a copy made by the same step would come too early."""
        pool.observers.append(self)

    def begin_step(self) -> None:
        """Let others find the tails of the step before, which has been sent."""
        for key, block_id in self._new.items():
            self._drop(block_id)
            self._keys[block_id], self._ids[key] = key, block_id
        self._new.clear()

    def add(self, key: bytes, block_id: int) -> None:
        """From the next step on, `block_id` is found by `key`."""
        self._new[key] = block_id

    def find(self, key: bytes) -> int | None:
        return self._ids.get(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._new.pop(key, None)
            if (block_id := self._ids.get(key)) is not None:
                self._drop(block_id)

    def allocated(self, ids: Many[int]) -> None:
        """See PoolObserver: others will write to these blocks."""
        if self._keys:
            for block_id in ids:
                self._drop(block_id)
        if self._new:
            taken = set(ids)
            self._new = {key: block_id for key, block_id in self._new.items() if block_id not in taken}

    def cleared(self) -> None:
        """See PoolObserver."""
        self._keys.clear()
        self._ids.clear()
        self._new.clear()

    def _drop(self, block_id: int) -> None:
        key = self._keys.pop(block_id, None)
        if key is not None and self._ids.get(key) == block_id:
            del self._ids[key]

    def check_integrity(self) -> None:
        """Raise RuntimeError if a tail is found in a block that is not its own, or in the null block."""
        if any(self._keys.get(block_id) != key for key, block_id in self._ids.items()):
            raise RuntimeError("a tail is found in a block that has another one")
        if not all(0 < block_id < self._pool.num_blocks for block_id in (*self._keys, *self._new.values())):
            raise RuntimeError("a tail is in a block that does not exist")
