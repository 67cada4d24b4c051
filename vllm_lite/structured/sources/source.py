"""The interface of mask sources, and operations on bitmasks: uint32 arrays with one bit per token."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

ALL_BITS = 0xFFFFFFFF


class MaskSource(Protocol):
    """Follows the output of one sequence. Its state must depend on sampling params and accepted tokens alone."""

    def accept(self, token: int, /) -> bool:
        """Advance by one generated token. Returns False, and changes nothing, if the token is not allowed here."""
        ...

    def rollback(self, num_tokens: int, /) -> None:
        """Take back the last `num_tokens` accepted tokens."""
        ...

    def fill_bitmask(self, bitmask: Any, /) -> None:
        """Clear the bits of the tokens that are not allowed next.

        bitmask: uint32 [ceil(vocab / 32)], all bits set; token t has bit t % 32 of word t // 32.
        """
        ...

    def forced_tokens(self) -> list[int]:
        """The sequence of tokens that must come next; [] if there is a choice, or it is not known.

        They are drafted, so an error here only costs time.
        """
        ...

    def num_valid(self, tokens: Sequence[int], /) -> int:
        """Number of `tokens` that may follow, up to the first that is not allowed."""
        ...


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
