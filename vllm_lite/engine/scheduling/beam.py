"""Beam search: chooses which continuations of the running beams to keep, which are finished, and when to stop.

The rules are those of transformers' generate(num_beams=...), so that results can be compared. Of all candidates the
best K = max(2, 1 + stop tokens) * width are considered. Those among the first `width` that end become hypotheses,
scored by sum of logprobs / length ** length_penalty; the best `width` of those that do not end continue.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_lite.protocol.params import SamplingParams


class Hypothesis(NamedTuple):
    score: float
    logprob: float
    token_ids: list[int]
    stopped: bool
    """True if a stop token ended it, False if its length did."""


class Continuation(NamedTuple):
    """Beam `parent` (an index into the beams of advance()) continues with `token_id`."""

    parent: int
    token_id: int
    logprob: float


class Beam(NamedTuple):
    """A running beam: its output, the sum of its logprobs, and the (id, logprob) of its likeliest next tokens."""

    token_ids: list[int]
    logprob: float
    candidates: Sequence[tuple[int, float]]


class BeamSearch:
    """The state of one search; `hypotheses` are the results, best first, once advance() has returned None."""

    def __init__(self, params: SamplingParams, num_prompt: int, max_len: int, stop_ids: frozenset[int]) -> None:
        self.width = params.n
        self.length_penalty = params.length_penalty
        self.early_stopping = params.early_stopping
        self.max_output = max_len - num_prompt
        self.stop_ids = stop_ids
        self.min_tokens = params.min_tokens
        self.num_candidates = max(2, 1 + len(stop_ids)) * self.width
        self.hypotheses: list[Hypothesis] = []
        self._improvable = True

    def advance(self, beams: Sequence[Beam]) -> list[Continuation] | None:
        """Choose the continuations of the beams, which all have the same length. None: the search is over."""
        length = len(beams[0].token_ids) + 1
        banned = self.stop_ids if length <= self.min_tokens else frozenset()
        best = sorted(
            (
                Continuation(parent, token_id, beam.logprob + logprob)
                for parent, beam in enumerate(beams)
                for token_id, logprob in beam.candidates
                if token_id not in banned
            ),
            key=lambda continuation: -continuation.logprob,
        )[: self.num_candidates]
        ends = [length >= self.max_output or continuation.token_id in self.stop_ids for continuation in best]
        going_on = [continuation for continuation, end in zip(best, ends, strict=True) if not end][: self.width]
        if self._improvable:
            self._add(beams, [c for c, end in zip(best[: self.width], ends, strict=False) if end], length)
        self._improvable = self._improvable and self._can_improve(going_on, length)
        if not going_on or not self._improvable or (self.early_stopping and self._full):
            return None
        return going_on

    @property
    def _full(self) -> bool:
        return len(self.hypotheses) >= self.width

    def _add(self, beams: Sequence[Beam], ended: Sequence[Continuation], length: int) -> None:
        for parent, token_id, logprob in ended:
            token_ids = [*beams[parent].token_ids, token_id]
            score = logprob / length**self.length_penalty
            self.hypotheses.append(Hypothesis(score, logprob, token_ids, token_id in self.stop_ids))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _can_improve(self, going_on: Sequence[Continuation], length: int) -> bool:
        """Whether the best running beam, with its present score, would still beat the worst hypothesis."""
        if not self._full or not going_on:
            return not self._full
        return bool(going_on[0].logprob / length**self.length_penalty > self.hypotheses[-1].score)
