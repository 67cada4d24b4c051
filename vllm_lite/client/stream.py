"""One request as its user sees it: events from the engine in, RequestOutput out. Serves AsyncClient and LLM alike."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_lite import log
from vllm_lite.client.detokenizer import Detokenizer, vocabulary
from vllm_lite.client.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from vllm_lite.client.prompt import Prompt, PromptLike, check_params, read_prompt
from vllm_lite.client.tokenizer import Tokenizer
from vllm_lite.errors import ModelError, RequestError, VllmLiteError
from vllm_lite.protocol.api import Finished, FinishReason, Generate, TokenLogprobs, Tokens, Welcome
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams

logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a stream that the engine did not end: it died, or what it sent makes no sense."""

    request_id: str
    error: VllmLiteError


Event = Tokens | Finished | Failure


class RequestStream:
    """Takes the events of one request in order; `output()` shows it as far as it has come.

    `error` is set when it ended without a result. `needs_abort` says that it ended here, at a stop string, which the
    engine cannot know.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        detokenizer: Detokenizer | None,
    ) -> None:
        """`params` hold the seed; `tokenizer` spells logprobs. Made by StreamFactory."""
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.finished = False
        self.needs_abort = False
        self.error: VllmLiteError | None = None
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.token_ids: list[int] = []
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._num_cached_tokens: int | None = None

    def message(self) -> Generate:
        """What starts this request in an engine."""
        return Generate(self.request_id, pack_tokens(self.prompt.token_ids), self.params)

    def apply(self, event: Event) -> None:
        """Take the next event. Whatever comes after the end is ignored."""
        if self.finished:
            return
        if isinstance(event, Failure):
            self._fail(event.error)
            return
        if event.token_ids:
            self._add(event)
        if self._detokenizer is not None and self._detokenizer.stopped is not None:
            self.needs_abort = not isinstance(event, Finished)
            self._finish("stop", self._detokenizer.stopped)
        elif isinstance(event, Finished):
            self._end(event)

    def output(self) -> RequestOutput:
        """A snapshot, which later events do not change."""
        completion = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=self.token_ids.copy(),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs.copy(),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[completion],
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self.metrics,
        )

    def _add(self, event: Tokens | Finished) -> None:
        now, times = time.monotonic(), self.metrics
        self.metrics = RequestMetrics(times.arrival_time, times.first_token_time or now, now)
        taken = len(event.token_ids)
        if self._detokenizer is not None:
            hidden = _ends_with_stop_token(event) and not self.params.include_stop_str_in_output
            self._text += self._detokenizer.feed(event.token_ids[:-1] if hidden else event.token_ids)
            if self._detokenizer.stopped is not None:
                taken = self._detokenizer.num_tokens - len(self.token_ids)
        self.token_ids += event.token_ids[:taken]
        if self._logprobs is not None and event.logprobs is not None:
            entries = event.logprobs[:taken]
            self._logprobs += map(self._candidates, event.token_ids, entries)
            self._cumulative_logprob += sum(entry.logprob for entry in entries)

    def _candidates(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        candidates = {token_id: self._logprob(token_id, entry.logprob, entry.rank)}
        for rank, (other, logprob) in enumerate(entry.top, 1):
            if other != token_id:
                candidates[other] = self._logprob(other, logprob, rank)
        return candidates

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)
        return Logprob(logprob, rank, text)

    def _end(self, event: Finished) -> None:
        self._num_cached_tokens = event.num_cached_tokens
        if event.reason == "error":
            self._fail(RequestError(event.error or "the engine gave no reason"))
            return
        if self._detokenizer is not None:
            self._text += self._detokenizer.flush()
            if self._detokenizer.stopped is not None:
                self._finish("stop", self._detokenizer.stopped)
                return
        self._finish(event.reason, event.stop_token)

    def _finish(self, reason: FinishReason, stop: int | str | None) -> None:
        self.finished = True
        self._finish_reason = reason
        self._stop_reason = stop

    def _fail(self, error: VllmLiteError) -> None:
        self.error = error
        self._finish("error", None)


class StreamFactory:
    """Turns prompts into streams for one engine. Without a tokenizer prompts are token ids, and no text comes back."""

    def __init__(self, limits: Welcome, tokenizer: Tokenizer | None) -> None:
        """Raises ModelError for a tokenizer whose text cannot be streamed."""
        self.limits = limits
        self.tokenizer = tokenizer
        self._vocabulary = None if tokenizer is None else vocabulary(tokenizer)

    @classmethod
    def load(cls, limits: Welcome, tokenizer: str | Path | None) -> "StreamFactory":
        """With the tokenizer in that folder, or with the one the engine names if there is one. Raises ModelError."""
        if tokenizer is not None:
            return cls(limits, Tokenizer.load(tokenizer))
        try:
            return cls(limits, Tokenizer.load(limits.tokenizer or limits.model))
        except ModelError as error:
            logger.warning("prompts must be token ids, and no text is made: %s", error)
            return cls(limits, None)

    def make(self, prompt: PromptLike, params: SamplingParams | None, request_id: str) -> RequestStream:
        """Check and tokenize one prompt. Raises RequestError."""
        params = SamplingParams() if params is None else params
        check_params(params, self.tokenizer, self.limits)
        checked = read_prompt(prompt, self.tokenizer, self.limits)
        return RequestStream(request_id, checked, with_seed(params), self.tokenizer, self._detokenizer(params))

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self._vocabulary is None or not params.detokenize:
            return None
        return Detokenizer(
            self._vocabulary,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )


def with_seed(params: SamplingParams) -> SamplingParams:
    """The same with a seed drawn here, so that the request repeats itself when it is sent again."""
    if params.seed is not None or params.greedy:
        return params
    return msgspec.structs.replace(params, seed=int.from_bytes(os.urandom(8), "little"))


def _ends_with_stop_token(event: Tokens | Finished) -> bool:
    return isinstance(event, Finished) and event.reason == "stop"
