"""BlockPool: the physical KV blocks of one tier, their reference counts, the LRU free list, and the prefix-cache index.

A block is in one of these states: free (unhashed, in the free list), allocated (referenced), full and cached
(referenced, hashed), shared (several references), evictable (hashed, in the free list, found by hits until it is
reused). Allocation takes blocks from the head of the free list, freeing appends to its tail, a hit unlinks any.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice

from vllm_lite.errors import OutOfBlocks

NULL_BLOCK = 0
"""Id of the null block, which is never freed, cached or written by a real token. It fills holes in tables and is the
target of padding."""


class Block:
    """One physical block. `prev` and `next` are valid only while it is free; they are not cleared after that."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        cached = "" if self.block_hash is None else f", hash={self.block_hash.hex()[:8]}"
        return f"Block({self.block_id}, ref_count={self.ref_count}{cached})"


class FreeList:
    """A doubly linked list through the blocks themselves: O(1) at both ends and in the middle.

    BlockPool.touch and BlockPool.free unlink and link blocks in their own loops, where a call per block would cost as
    much as the rest of the loop.
    """

    __slots__ = ("head", "num_free", "tail")

    def __init__(self) -> None:
        self.head, self.tail = Block(-1), Block(-1)
        self.head.next, self.tail.prev = self.tail, self.head
        self.num_free = 0

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Append `blocks` in the given order."""
        tail = self.tail
        last = tail.prev
        for block in blocks:
            last.next, block.prev = block, last  # type: ignore[union-attr]
            last = block
        last.next, tail.prev = tail, last  # type: ignore[union-attr]
        self.num_free += len(blocks)

    def popleft_n(self, count: int) -> list[Block]:
        """Unlink and return the `count` blocks at the head. Raises OutOfBlocks and takes none if there are fewer."""
        if count > self.num_free:
            raise OutOfBlocks(f"Cannot get {count} free blocks from the pool: only {self.num_free} are free")
        taken = []
        head, block = self.head, self.head.next
        for _ in range(count):
            taken.append(block)
            block = block.next  # type: ignore[union-attr]
        head.next, block.prev = block, head  # type: ignore[union-attr]
        self.num_free -= count
        return taken  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Block]:
        block = self.head.next
        while block is not self.tail:
            yield block  # type: ignore[misc]  # only the two ends have no neighbour
            block = block.next  # type: ignore[union-attr]


class PoolObserver:
    """Observer of a pool's blocks. Subclasses override the events that they need."""

    def allocated(self, ids: Sequence[int]) -> None: ...

    def touched(self, ids: Sequence[int]) -> None: ...

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """A block left the prefix cache, because it is reused or was forgotten."""

    def cleared(self) -> None:
        """All blocks left the prefix cache."""


