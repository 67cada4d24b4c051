"""Tails: the tokens of a block before a mark, cached so that a prompt that diverges there continues inside the block.

The sequence that owns the block may write after the mark, but what is before it stays until the block is allocated to
another one. So tails are cached without a reference, and each sequence that finds one copies it.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any

from vllm_lite.engine.blocks.part import CachePart, PrefixHit
from vllm_lite.engine.blocks.pool import BlockPool, PoolObserver
from vllm_lite.engine.sequence import NO_TAIL, Sequence
from vllm_lite.runtime.prefix_hash import PrefixHasher


class PromptTails:
    """Tails across all parts of the cache: computes their keys, publishes them, and extends prefix hits by them."""

    def __init__(self, parts: Many[CachePart[Any]], hasher: Callable[[], PrefixHasher]) -> None:
        """`hasher` returns the manager's PrefixHasher, which a recorder may replace."""
        self._parts = parts
        self._hasher = hasher
        self._are_kept = parts[0].pool.enable_caching and all(part.has_tails for part in parts)

    def begin(self, sequence: Sequence) -> None:
        """Start with no published tail of `sequence`."""
        marks = sequence.request.marks
        sequence.next_tail = marks[0] if marks and self._are_kept else NO_TAIL

    def are_hashed(self, sequence: Sequence) -> bool:
        """Whether longer() would need no new key."""
        return sequence.next_tail == NO_TAIL or sequence.tail_keys is not None

    def longer(self, sequence: Sequence, hit: PrefixHit) -> PrefixHit:
        """Extend `hit` to the last mark in the next block whose tail is cached, if the hit is all on the device."""
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
        """Cache the tails before those marks that the first `num_tokens` tokens have reached."""
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
        """Remove the tails of `sequence` from the cache, and equal ones of others."""
        if self._are_kept:
            keys = self._keys(sequence).values()
            for part in self._parts:
                part.forget_tails(keys)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError if a sequence has keys, or is about to publish a tail, at a position other than a mark."""
        for sequence in sequences:
            marks = sequence.request.marks
            if sequence.next_tail != NO_TAIL and not (self._are_kept and sequence.next_tail in marks):
                raise RuntimeError(f"{sequence} would publish a tail at {sequence.next_tail}; its marks are {marks}")
            if sequence.tail_keys is not None and tuple(sequence.tail_keys) != marks:
                raise RuntimeError(f"{sequence} has keys of tails at {tuple(sequence.tail_keys)}, not at {marks}")

    def _keys(self, sequence: Sequence) -> dict[int, bytes]:
        """Tail keys of all marks, computed once: a trace records them with the decision that first needed them."""
        if sequence.tail_keys is None:
            sequence.hash_blocks(self._hasher(), sequence.num_prompt)
            sequence.tail_keys = {mark: self._key(sequence, mark) for mark in sequence.request.marks}
        return sequence.tail_keys

    def _key(self, sequence: Sequence, mark: int) -> bytes:
        """Key of the tokens between the start of the block of `mark` and `mark`."""
        hasher = self._hasher()
        number = mark // hasher.block_size
        parent = sequence.block_hashes[number - 1] if number else sequence.hash_root
        tokens = sequence.tokens[number * hasher.block_size : mark].tobytes()
        return hasher.tail(parent, tokens, number, sequence.request.media)


class BlockTails(PoolObserver):
    """Index of the tails in one pool: at most one per block, the last one added."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._keys: dict[int, bytes] = {}
        self._ids: dict[bytes, int] = {}
        self._new: dict[bytes, int] = {}
        """Tails that the step being scheduled writes. Block ops of the same step would copy them too early."""
        pool.observers.append(self)

    def begin_step(self) -> None:
        """Index the tails of the previous step, which has been sent."""
        for key, block_id in self._new.items():
            self._drop(block_id)
            self._keys[block_id], self._ids[key] = key, block_id
        self._new.clear()

    def add(self, key: bytes, block_id: int) -> None:
        """Index `block_id` under `key` from the next step on."""
        self._new[key] = block_id

    def find(self, key: bytes) -> int | None:
        return self._ids.get(key)

    def is_new(self, key: bytes) -> bool:
        """Whether find() has it from the next step on."""
        return key in self._new

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._new.pop(key, None)
            if (block_id := self._ids.get(key)) is not None:
                self._drop(block_id)

    def allocated(self, ids: Many[int]) -> None:
        """Drop the tails of these blocks: their new owners will overwrite them."""
        if self._keys:
            for block_id in ids:
                self._drop(block_id)
        if self._new:
            taken = set(ids)
            self._new = {key: block_id for key, block_id in self._new.items() if block_id not in taken}

    def cleared(self) -> None:
        """Drop all tails."""
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
