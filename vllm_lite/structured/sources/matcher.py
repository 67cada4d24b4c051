"""GrammarSource: follows one output through its grammar, token by token.

llguidance raises no exceptions: a matcher that exceeds its limits is in an error state from then on. Every call that
can cause this is followed by a check, and an error becomes a GrammarError, which ends only the request.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llguidance import LLMatcher

from vllm_lite.errors import GrammarError
from vllm_lite.structured.limits import parser_limits
from vllm_lite.structured.sources.source import count_valid, fill_with
from vllm_lite.structured.sources.vocabulary import Vocabulary

MAX_SHOWN_CHARS = 300
TOKEN_CPU_S = 0.02
FREE_CPU_S = 0.1
"""CPU time that a request may spend on its grammar: FREE_CPU_S at first, and TOKEN_CPU_S more per token, up to that.
The other requests of its steps wait as long. Usual grammars take microseconds a token; the limits allow 0.2 s."""

TOO_SLOW = (
    "the grammar takes too long to follow; one that is less ambiguous, or of fewer alternatives, is followed at once"
)


def compile_matcher(grammar: str, vocabulary: Vocabulary) -> Any:
    """Make the LLMatcher of a grammar; takes up to some seconds, without the GIL. Raises GrammarError.

    The first mask is computed here too, for all copies: a grammar that exceeds the limits mostly does so there, after
    up to 0.2 s that no step should wait for.
    """
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits(grammar))
    _check(matcher)
    began_s = time.thread_time()
    matcher.compute_bitmask()
    _check(matcher)
    if time.thread_time() - began_s > FREE_CPU_S:
        raise GrammarError(TOO_SLOW)
    return matcher


class GrammarSource:
    """A MaskSource over one matcher, which it owns.

    EOS tokens are counted here and never given to the matcher: after the first, only EOS tokens may follow, and rolling
    them back does not change the matcher's state.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._eos_ids = vocabulary.eos_ids
        self._num_ended = 0
        self._left_s = FREE_CPU_S

    def accept(self, token: int) -> bool:
        """As MaskSource.accept. Raises GrammarError if the grammar exceeds its limits."""
        if token in self._eos_ids:
            may_end = self._num_ended > 0 or self._matcher.is_accepting()
            self._num_ended += may_end
            return bool(may_end)
        if self._num_ended:
            return False
        with self._limited():
            accepted = self._matcher.try_consume_tokens([token])
        self._left_s = min(self._left_s + TOKEN_CPU_S, FREE_CPU_S)
        return bool(accepted)

    def rollback(self, num_tokens: int) -> None:
        num_ends = min(num_tokens, self._num_ended)
        self._num_ended -= num_ends
        if num_tokens > num_ends:
            self._matcher.rollback(num_tokens - num_ends)
            _check(self._matcher)

    def fill_bitmask(self, bitmask: Any) -> None:
        if self._num_ended:
            fill_with(bitmask, self._eos_ids)
            return
        with self._limited():
            self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)

    def forced_tokens(self) -> list[int]:
        if self._num_ended or self._matcher.is_stopped():
            return []
        with self._limited():
            forced = self._matcher.compute_ff_tokens()
        return [int(token) for token in forced]

    def num_valid(self, tokens: Sequence[int]) -> int:
        return count_valid(self, tokens)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Charge the CPU time of the context to the request. The matcher works in this thread alone, whose CPU time is
        independent of other processes."""
        began_s = time.thread_time()
        yield
        self._left_s -= time.thread_time() - began_s
        _check(self._matcher)
        if self._left_s < 0:
            raise GrammarError(TOO_SLOW)


def _check(matcher: Any) -> None:
    if matcher.is_error():
        reason = str(matcher.get_error()).strip().splitlines() or ["no reason is given"]
        raise GrammarError(f"the grammar cannot be followed: {reason[0][:MAX_SHOWN_CHARS]}")