class BlockPool:
    """`num_blocks` blocks with ids 0 .. num_blocks - 1, of which 0 is the null block unless `has_null` is False.

    `on_evict([(block_id, block_hash), ...])`, least recently used first, is called before cached blocks are reused, so
    that their contents can be demoted to another tier.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True, *, has_null: bool = True) -> None:
        if has_null and num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_usable = num_blocks - 1 if has_null else num_blocks
        self.enable_caching = enable_caching
        self.observers: list[PoolObserver] = []
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.peak_used = 0
        self.num_revived = 0
        """Number of times that a free block was referenced again, since the start."""
        self.num_resets = 0
        """Number of times that the prefix cache was emptied."""
        self.num_cached = 0
        """Blocks in the prefix cache, referenced or evictable."""
        self.on_evict: Callable[[list[tuple[int, bytes]]], None] | None = None
        self._free = FreeList()
        self._null = NULL_BLOCK if has_null else -1
        self._free.append_n(self.blocks[num_blocks - self.num_usable :])
        # Hash -> block, or {id: block} once the same content has been computed twice: by two requests at the same
        # time, or as generated text that equals cached text. Tables are append-only, so duplicates are never merged;
        # LRU reclaims them.
        self.cached: dict[bytes, Block | dict[int, Block]] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, evictable cached ones included."""
        return self._free.num_free

    @property
    def num_used(self) -> int:
        return self.num_usable - self._free.num_free

    def get_new_blocks(self, count: int) -> list[int]:
        """Allocate `count` blocks, each with one reference. Raises OutOfBlocks and takes none if too few are free."""
        blocks = self._free.popleft_n(count)
        ids, evicted = [], []
        for block in blocks:
            if block.block_hash is not None:
                evicted.append((block.block_id, self._unindex(block)))
            block.ref_count = 1
            ids.append(block.block_id)
        if evicted and self.on_evict is not None:
            self.on_evict(evicted)
        used = self.num_usable - self._free.num_free
        if used > self.peak_used:
            self.peak_used = used
        for observer in self.observers:
            observer.allocated(ids)
        return ids

    def peek(self, count: int, spared: Container[int] = ()) -> list[Block]:
        """The `count` blocks that get_new_blocks() would take if the blocks `spared` were referenced; fewer if too few
        are free."""
        return list(islice((block for block in self._free if block.block_id not in spared), count))

    def would_lose(self, count: int, spared: Container[int]) -> dict[bytes, int]:
        """Hash -> block id of the contents that allocating `count` blocks would drop from the pool, the most recently
        used first; `spared` as for peek()."""
        lost: dict[bytes, int] = {}
        num_taken = Counter[bytes]()
        for block in reversed(self.peek(count, spared)):
            if (block_hash := block.block_hash) is not None:
                lost[block_hash] = block.block_id
                num_taken[block_hash] += 1
        return {key: block_id for key, block_id in lost.items() if num_taken[key] == self._num_copies(key)}

    def _num_copies(self, block_hash: bytes) -> int:
        entry = self.cached.get(block_hash)
        return len(entry) if isinstance(entry, dict) else int(entry is not None)

    def touch(self, ids: Sequence[int]) -> None:
        """Add one reference to each block; an evictable one leaves the free list. The null block is skipped.

        Raises ValueError at an unknown id; the blocks before it have been touched.
        """
        blocks, free, null = self.blocks, self._free, self._null
        num_revived = 0
        try:
            for block_id in ids:
                if block_id < 0:  # a list would count it from its end
                    raise self._unknown(block_id)
                block = blocks[block_id]
                count = block.ref_count
                if count == 0:
                    if block_id == null:
                        continue
                    before, after = block.prev, block.next
                    before.next, after.prev = after, before  # type: ignore[union-attr]  # a free block has neighbours
                    num_revived += 1
                block.ref_count = count + 1
        except IndexError:
            raise self._unknown(block_id) from None
        finally:
            free.num_free -= num_revived
        self.num_revived += num_revived
        self.peak_used = max(self.peak_used, self.num_used)
        for observer in self.observers:
            observer.touched(ids)

    def free(self, ids: Iterable[int]) -> None:
        """Drop one reference of each block, in the given order, in which they will be evicted.

        A sequence passes its table reversed, so that its tail is evicted before its prefix. Raises ValueError at a
        free block or an unknown id; the blocks before it have been freed.
        """
        blocks, free, null = self.blocks, self._free, self._null
        tail = free.tail
        last = tail.prev
        num_freed = 0
        try:
            for block_id in ids:
                if block_id < 0:
                    raise self._unknown(block_id)
                block = blocks[block_id]
                count = block.ref_count - 1
                if count > 0:
                    block.ref_count = count
                elif count == 0:
                    block.ref_count = 0
                    last.next, block.prev = block, last  # type: ignore[union-attr]  # the ends have one neighbour each
                    last = block
                    num_freed += 1
                elif block_id != null:
                    raise ValueError(f"Double free! {block} is already freed.")
        except IndexError:
            raise self._unknown(block_id) from None
        finally:
            last.next, tail.prev = tail, last  # type: ignore[union-attr]
            free.num_free += num_freed

    def cache_block(self, block_id: int, block_hash: bytes) -> None:
        """Add a full block to the prefix cache, under the hash of its content and everything before it."""
        if not self.enable_caching or block_id == self._null:
            return
        block = self._block(block_id)
        if block.block_hash is not None:
            raise ValueError(f"{block} is cached already")
        block.block_hash = block_hash
        self.num_cached += 1
        entry = self.cached.get(block_hash)
        if entry is None:
            self.cached[block_hash] = block
        elif isinstance(entry, dict):
            entry[block_id] = block
        else:
            self.cached[block_hash] = {entry.block_id: entry, block_id: block}

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """Id of any block with this content, or None."""
        entry = self.cached.get(block_hash)
        if isinstance(entry, dict):
            return next(iter(entry))
        return None if entry is None else entry.block_id

    def is_free(self, block_id: int) -> bool:
        return self._block(block_id).ref_count == 0

    def forget(self, ids: Iterable[int]) -> None:
        """Remove blocks from the prefix cache, for example because their content turned out to be unusable."""
        for block_id in ids:
            block = self._block(block_id)
            if block.block_hash is not None:
                self._unindex(block)

    def forget_contents(self, hashes: Iterable[bytes]) -> None:
        """Remove all blocks with these hashes from the prefix cache, whichever sequence computed them."""
        for block_hash in hashes:
            while (block_id := self.get_cached_block(block_hash)) is not None:
                self.forget((block_id,))

    def reset_cache(self) -> int:
        """Empty the prefix cache, and return its number of blocks. Referenced blocks stay allocated."""
        num_cached, self.num_cached = self.num_cached, 0
        self.num_resets += 1
        for entry in self.cached.values():
            for block in entry.values() if isinstance(entry, dict) else (entry,):
                block.block_hash = None
        self.cached.clear()
        for observer in self.observers:
            observer.cleared()
        return num_cached

    def _unindex(self, block: Block) -> bytes:
        block_hash = block.block_hash
        if block_hash is None:
            raise RuntimeError(f"{block} is not cached")
        block.block_hash = None
        self.num_cached -= 1
        entry = self.cached[block_hash]
        if isinstance(entry, dict):
            del entry[block.block_id]
            if len(entry) == 1:
                self.cached[block_hash] = next(iter(entry.values()))
        else:
            del self.cached[block_hash]
        for observer in self.observers:
            observer.evicted(block.block_id, block_hash)
        return block_hash

    def _block(self, block_id: int) -> Block:
        if not 0 <= block_id < self.num_blocks:
            raise self._unknown(block_id)
        return self.blocks[block_id]

    def _unknown(self, block_id: int) -> ValueError:
        return ValueError(f"block {block_id} does not exist; the pool has blocks 0 to {self.num_blocks - 1}")

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise RuntimeError if an invariant is broken. `tables` are all block tables that hold references.

        The null block is neither free, referenced nor cached. Every other block is in the free list, once, if and only
        if it is unreferenced. The index holds exactly the hashed blocks, and num_cached counts them. A block's
        reference count is the number of table entries that name it.
        """
        listed = [block.block_id for block in self._free]
        usable = self.blocks[self.num_blocks - self.num_usable :]
        unreferenced = [block.block_id for block in usable if block.ref_count == 0]
        _require(len(listed) == self._free.num_free, "free list and its count differ")
        _require(sorted(listed) == unreferenced, "free list and unreferenced blocks differ")
        for null in self.blocks[: self.num_blocks - self.num_usable]:
            _require(null.ref_count == 0 and null.block_hash is None, f"the null block was used: {null}")
        num_indexed = 0
        for block_hash, entry in self.cached.items():
            found = list(entry.values()) if isinstance(entry, dict) else [entry]
            _require(not isinstance(entry, dict) or len(entry) > 1, "a duplicate entry with one block is left")
            _require(all(block.block_hash == block_hash for block in found), "the index names a block of other content")
            num_indexed += len(found)
        hashed = sum(block.block_hash is not None for block in self.blocks)
        _require(hashed == num_indexed, "a hashed block is missing from the index")
        _require(num_indexed == self.num_cached, "cached blocks and their count differ")
        if tables is not None:
            counts = [0] * self.num_blocks
            for table in tables:
                for block_id in table:
                    counts[block_id] += 1
            for block in usable:
                _require(block.ref_count == counts[block.block_id], f"{block} is in {counts[block.block_id]} tables")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"block pool is inconsistent: {what}")
