"""Meter: what the engine measures of requests and steps. The scheduler tells it what happens, the core what time it is.

The time between two tokens is taken once for all sequences that got one in this step and in the step before; only
those that joined or paused are looked at one by one. Steps whose results come together ran one after the other, so
they share evenly the time since the results before them, or, if none were under way then, since the first was made.
"""

from collections.abc import Sequence as Seq

from vllm_lite.engine.blocks.manager import KVCacheManager, PrefixHit
from vllm_lite.engine.plan import Counters
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol import api
from vllm_lite.protocol.api import FinishReason
from vllm_lite.runtime.metrics import FIRST_TOKEN_S, REQUEST_S, SAMPLES, STEP_TOKENS, TOKEN_S, Histogram, one_two_five


class Meter:
    """Totals since the start. `now_s` is the time of what is being told."""

    def __init__(self, kv: KVCacheManager, max_len: int, counters: Counters) -> None:
        """No sequence is longer than `max_len`; `counters` are the scheduler's."""
        self.now_s = 0.0
        self.ended_by: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.cache_queries = self.host_queries = self.host_hits = 0
        """Tokens of prompts: looked up on the device; not found there and looked up on the host; found on the host."""
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.rejected = self.corrupted = 0
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.token_gap_s = Histogram(TOKEN_S)
        self.mean_token_s = Histogram(TOKEN_S)
        self.whole_s, self.queue_s, self.prefill_s, self.decode_s, self.inference_s = (
            Histogram(REQUEST_S) for _ in range(5)
        )
        self.prompt_tokens, self.output_tokens, self.max_tokens = (Histogram(one_two_five(max_len)) for _ in range(3))
        self.samples = Histogram(SAMPLES)
        self.step_tokens, self.gained_tokens = Histogram(STEP_TOKENS), Histogram(STEP_TOKENS)
        """Of each step, the tokens that it was given; of each that gave some, those tokens, with the prompt of every
        request whose first was among them: the sum is that of all prompts and outputs."""
        self._kv = kv
        self._counters = counters
        self._num_counted = counters.generated_tokens
        self._num_begun = 0
        """Prompt tokens of requests whose first token is not in `gained_tokens` yet."""
        self._turn: list[tuple[Seq[Sequence], int]] = []
        """Of each step since the last turn, the sequences that got tokens, and how many these were."""
        self._turn_s = self._from_s = 0.0
        """When its results came, and when the first of its steps began to run."""
        self._last: Seq[Sequence] = []
        self._last_s = 0.0

    # ---- requests

    def admitted(self, sequence: Sequence, hit: PrefixHit) -> None:
        """It comes in from the queue with what was found of it, maybe not for the first time."""
        request = sequence.request
        if request.admitted_s is not None:
            return
        request.admitted_s = self.now_s
        kv = self._kv
        if request.num_cached_at_start is not None or sequence.unscored or not kv.pool.enable_caching:
            return
        self.cache_queries += request.num_prompt
        if kv.host is not None:
            first_id = kv.pool.num_blocks
            on_host = sum(max(ids) >= first_id for ids in zip(*hit.tables, strict=True)) * kv.block_size
            found = min(hit.num_tokens, request.num_prompt - 1)
            on_host = min(on_host, found)
            self.host_queries += request.num_prompt - (found - on_host)
            self.host_hits += on_host

    def left(self, sequence: Sequence) -> None:
        """It gets no more tokens."""
        request, num_output = sequence.request, sequence.num_output - sequence.request.num_inherited
        request.num_generated += num_output
        request.longest_output = max(request.longest_output, num_output)

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Its last sample has ended."""
        now_s, admitted_s = self.now_s, request.admitted_s
        self.ended_by[reason] += 1
        if request.beam is not None:
            outputs = [len(hypothesis.token_ids) for hypothesis in request.beam.hypotheses]
            request.num_generated, request.longest_output = sum(outputs), max(outputs, default=0)
        if request.num_generated:
            self._first(request, now_s)
        self.whole_s.observe(now_s - request.queued_s)
        self.queue_s.observe((now_s if admitted_s is None else admitted_s) - request.queued_s)
        if admitted_s is not None:
            self.inference_s.observe(now_s - admitted_s)
        if request.first_token_s is not None:
            took_s = now_s - request.first_token_s
            self.prefill_s.observe(request.first_token_s - (request.queued_s if admitted_s is None else admitted_s))
            self.decode_s.observe(took_s)
            if request.longest_output > 1:
                self.mean_token_s.observe(took_s / (request.longest_output - 1))
        self.prompt_tokens.observe(request.num_prompt)
        self.output_tokens.observe(request.num_generated)
        self.samples.observe(request.params.n)
        self.max_tokens.observe(request.max_len - request.num_prompt)

    def _first(self, request: Request, now_s: float) -> None:
        if request.first_token_s is None:
            request.first_token_s = now_s
            self.first_token_s.observe(now_s - request.queued_s)
            if request.num_cached_at_start != request.num_prompt:  # a fork's prompt was its parent's
                self._num_begun += request.num_prompt

    # ---- steps

    def stepped(
        self, sampling: Seq[Sequence], silent: Seq[Sequence], num_tokens: int, drafted: tuple[int, int] | None
    ) -> None:
        """A step gave `num_tokens` tokens to those in `sampling`, of whom the `silent` pass nothing on; `drafted` is of
        how many of them how many tokens were drafted."""
        if drafted is not None:
            self.drafts += drafted[0]
            self.draft_tokens += drafted[1]
            self.accepted_tokens += num_tokens - len(sampling)
        if silent:
            without = set(silent)
            sampling = [sequence for sequence in sampling if sequence not in without]
        before, self._num_counted = self._num_counted, self._counters.generated_tokens
        self._turn.append((sampling, self._num_counted - before))
        self._turn_s = self.now_s

    def turn(self, now_s: float, *, idle: bool = False) -> None:
        """All results that had come were told. `idle`: no step is under way."""
        self.now_s = now_s
        if self._turn:
            step_s = (self._turn_s - self._from_s) / len(self._turn)
            for number, (got, num_gained) in enumerate(self._turn, 1):
                if got:
                    self._got(got, self._from_s + number * step_s)
                if num_gained:
                    self.gained_tokens.observe(num_gained + self._num_begun)
                    self._num_begun = 0
            self._turn, self._from_s = [], self._turn_s
        if idle:
            self._from_s = now_s

    def _got(self, got: Seq[Sequence], at_s: float) -> None:
        """Sequences got tokens at `at_s`."""
        gap_s = at_s - self._last_s
        if got == self._last:  # the very same sequences: quicker than any set of them
            self.token_gap_s.observe(gap_s, len(got))
        else:
            self._change(got, gap_s, at_s)
        self._last, self._last_s = got, at_s

    def rest(self, now_s: float) -> None:
        """Nobody is there any more: hold nothing of those who were."""
        self.turn(now_s)
        self._last = []

    def _change(self, got: Seq[Sequence], gap_s: float, at_s: float) -> None:
        """Others get tokens at `at_s` than `gap_s` before."""
        last, now = set(self._last), set(got)
        for sequence in last - now:
            sequence.last_token_s = self._last_s
        joined = now - last
        if len(joined) < len(now):
            self.token_gap_s.observe(gap_s, len(now) - len(joined))
        for sequence in joined:
            if sequence.last_token_s is not None:
                self.token_gap_s.observe(at_s - sequence.last_token_s)
            else:
                self._first(sequence.request, self._turn_s)

    def snapshot(self, now_s: float) -> api.Measured:
        """For the wire."""
        self.turn(now_s)
        return api.Measured(
            ended_by=dict(self.ended_by),
            **{name: _wire(getattr(self, name)) for name in api.Measured.__struct_fields__[1:]},
        )


def _wire(histogram: Histogram) -> api.Histogram:
    return api.Histogram(list(histogram.bounds), list(histogram.counts), histogram.sum)
