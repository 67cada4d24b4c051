"""KVCacheManager: which blocks each request holds, what of its prefix is cached, and whether it may come in."""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from vllm_lite.engine.block_pool import BlockPool
from vllm_lite.engine.block_table import BlockTable
from vllm_lite.engine.prefix_hash import PrefixHasher
from vllm_lite.engine.request import Request


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
    """Cached blocks that begin a sequence."""

    block_ids: list[int]
    num_tokens: int


NO_HIT = PrefixHit([], 0)


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
    """Plans the device tier for one attention group. It decides ids; the worker's CacheEngine moves bytes."""

    def __init__(self, pool: BlockPool, block_size: int, hasher: PrefixHasher, watermark: float = 0.01) -> None:
        self.pool = pool
        self.block_size = block_size
        self.hasher = hasher
        self.watermark_blocks = int(watermark * pool.num_blocks)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that can always be admitted again, however often it is preempted."""
        return (self.pool.num_usable - self.watermark_blocks) * self.block_size

    def register(self, request: Request) -> None:
        """Give a new request its empty table and the root of its hash chain."""
        request.table = BlockTable(self.pool)
        if self.pool.enable_caching:
            request.hash_root = self.hasher.root()

    def find_cached(self, request: Request) -> PrefixHit:
        """The longest run of cached full blocks that begins the request. Takes no reference."""
        pool = self.pool
        if not pool.enable_caching:
            return NO_HIT
        self._hash_tokens(request, request.num_tokens)
        ids = []
        for block_hash in request.block_hashes:
            block_id = pool.get_cached_block(block_hash)
            if block_id is None:
                break
            ids.append(block_id)
        return PrefixHit(ids, len(ids) * self.block_size)

    def admission(self, request: Request, hit: PrefixHit) -> Admission:
        """May the request come in with all its tokens? Blocks of the hit count if they must leave the free list."""
        new = self._num_blocks(request.num_tokens) - len(hit.block_ids)
        revived = sum(map(self.pool.is_free, hit.block_ids))
        return admission(self.pool.num_usable, self.pool.num_free, new + revived, self.watermark_blocks)

    def admit(self, request: Request, hit: PrefixHit) -> list[int]:
        """Share the hit and allocate the rest for all the tokens the request has. Call after a verdict of OK.

        Returns the whole table. On a hit of the whole sequence every block is shared and the last token alone is
        computed again, for its logits; its KV is in the cache already and is not written.
        """
        table = _table(request)
        table.share(hit.block_ids)
        table.append(self._num_blocks(request.num_tokens) - len(hit.block_ids))
        request.num_cached = hit.num_tokens
        request.num_computed = min(hit.num_tokens, request.num_tokens - 1)
        request.num_hashed_blocks = len(hit.block_ids)
        request.num_slots = len(table.ids) * self.block_size
        return table.ids

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate until the table holds `num_tokens`: the new ids, or None and no change if too few are free."""
        table = _table(request)
        count = self._num_blocks(num_tokens) - len(table.ids)
        if count > self.pool.num_free:
            return None
        new = table.append(count)
        request.num_slots = len(table.ids) * self.block_size
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the blocks findable that the first `num_tokens` tokens fill. Those tokens must be final, and their KV
        written by a step that is sent before anything that reads it."""
        first, last = request.num_hashed_blocks, num_tokens // self.block_size
        if first >= last or not self.pool.enable_caching:
            return
        self._hash_tokens(request, num_tokens)
        ids, cache_block = _table(request).ids, self.pool.cache_block
        for index in range(first, last):
            cache_block(ids[index], request.block_hashes[index])
        request.num_hashed_blocks = last

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Give all blocks back. Cached ones stay findable until they are reused, unless told to `forget` them."""
        table = _table(request)
        if forget:
            self.pool.forget(table.ids)
        table.free()
        request.num_computed = request.num_cached = request.num_slots = request.num_hashed_blocks = 0

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise RuntimeError if the pool's books and the requests' tables disagree."""
        requests = list(requests)
        self.pool.check_integrity(_table(request).ids for request in requests)
        for request in requests:
            held = len(_table(request).ids)
            if request.num_slots != held * self.block_size or request.num_computed > request.num_slots:
                raise RuntimeError(f"{request} holds {held} blocks for {request.num_slots} slots")

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _hash_tokens(self, request: Request, num_tokens: int) -> None:
        if num_tokens // self.block_size > len(request.block_hashes):
            tokens = memoryview(request.tokens).cast("B")
            self.hasher.extend(request.block_hashes, request.hash_root, tokens, num_tokens)
            tokens.release()  # an exported array cannot grow


def _table(request: Request) -> BlockTable:
    if request.table is None:
        raise RuntimeError(f"{request} was never registered")
    return request.table
