"""GrammarSource: follows one output through its grammar, token by token.

llguidance raises nothing: a matcher that runs into its limits is in error from then on. Every call that can bring it
there is followed by a look, and an error becomes a GrammarError, which ends the request alone.
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
"""To follow its grammar a request may take TOKEN_CPU_S of processor time a token, and FREE_CPU_S more at a time: the
others of its steps wait as long. Usual grammars take microseconds a token; the limits of the library let one take
0.2 s."""

TOO_SLOW = (
    "the grammar takes too long to follow; one that is less ambiguous, or of fewer alternatives, is followed at once"
)


def compile_matcher(grammar: str, vocabulary: Vocabulary) -> Any:
    """Make the LLMatcher of a grammar; without the GIL, for up to some seconds. Raises GrammarError.

    Its first mask is computed here too, and is what all copies begin with: a grammar that runs into the limits does so
    mostly there, after up to 0.2 s that no step should wait for.
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

    The tokens that end an output are counted here and never given to the matcher: behind the first of them nothing
    else may come, and taking them back changes no state of the grammar.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._eos_ids = vocabulary.eos_ids
        self._num_ended = 0
        self._left_s = FREE_CPU_S

    def accept(self, token: int) -> bool:
        """As MaskSource.accept. Raises GrammarError where the grammar runs into its limits."""
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
        """As MaskSource.rollback."""
        num_ends = min(num_tokens, self._num_ended)
        self._num_ended -= num_ends
        if num_tokens > num_ends:
            self._matcher.rollback(num_tokens - num_ends)
            _check(self._matcher)

    def fill_bitmask(self, bitmask: Any) -> None:
        """As MaskSource.fill_bitmask. Raises GrammarError where the grammar runs into its limits."""
        if self._num_ended:
            fill_with(bitmask, self._eos_ids)
            return
        with self._limited():
            self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)

    def forced_tokens(self) -> list[int]:
        """As MaskSource.forced_tokens."""
        if self._num_ended or self._matcher.is_stopped():
            return []
        with self._limited():
            forced = self._matcher.compute_ff_tokens()
        return [int(token) for token in forced]

    def num_valid(self, tokens: Sequence[int]) -> int:
        """As MaskSource.num_valid."""
        return count_valid(self, tokens)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Run what may take long: it works in this thread alone, whose time does not depend on other processes."""
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
