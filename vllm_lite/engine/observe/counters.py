"""Meter: counts and times requests and steps. The scheduler reports events, the core sets the time.

The gap between tokens is measured once for all sequences that got one in this step and in the previous one; only
sequences that joined or paused are handled one by one. Steps whose results arrive together ran one after the other, so
they share evenly the time since the previous results, or, if no step was in flight then, since the first was scheduled.
"""

from collections import abc

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import PrefixHit
from vllm_lite.engine.observe.conversations import Conversations
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.stats import DraftCounts, FinishReason, Histogram, RequestHistograms, Stats, bounds
from vllm_lite.protocol.step import ModelOutput

# vLLM's bucket bounds, so that dashboards can compare.
FIRST_TOKEN_S = bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
TOKEN_S = bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
REQUEST_S = bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
FORCED = "forced"
"""Method name of drafts that a grammar forces."""


def one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    exponents = range(len(str(largest)))
    return tuple(bound for power in exponents for digit in (1, 2, 5) if (bound := digit * 10**power) <= largest)


class Meter:
    """Counts in `counters`, which the KV manager, the scheduler and the core share. `now_s` is the time of the next
    report."""

    def __init__(self, kv: KVCacheManager, max_len: int, method: str = "") -> None:
        """`max_len`: maximum length of a sequence. `method`: the drafter beside grammars; empty: none."""
        self.now_s = 0.0
        self.counters = kv.counters
        self.conversations = Conversations(kv.pool)
        self.latest_drafts = (0, 0)
        """(drafted, accepted) tokens of the latest step with a result."""
        self._method = method
        self.counters.drafts_by = {name: DraftCounts() for name in (FORCED, method) if name}
        tokens = one_two_five(max_len)
        self.counters.requests = self._requests = RequestHistograms(
            *map(Histogram.over, [FIRST_TOKEN_S, TOKEN_S, TOKEN_S] + 5 * [REQUEST_S]),
            *map(Histogram.over, [tokens, tokens, tokens, SAMPLES, tokens, PREEMPTIONS, tokens]),
            *map(Histogram.over, [STEP_TOKENS, STEP_TOKENS]),
        )
        self._kv = kv
        self._num_counted = 0
        """Generated tokens of the steps reported so far."""
        self._num_begun = 0
        """Prompt tokens of requests whose first token is not in `gained_tokens` yet."""
        self._untimed: list[tuple[abc.Sequence[Sequence], int]] = []
        """(sequences that got tokens, number of tokens) of each step whose result came since time_results()."""
        self._results_s = self._from_s = 0.0
        """Time of these results, and time at which the first of their steps began."""
        self._last: abc.Sequence[Sequence] = []
        self._last_s = 0.0

    # ---- requests

    def admitted(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Count a sequence that was admitted with this hit, maybe not for the first time."""
        request = sequence.request
        if request.admitted_s is not None:
            return
        request.admitted_s = self.now_s
        kv, counters = self._kv, self.counters
        if request.num_cached_at_start is not None or sequence.unscored or not kv.is_caching:
            return
        counters.cache_queries += request.num_prompt
        self.conversations.admitted(sequence, min(hit.num_tokens, request.num_prompt - 1), kv.block_size, self.now_s)
        if (on_host := kv.num_on_host(hit)) is not None:
            found = min(hit.num_tokens, request.num_prompt - 1)
            on_host = min(on_host, found)
            counters.host_queries += request.num_prompt - (found - on_host)
            counters.host_hits += on_host

    def left(self, sequence: Sequence) -> None:
        """Count the output of a sequence that has ended."""
        request, num_output = sequence.request, sequence.num_output - sequence.num_inherited
        request.num_generated += num_output
        request.longest_output = max(request.longest_output, num_output)

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Count a request whose last sample has ended."""
        now_s, admitted_s, measured = self.now_s, request.admitted_s, self._requests
        self.counters.ended_by[reason] += 1
        if request.beam is not None:
            outputs = [len(hypothesis.token_ids) for hypothesis in request.beam.hypotheses]
            request.num_generated, request.longest_output = sum(outputs), max(outputs, default=0)
        if request.num_generated:
            self._first(request, now_s)
        measured.whole_s.observe(now_s - request.queued_s)
        measured.queue_s.observe((now_s if admitted_s is None else admitted_s) - request.queued_s)
        if admitted_s is not None:
            measured.inference_s.observe(now_s - admitted_s)
        if request.first_token_s is not None:
            took_s = now_s - request.first_token_s
            since_s = request.queued_s if admitted_s is None else admitted_s
            measured.prefill_s.observe(request.first_token_s - since_s)
            measured.decode_s.observe(took_s)
            if request.longest_output > 1:
                measured.mean_token_s.observe(took_s / (request.longest_output - 1))
        measured.prompt_tokens.observe(request.num_prompt)
        measured.output_tokens.observe(request.num_generated)
        measured.samples.observe(request.params.n)
        measured.longest_output.observe(request.longest_output)
        measured.preemptions.observe(request.num_preemptions)
        if admitted_s is not None:
            measured.computed_prompt_tokens.observe(request.num_prompt - (request.num_cached_at_start or 0))
        measured.max_tokens.observe(request.max_len - request.num_prompt)

    def _first(self, request: Request, now_s: float) -> None:
        """Record the first token of a request, if it is the first."""
        if request.first_token_s is None:
            request.first_token_s = now_s
            self._requests.first_token_s.observe(now_s - request.queued_s)
            if request.num_cached_at_start != request.num_prompt:  # a fork's prompt was its parent's
                self._num_begun += request.num_prompt

    # ---- steps

    def scheduled(self, num_tokens: int) -> None:
        """Count a scheduled step of `num_tokens` tokens."""
        self._requests.step_tokens.observe(num_tokens)

    def stepped(self, sampling: abc.Sequence[Sequence], silent: abc.Sequence[Sequence], result: ModelOutput) -> None:
        """Count a step's result for the sequences in `sampling`; those in `silent` send no tokens to a stream."""
        self.latest_drafts = (0, 0) if result.drafted is None else self._drafted(sampling, result)
        if silent:
            without = set(silent)
            sampling = [sequence for sequence in sampling if sequence not in without]
        before, self._num_counted = self._num_counted, self.counters.generated_tokens
        self._untimed.append((sampling, self._num_counted - before))
        self._results_s = self.now_s

    def _drafted(self, sampling: abc.Sequence[Sequence], result: ModelOutput) -> tuple[int, int]:
        """Count a step's drafts; of each sequence the forced ones come first, and one sampled token is not a draft.
        Returns the numbers of (drafted, accepted) tokens."""
        drafted = result.drafted or []
        counts, forced = result.counts or [1] * len(drafted), result.forced or [0] * len(drafted)
        before = self.counters.draft_tokens, self.counters.accepted_tokens
        for sequence, num_drafted, count, num_forced in zip(sampling, drafted, counts, forced, strict=False):
            if num_drafted:
                right = max(count - 1, 0)
                self._count_drafts(sequence, FORCED, num_forced, min(right, num_forced))
                self._count_drafts(sequence, self._method, num_drafted - num_forced, max(right - num_forced, 0))
                self.counters.drafts += 1
                self.counters.draft_tokens += num_drafted
                self.counters.accepted_tokens += right
        return self.counters.draft_tokens - before[0], self.counters.accepted_tokens - before[1]

    def _count_drafts(self, sequence: Sequence, method: str, num_drafted: int, num_right: int) -> None:
        if num_drafted:
            of_sample = sequence.request.drafts_by.setdefault(sequence.index, {})
            for counts in (self.counters.drafts_by, of_sample):
                counts.setdefault(method or FORCED, DraftCounts()).count(num_drafted, num_right)

    def time_results(self, now_s: float, *, idle: bool = False) -> None:
        """Assign times to the tokens of all applied results. `idle`: no step is in flight."""
        self.now_s = now_s
        if self._untimed:
            step_s = (self._results_s - self._from_s) / len(self._untimed)
            for number, (got, num_gained) in enumerate(self._untimed, 1):
                if got:
                    self._got(got, self._from_s + number * step_s)
                if num_gained:
                    self._requests.gained_tokens.observe(num_gained + self._num_begun)
                    self._num_begun = 0
            self._untimed, self._from_s = [], self._results_s
        if idle:
            self._from_s = now_s

    def _got(self, got: abc.Sequence[Sequence], at_s: float) -> None:
        """Measure the token gaps of sequences that got tokens at `at_s`."""
        gap_s = at_s - self._last_s
        if got == self._last:  # the same sequences: faster than building sets
            self._requests.token_gap_s.observe(gap_s, len(got))
        else:
            self._change(got, gap_s, at_s)
        self._last, self._last_s = got, at_s

    def rest(self, now_s: float) -> None:
        """Drop references to sequences, once no request is left."""
        self.time_results(now_s)
        self._last = []

    def _change(self, got: abc.Sequence[Sequence], gap_s: float, at_s: float) -> None:
        """Measure the token gaps at `at_s`, when other sequences got tokens than `gap_s` before."""
        last, now = set(self._last), set(got)
        token_gap_s = self._requests.token_gap_s
        for sequence in last - now:
            sequence.last_token_s = self._last_s
        joined = now - last
        if len(joined) < len(now):
            token_gap_s.observe(gap_s, len(now) - len(joined))
        for sequence in joined:
            if sequence.last_token_s is not None:
                token_gap_s.observe(at_s - sequence.last_token_s)
            else:
                self._first(sequence.request, self._results_s)

    def stats(self, now_s: float) -> Stats:
        """The current counters, in the struct in which counting continues."""
        self.time_results(now_s)
        self._kv.count()
        return self.counters
