"""Results for users, under vLLM's names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_lite.client.text.detokenizer import Mark
from vllm_lite.protocol.stats import FinishReason


@dataclass(slots=True)
class Logprob:
    """One candidate for one position: its raw log-softmax, its rank (1 = most likely, 0 = not known), its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of time.monotonic(), in seconds; None until the event happens. `time_in_queue` is known when a sample has
    ended."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None

    @property
    def first_token_latency(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of the prompt, from its beginning (with output kind DELTA: its new part).

    `token_ids` holds every generated token, those of a stop string or the end token included; `text` excludes them
    unless asked for. `logprobs[i]` maps token ids to candidates for `token_ids[i]`, the sampled one first.
    `cumulative_logprob`, of all tokens so far, is known with logprobs, best_of and beam search. `stop_reason` is the
    stop string or stop token that ended it, None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    marks: Sequence[Mark] = field(default=(), repr=False, compare=False)
    """Positions in `text` of added tokens of the vocabulary, for parsers."""
    ends: Sequence[int] = field(default=(), repr=False, compare=False)
    """With logprobs, the position in `text` after each token; the last tokens may have none yet."""

    def finished(self) -> bool:
        return self.finish_reason is not None

    def singly(self) -> Iterator["CompletionOutput"]:
        """Yield one part for each token. Requires logprobs."""
        count, at, num_marks = len(self.token_ids), 0, 0
        for place in range(count - 1):
            end = self.ends[place] if place < len(self.ends) else at
            marks = []
            while num_marks < len(self.marks):
                mark = self.marks[num_marks]
                if mark.num_before > place or mark.end > end:
                    break
                marks.append(Mark(mark.num_before - place, mark.start - at, mark.end - at, mark.token_id))
                num_marks += 1
            yield self._part(slice(place, place + 1), self.text[at:end], marks)
            at = end
        place = max(0, count - 1)
        marks = [Mark(it[0] - place, it.start - at, it.end - at, it.token_id) for it in self.marks[num_marks:]]
        last = self._part(slice(place, None), self.text[at:], marks)
        last.finish_reason, last.stop_reason = self.finish_reason, self.stop_reason
        yield last

    def _part(self, tokens: slice, text: str, marks: Sequence[Mark]) -> "CompletionOutput":
        scores = None if self.logprobs is None else self.logprobs[tokens]
        return CompletionOutput(self.index, text, self.token_ids[tokens], logprobs=scores, marks=marks)


@dataclass(slots=True)
class RequestOutput:
    """A request so far. `outputs` has its n samples by index; with best_of and beam search they are ranked, best first.
    With output kind DELTA it has only the samples with something new.

    `prompt_logprobs[i]`, if requested, maps token ids to candidates for `prompt_token_ids[i]`, that token first; it is
    None for the first token, which has no context. `num_cached_tokens`, known when a sample has ended, counts prompt
    tokens whose KV was cached.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. `tokens` and `text` hold the prompt too, the end token and other special tokens included;
    `cum_logprob` and the rest concern the generated tokens."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams found for one prompt, best first."""

    sequences: list[BeamSearchSequence]
    prompt_token_ids: list[int]
