"""Suffix drafts: the tokens that followed the same tokens before, in the sequence itself or in recent answers.

As in SuffixDecoding (Oliaro et al., 2024, https://arxiv.org/abs/2411.04975), the longest suffix that occurred before is
looked up, its occurrences vote for the tokens after it, and a longer match drafts more. Instead of a tree, numpy
searches arrays of tokens: 16 thousand tokens take some 5 us, and a prompt needs no index.
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lite.protocol.step import Handle, SureDrafts
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.sampling.drafter import DraftBatch, Drafter
from vllm_lite.worker.sampling.match_odds import NOTHING_FOUND, MatchOdds, ScoredDrafts, paying

Int32s = NDArray[np.int32]

MAX_OCCURRENCES = 16
"""Maximum occurrences of a suffix that vote, the most recent ones: earlier ones are not worth the time."""
AT_FIRST = 3
"""Number of tokens compared one by one, each only where the last matched; few places are left after them."""
SEPARATOR = -1
"""Separator between two answers; it equals no token."""
MAX_ANSWER_TOKENS = 1 << 14
"""Maximum tokens of recent answers that are kept per group of requests."""
MAX_GROUPS = 64
"""Maximum groups of requests that share answers; the least recently used group is dropped."""


class SuffixDrafter(Drafter):
    """Drafts from the sequence's own tokens and from recent answers of requests with the same `group`."""

    def __init__(self, config: Speculation) -> None:
        self.longest = config.suffix_decoding_max_tree_depth
        self.factor = config.suffix_decoding_max_spec_factor
        self.least_share = config.suffix_decoding_min_token_prob
        self.answers = RecentAnswers(config.suffix_decoding_max_cached_requests)
        self.odds = MatchOdds()

    def opened(self, handle: Handle, parent: Handle | None) -> None:  # noqa: ARG002
        """See Drafter.opened."""
        self.odds.forget(handle)

    def before(self, batch: DraftBatch) -> Sequence[Int32s]:
        """See Drafter.before."""
        groups = batch.groups or [b""] * len(batch.handles)
        each = zip(batch.handles, batch.tokens, batch.max_drafts, groups, strict=True)
        return paying([self._draft(*own, batch.price) for own in each], batch.price)

    def ended(self, group: bytes, answer: Int32s) -> None:
        """See Drafter.ended."""
        if group:
            self.answers.add(group, answer)

    def _draft(
        self, handle: Handle, tokens: Int32s, max_drafts: int, group: bytes, price: SureDrafts
    ) -> ScoredDrafts:  # at most max_drafts
        suffix = tokens[len(tokens) - self.longest :] if len(tokens) > self.longest else tokens
        best, length = occurrences(tokens[:-1], suffix)
        source = tokens
        answers = self.answers.of(group)
        # If both matches are equally long, the sequence's own tokens are used, as they are of the same text.
        if length < self.longest and answers is not None:
            others, longer = occurrences(answers, suffix)
            if longer > length:
                best, length, source = others, longer, answers
        self.odds.learn(handle, tokens)
        if not length:
            return NOTHING_FOUND
        count = min(max_drafts, max(1, int(self.factor * length)))
        worth, gain = self.odds.most(length, count, price.min_odds)
        # At least one: `odds` learns from the first, also if it is not worth its price.
        drafts = follow(source, best[-MAX_OCCURRENCES:], max(1, worth), self.least_share)
        if len(drafts):
            self.odds.report(handle, len(tokens), int(drafts[0]), length)
        if len(drafts) < worth:
            worth, gain = self.odds.most(length, len(drafts), price.min_odds)
        return drafts[:worth], gain


