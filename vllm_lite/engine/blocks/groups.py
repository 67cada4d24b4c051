"""KV groups: the layers that read the same tokens: all of them (full attention), or the last few (sliding window).

Each sequence has one block table per group. All groups allocate from one pool; a block belongs to one group at a time.
"""

from collections.abc import Callable, Sequence
from functools import partial


class KVGroup:
    """One KV group. `window` is the number of tokens that a query attends to, itself included; None: all."""

    __slots__ = ("block_size", "index", "key", "window")

    def __init__(self, index: int, block_size: int, window: int | None = None) -> None:
        self.index = index
        self.block_size = block_size
        self.window = window
        self.key = bytes((index,))  # appended to content hashes: blocks of different groups never match

    def first_needed(self, position: int) -> int:
        """First logical block that computing `position` or a later one reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def num_blocks(self, num_tokens: int, chunk: int) -> int:
        """Maximum number of blocks that a sequence of `num_tokens` holds at once, computed `chunk` tokens at a time."""
        whole = -(-num_tokens // self.block_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window - 1 + chunk) // self.block_size) + 1)

    def longest_hit(self, num_blocks: int, num_tokens: int, find: Callable[[int], int | None]) -> int:
        """Largest prefix length in blocks, at most `num_blocks`, with all blocks cached that later tokens read.

        `find(i)` returns the id of a block that caches logical block i, or None. `num_tokens` is the sequence's length;
        its last token is always computed again.
        """
        if self.window is None:
            return next((index for index in range(num_blocks) if find(index) is None), num_blocks)
        length = num_blocks
        while length > 0:  # from the right, since only the window's blocks count
            first = self.first_needed(min(length * self.block_size, num_tokens - 1))
            missing = next((index for index in range(length - 1, first - 1, -1) if find(index) is None), None)
            if missing is None:
                return length
            length = missing
        return 0


def make_groups(windows: Sequence[int | None], block_size: int) -> tuple[KVGroup, ...]:
    """One KV group per window; None is full attention."""
    return tuple(KVGroup(index, block_size, window) for index, window in enumerate(windows))


def blocks_held(groups: Sequence[KVGroup], num_tokens: int, chunk: int) -> int:
    """Maximum number of blocks that a sequence of `num_tokens` holds at once in all groups."""
    return sum(group.num_blocks(num_tokens, chunk) for group in groups)


def longest_sequence(groups: Sequence[KVGroup], room: int, limit: int, chunk: int) -> int:
    """Largest number of tokens, at most `limit`, of a sequence that holds no more than `room` blocks."""
    low, high = 0, limit
    while low < high:  # the number of blocks grows with the length
        middle = (low + high + 1) // 2
        if blocks_held(groups, middle, chunk) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def common_hit(
    groups: Sequence[KVGroup], num_blocks: int, num_tokens: int, find: Callable[[KVGroup, int], int | None]
) -> int:
    """Longest prefix, in blocks, from which every group can continue."""
    length, agreed = num_blocks, -1
    while length != agreed:  # a shorter prefix may move a window over a hole, so repeat until all groups agree
        agreed = length
        for group in groups:
            length = group.longest_hit(length, num_tokens, partial(find, group))
    return length
