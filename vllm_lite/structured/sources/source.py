"""The interface of mask sources, and operations on bitmasks: uint32 arrays with one bit per token."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

ALL_BITS = 0xFFFFFFFF


class MaskSource(Protocol):
    """The MaskSource of worker/sampling/masks.py, which documents the methods, without its array types."""

    def accept(self, token: int, /) -> bool: ...
    def rollback(self, num_tokens: int, /) -> None: ...
    def fill_bitmask(self, bitmask: Any, /) -> None: ...
    def forced_tokens(self) -> list[int]: ...
    def num_valid(self, tokens: Sequence[int], /) -> int: ...


def count_valid(source: MaskSource, tokens: Sequence[int]) -> int:
    """Count the leading tokens that `source` accepts in sequence; its state is restored."""
    accepted = 0
    while accepted < len(tokens) and source.accept(tokens[accepted]):
        accepted += 1
    source.rollback(accepted)
    return accepted


def fill_with(bitmask: Any, tokens: Iterable[int]) -> None:
    """Allow only these tokens. bitmask: uint32 [words]."""
    bitmask[:] = 0
    for token in tokens:
        set_bit(bitmask, token)


def set_bit(bitmask: Any, token: int) -> None:
    bitmask[token // 32] |= 1 << token % 32


def clear_bit(bitmask: Any, token: int) -> None:
    bitmask[token // 32] &= ALL_BITS ^ (1 << token % 32)