class RecentAnswers:
    """Tokens of recent answers by group: at most MAX_ANSWER_TOKENS tokens and `max_requests` answers per group."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self._answers: dict[bytes, deque[Int32s]] = {}
        self._joined: dict[bytes, Int32s] = {}

    def add(self, group: bytes, answer: Int32s) -> None:
        """Add `answer` as the latest of `group`."""
        if not self.max_requests or not len(answer):
            return
        kept = self._answers.pop(group, None) or deque()
        self._answers[group] = kept
        kept.append(np.append(answer[-MAX_ANSWER_TOKENS + 1 :], np.int32(SEPARATOR)).astype(np.int32))
        while len(kept) > self.max_requests or sum(map(len, kept)) > MAX_ANSWER_TOKENS:
            kept.popleft()
        self._joined.pop(group, None)
        while len(self._answers) > MAX_GROUPS:
            oldest = next(iter(self._answers))
            del self._answers[oldest]
            self._joined.pop(oldest, None)

    def of(self, group: bytes) -> Int32s | None:
        """All answers of the group, the latest last, each followed by a SEPARATOR; None if there are none."""
        if group not in self._answers:
            return None
        if group not in self._joined:
            self._joined[group] = np.concatenate(self._answers[group])
        return self._joined[group]


def occurrences(tokens: Int32s, suffix: Int32s) -> tuple[NDArray[np.intp], int]:
    """Find the longest end of `suffix` that occurs in `tokens`. Returns the indices of its last tokens in `tokens`, in
    order, and its length; ([], 0) if not even the last token occurs.

    A sequence's own `tokens` are passed without the last one, so that each occurrence has a successor.
    """
    (ends,) = (tokens == suffix[-1]).nonzero()
    length = min(1, len(ends))
    while length and length < min(len(suffix), AT_FIRST):
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == suffix[len(suffix) - 1 - length]]
        if not len(longer):
            return ends, length
        ends, length = longer, length + 1
    return (ends, length) if length < AT_FIRST or length == len(suffix) else _longest(tokens, suffix, ends)


def _longest(tokens: Int32s, suffix: Int32s, ends: NDArray[np.intp]) -> tuple[NDArray[np.intp], int]:
    """occurrences(), given the `ends` where AT_FIRST tokens match: the other tokens are compared at once."""
    back = np.arange(AT_FIRST, len(suffix))
    places = ends[:, None] - back
    agree = (tokens.take(places, mode="clip") == suffix[len(suffix) - 1 - back]) & (places >= 0)
    agreeing = np.where(agree.all(1), len(back), agree.argmin(1))
    most = int(agreeing.max())
    return ends[agreeing == most], AT_FIRST + most


def follow(tokens: Int32s, ends: NDArray[np.intp], count: int, least_share: float) -> Int32s:  # [at most count]
    """Draft by majority: the tokens that follow most of the occurrences, one after the other.

    After each token only the occurrences that have it vote again; the draft ends when their share of all falls below
    `least_share`. The most recent wins a tie. A draft that reaches the end of the text continues with itself, so a
    sequence that repeats p tokens is drafted to repeat them further.
    """
    if len(ends) == 1:
        return _copied(tokens, int(ends[0]), count)
    voters = [(end, tokens[end + 1 : end + 1 + count].tolist()) for end in ends.tolist()]
    latest: list[int] = voters[-1][1]
    if len(latest) == count and all(behind == latest for _, behind in voters):
        return np.array(latest[: latest.index(SEPARATOR)] if SEPARATOR in latest else latest, np.int32)
    drafts: list[int] = []
    while len(voters) > 1 and len(drafts) < count:
        place = len(drafts)
        if place == len(voters[-1][1]):
            voters.pop()  # ends differ, so at most one of them has run out
        votes = Counter(behind[place] for _, behind in reversed(voters))  # of equals the most recent comes first
        token, num_votes = votes.most_common(1)[0]
        if num_votes < least_share * len(ends) or token == SEPARATOR:
            return np.array(drafts, np.int32)
        drafts.append(token)
        if num_votes < len(voters):
            voters = [voter for voter in voters if voter[1][place] == token]
    if len(drafts) == count or least_share * len(ends) > 1:
        return np.array(drafts, np.int32)
    rest = _copied(tokens, voters[0][0] + len(drafts), count - len(drafts))
    return np.concatenate((np.array(drafts, np.int32), rest)) if drafts else rest


def _copied(tokens: Int32s, end: int, count: int) -> Int32s:  # [at most count]
    """The tokens after `end`, up to a SEPARATOR; at the end of `tokens` the copy continues with itself."""
    found = tokens[end + 1 : end + 1 + count]
    (stops,) = (found == SEPARATOR).nonzero()
    if len(stops):
        return found[: stops[0]]
    return np.resize(found, count) if 0 < len(found) < count else found
