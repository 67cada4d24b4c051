"""ThinkingSource: applies a grammar after the model's thinking, and a budget that ends the thinking.

An output is in one of three phases. MAYBE: its tokens so far are a prefix of the mark that opens thinking, and may also
belong to the grammar. OPEN: it thinks, until the closing mark is complete. INNER: it follows the grammar, whose source
has accepted tokens of this phase only. The state after each token is kept, so that tokens can be rolled back across
phases.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from vllm_lite.protocol.structured import Thinking
from vllm_lite.structured.sources.source import MaskSource, clear_bit, count_valid, fill_with, set_bit


class Phase(Enum):
    MAYBE = "may begin to think"
    OPEN = "thinks"
    INNER = "follows the grammar"


class ThinkingState(NamedTuple):
    """An output's phase. `matched` counts its last tokens that match the mark ending the phase; `thought` counts the
    tokens since thinking began; `inner` counts the tokens that the grammar has accepted."""

    phase: Phase
    matched: int = 0
    thought: int = 0
    inner: int = 0


class ThinkingSource:
    """A MaskSource around that of a grammar, or around none: then everything is allowed except what the budget
    forces."""

    def __init__(self, thinking: Thinking, inner: MaskSource | None, eos_ids: frozenset[int]) -> None:
        """`eos_ids` are masked during thinking if a grammar follows."""
        self._thinking = thinking
        self._inner: MaskSource = inner if inner is not None else _Anything()
        self._held_back = eos_ids if inner is not None else frozenset()
        self._borders = _borders(thinking.end)
        first = Phase.OPEN if thinking.is_open else Phase.MAYBE if thinking.begin else Phase.INNER
        self._states = [ThinkingState(first)]  # before the output, and after each token

    @property
    def _forced_end(self) -> tuple[int, ...]:
        """The remaining tokens of the closing mark, once the budget is spent."""
        state, budget = self._states[-1], self._thinking.budget
        is_spent = state.phase is Phase.OPEN and budget is not None and state.thought >= budget
        return self._thinking.end[state.matched :] if is_spent else ()

    def accept(self, token: int) -> bool:
        """As MaskSource.accept. Raises the errors of the grammar's source."""
        state = self._states[-1]
        match state.phase:
            case Phase.MAYBE:
                following = self._accept_maybe(state, token)
            case Phase.OPEN:
                following = self._accept_open(state, token)
            case Phase.INNER:
                following = state._replace(inner=state.inner + 1) if self._inner.accept(token) else None
        if following is None:
            return False
        self._states.append(following)
        return True

    def _accept_maybe(self, state: ThinkingState, token: int) -> ThinkingState | None:
        begin, matched = self._thinking.begin, state.matched
        if token == begin[matched]:
            return ThinkingState(Phase.OPEN) if matched + 1 == len(begin) else ThinkingState(Phase.MAYBE, matched + 1)
        if self._feed((*begin[:matched], token)):
            return ThinkingState(Phase.INNER, inner=matched + 1)
        return None

    def _feed(self, tokens: Sequence[int]) -> bool:
        """Let the grammar accept all of these tokens, or none."""
        for place, token in enumerate(tokens):
            if not self._inner.accept(token):
                self._inner.rollback(place)
                return False
        return True

    def _accept_open(self, state: ThinkingState, token: int) -> ThinkingState | None:
        end, matched, forced = self._thinking.end, state.matched, self._forced_end
        if token != end[matched] and (forced or token in self._held_back):
            return None
        while matched and end[matched] != token:
            matched = self._borders[matched - 1]
        matched += end[matched] == token
        return (
            ThinkingState(Phase.INNER) if matched == len(end) else ThinkingState(Phase.OPEN, matched, state.thought + 1)
        )

    def rollback(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            left = self._states.pop()
            if surplus := left.inner - self._states[-1].inner:
                self._inner.rollback(surplus)

    def fill_bitmask(self, bitmask: Any) -> None:
        match (state := self._states[-1]).phase:
            case Phase.MAYBE:
                begun = self._thinking.begin[: state.matched]
                if self._feed(begun):
                    self._inner.fill_bitmask(bitmask)
                    self._inner.rollback(len(begun))
                else:
                    bitmask[:] = 0
                set_bit(bitmask, self._thinking.begin[state.matched])
            case Phase.OPEN:
                following = self._thinking.end[state.matched]
                if self._forced_end:
                    fill_with(bitmask, (following,))
                    return
                for token in self._held_back - {following}:
                    clear_bit(bitmask, token)
            case Phase.INNER:
                self._inner.fill_bitmask(bitmask)

    def forced_tokens(self) -> list[int]:
        if self._states[-1].phase is Phase.INNER:
            return self._inner.forced_tokens()
        return list(self._forced_end)

    def num_valid(self, tokens: Sequence[int]) -> int:
        return count_valid(self, tokens)


class _Anything:
    """The source of an output without a grammar."""

    def accept(self, _token: int) -> bool:
        return True

    def rollback(self, _num_tokens: int) -> None:
        pass

    def fill_bitmask(self, _bitmask: Any) -> None:
        pass

    def forced_tokens(self) -> list[int]:
        return []

    def num_valid(self, tokens: Sequence[int]) -> int:
        return len(tokens)


def _borders(mark: Sequence[int]) -> list[int]:
    """For each prefix of `mark`, the length of its longest proper suffix that is also a prefix of `mark` (KMP)."""
    borders = [0] * len(mark)
    length = 0
    for place in range(1, len(mark)):
        while length and mark[place] != mark[length]:
            length = borders[length - 1]
        length += mark[place] == mark[length]
        borders[place] = length
    return borders
