"""RequestStream: turns the engine's events of one request into RequestOutputs, for LLM, AsyncClient and server."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_lite.checkpoint import hub
from vllm_lite.client.outputs import CompletionOutput, RequestMetrics, RequestOutput
from vllm_lite.client.prompt import Prompt, PromptLike, check_fork, check_params, read_prompt
from vllm_lite.client.streams.sample import Cursor, PromptScores, Sample
from vllm_lite.client.streams.sampling import wire_params, with_bad_word_ids, with_form, with_seed
from vllm_lite.client.text.detokenizer import Detokenizer, vocabulary
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.client.text.tokenizer_formats import conversion
from vllm_lite.config import DEMO_MODEL, demo_folder
from vllm_lite.errors import ModelError, RequestError, VllmLiteError
from vllm_lite.protocol.api import Finished, ForkRequest, Generate, Tokens, Welcome
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import MAX_SEED, RequestOutputKind, SamplingParams
from vllm_lite.protocol.structured import Thinking
from vllm_lite.runtime import log

if TYPE_CHECKING:  # session imports the events that are defined here
    from vllm_lite.client.engines.any_session import AnySession

logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class StreamFailure:
    """The end of a stream without an answer of the engine: it died, or its messages are inconsistent."""

    request_id: str
    error: VllmLiteError


Event = Tokens | Finished | StreamFailure


def is_error(event: Event) -> bool:
    """Whether the engine refused or failed the request."""
    return isinstance(event, Finished) and event.reason == "error"


def shows(event: Event) -> bool:
    """Whether the event has something new for a reader; prompt logprobs before the first token do not count."""
    return not isinstance(event, Tokens) or bool(event.token_ids)


class RequestStream:
    """Applies the events of one request in order, until its last sample has ended; output() returns the present state.

    `error` is set if the request ended without a result. A stop string may end the stream, or one of its samples,
    before the engine, which does not know stop strings: so readers call settle() after events. Events after a sample's
    end are ignored.

    With `best_of` the engine draws more samples than the user gets; output() ranks them once all have ended.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        samples: Sequence[Sample],
        prompt_scores: PromptScores | None = None,
        parent_id: str | None = None,
    ) -> None:
        """Created by StreamFactory. `params` include the seed; `samples` has one entry per sample that the engine
        draws. A fork of `parent_id` has one sample, with the inherited tokens."""
        self.request_id = request_id
        self._parent_id = parent_id
        self.adapter = ""
        """Name of the request's adapter."""
        self.prompt = prompt
        self.params = params
        self.samples = samples
        self.prompt_scores = prompt_scores
        self.finished = False
        self.error: VllmLiteError | None = None
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self.ends_at_once = final_only or params.use_beam_search or len(samples) > params.n
        """Whether there is no output before the end."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens whose KV was cached; known when a sample has ended."""
        is_delta = params.output_kind is RequestOutputKind.DELTA and not self.ends_at_once
        self._cursors = [Cursor(index, sample) for index, sample in enumerate(samples)] if is_delta else []
        self._prompt_delivered = False
        self._stopped: list[int] = []
        """Samples that have ended at a stop string and are not aborted in the engine yet."""

    def message(self) -> Generate | ForkRequest:
        """The message that starts this request in an engine, after the tokens that it already has."""
        is_scored = self.prompt_scores is None or self.prompt_scores.complete
        if self._parent_id is not None and is_scored:  # a ForkRequest does not compute its prompt
            return ForkRequest(self._parent_id, self.request_id, self.num_tokens, self._wire_params())
        return self._generate()

    def own_message(self) -> Generate | None:
        """The message that starts a fork in an engine that does not know its parent; None if it is not a fork."""
        return None if self._parent_id is None else self._generate()

    def _generate(self) -> Generate:
        have = self.num_tokens
        output = pack_tokens(self.samples[0].token_ids) if have else b""
        prompt = self.prompt
        return Generate(
            self.request_id,
            pack_tokens(prompt.token_ids),
            self._wire_params(),
            have,
            output,
            adapter=self.adapter,
            marks=prompt.marks,
            media=prompt.media,
            contents=prompt.contents,
        )

    def starts_again(self, event: Event, is_live: Callable[[str], bool]) -> bool:
        """Whether to send this fork again as an independent request, which message() then returns.

        True if `event`, its first, is an error because the parent had ended in the engine before this client knew.
        """
        parent_id, self._parent_id = self._parent_id, None
        return parent_id is not None and is_error(event) and not is_live(parent_id)

    def _wire_params(self) -> SamplingParams:
        params = wire_params(self.params)
        if self.prompt_scores is not None and self.prompt_scores.complete:  # inherited by a fork
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return params

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all samples together."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def apply(self, event: Event) -> None:
        """Apply the next event. Events after the end are ignored."""
        if self.finished:
            return
        if isinstance(event, StreamFailure):
            self._fail(event.error)
        elif isinstance(event, Finished) and is_error(event):
            self.num_cached_tokens = event.num_cached_tokens
            self._fail(RequestError(event.error or "the engine gave no reason"))
        else:
            try:
                self._pass(event)
            except ModelError as error:  # the tokenizer cannot decode the model's tokens
                self._fail(error)

    def settle(self, session: "AnySession") -> None:
        """End in the engine what has ended here: the request, or samples that ended at a stop string."""
        if self.finished:  # nothing to drop if the engine ended it
            session.drop(self.request_id, stopped=self.error is None)
        elif self._stopped:
            session.abort(self.request_id, self._stopped, stopped=True)
        self._stopped = []

    def output(self) -> RequestOutput:
        """A snapshot of the present state, which later events do not change."""
        shown = self.samples
        if len(shown) > self.params.n:
            shown = sorted(shown, key=lambda sample: -(sample.cumulative_logprob or 0.0))[: self.params.n]
        logprobs = self.params.logprobs is not None
        return self._output([sample.output(index, logprobs=logprobs) for index, sample in enumerate(shown)])

    def next_output(self) -> RequestOutput:
        """The next output, by `output_kind`. Only the first delta has the prompt's logprobs."""
        if not self._cursors:
            return self.output()
        deltas = [delta for cursor in self._cursors if (delta := cursor.delta()) is not None]
        for delta in deltas:
            delta.logprobs = None if delta.logprobs is None else list(delta.logprobs)
        output = self._output(deltas)
        if self._prompt_delivered:
            output.prompt_logprobs = None
        self._prompt_delivered = True
        return output

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=None if self.prompt_scores is None else self.prompt_scores.entries.copy(),
            outputs=outputs,
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _pass(self, event: Tokens | Finished) -> None:
        if event.token_ids:
            now, times = time.monotonic(), self.metrics
            self.metrics = replace(times, first_token_time=times.first_token_time or now, last_token_time=now)
        if event.prompt is not None and self.prompt_scores is not None:
            self.prompt_scores.take(event.prompt)
        sample = self.samples[event.index]
        had_ended = sample.finish_reason is not None
        sample.apply(event)
        if isinstance(event, Finished):
            self.num_cached_tokens = max(self.num_cached_tokens or 0, event.num_cached_tokens)
            self.metrics = replace(self.metrics, time_in_queue=event.queued_s)
        elif sample.finish_reason is not None and not had_ended:
            self._stopped.append(event.index)
        if sample.finish_reason is not None and all(sample.finish_reason is not None for sample in self.samples):
            self._end()

    def _fail(self, error: VllmLiteError) -> None:
        self.error = error
        self._end()
        for sample in self.samples:
            if sample.finish_reason is None:
                sample.finish("error")

    def _end(self) -> None:
        self.finished = True
        self.metrics = replace(self.metrics, finished_time=time.monotonic())


class StreamFactory:
    """Creates the streams of one engine. Without a tokenizer prompts are token ids, and outputs have no text."""

    def __init__(
        self,
        limits: Welcome,
        tokenizer: Tokenizer | None,
        thinking: Callable[[Prompt], Thinking | None] | None = None,
        *,
        most_tokens: int | None = None,
    ) -> None:
        """`thinking` returns the Thinking of a prompt's output; `most_tokens` limits every output, whatever its
        max_tokens. Raises ModelError for a tokenizer whose text cannot be streamed."""
        self.limits = limits
        self.tokenizer = tokenizer
        self._thinking = thinking
        self._most_tokens = most_tokens
        self._vocabulary = None if tokenizer is None else vocabulary(tokenizer)

    @classmethod
    def load(cls, limits: Welcome, tokenizer: str | Path | None) -> "StreamFactory":
        """Create one with the given tokenizer, else with the one that the engine names, if any. Raises ModelError."""
        return cls(limits, load_tokenizer(tokenizer, limits.tokenizer or limits.model))

    def make(
        self,
        prompt: PromptLike,
        params: SamplingParams | None,
        request_id: str,
        check: Callable[[], None] = lambda: None,
    ) -> RequestStream:
        """Check and tokenize one prompt, and create its stream. Raises RequestError, and the errors of `check`: see
        read_prompt."""
        self.check_generates()
        params = self._checked(SamplingParams() if params is None else params)
        checked = read_prompt(prompt, self.tokenizer, self.limits, params, check)
        params = self._with_form(params, checked)
        samples = [self._sample(params) for _ in range(wire_params(params).n)]
        scores = None if params.prompt_logprobs is None else PromptScores(self.tokenizer, checked.token_ids)
        return RequestStream(request_id, checked, with_seed(params), samples, scores)

    def check_generates(self) -> None:
        """Raise RequestError if the model generates no text."""
        if not self.limits.pooler.generates:
            tasks = " or ".join(self.limits.pooler.tasks)
            raise RequestError(f"the model {self.limits.model!r} generates no text; it can be asked to {tasks}")

    def replayed(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> RequestStream:
        """Create a stream for recorded events of a request, which no engine will run."""
        samples = [self._sample(params) for _ in range(params.n)]
        return RequestStream(request_id, Prompt(None, prompt_ids), params, samples)

    def fork(
        self, parent: RequestStream, params: SamplingParams | None, request_id: str, number: int = 0
    ) -> RequestStream:
        """Create a stream that begins with all tokens of `parent`; `params` default to the parent's, with another seed.
        A given seed is for fork `number` 0; fork i adds i to it. Raises RequestError.
        """
        if params is None:
            params = msgspec.structs.replace(parent.params, seed=None)
        elif params.seed is not None:
            params = msgspec.structs.replace(params, seed=(params.seed + number) % (MAX_SEED + 1))
        params = self._with_form(self._checked(params), parent.prompt)
        check_fork(parent.params, params, parent.num_tokens)
        sample = self._sample(params, parent.num_tokens)
        sample.inherit(parent.samples[0])
        scores = None if params.prompt_logprobs is None else parent.prompt_scores
        stream = RequestStream(request_id, parent.prompt, with_seed(params), [sample], scores, parent.request_id)
        stream.adapter = parent.adapter
        return stream

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """Check the params, limit max_tokens and replace bad words by token ids. Raises RequestError."""
        params = self._limited(params)
        check_params(params, self.tokenizer, self.limits)
        if params.bad_words and self.tokenizer is not None:
            return with_bad_word_ids(params, self.tokenizer)
        return params

    def _limited(self, params: SamplingParams) -> SamplingParams:
        most = self._most_tokens
        if most is None or (params.max_tokens is not None and params.max_tokens <= most):
            return params
        try:
            return params.clone(max_tokens=most)
        except ValueError as error:
            raise RequestError(f"{error}, which this server's max_new_tokens bounds") from error

    def _with_form(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """Replace the user's structured_outputs and thinking_token_budget: see with_form. Raises RequestError."""
        return with_form(params, self.tokenizer, lambda: None if self._thinking is None else self._thinking(prompt))

    def _sample(self, params: SamplingParams, num_inherited: int = 0) -> Sample:
        """Create a sample. Stop strings are searched from the first token that is not inherited."""
        detokenizer = None
        if self._vocabulary is not None and params.detokenize:
            detokenizer = Detokenizer(
                self._vocabulary,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                min_tokens=max(params.min_tokens, num_inherited),
            )
        logprobs, include_stop = wire_params(params).logprobs is not None, params.include_stop_str_in_output
        named = bool(params.logprob_token_ids)
        return Sample(detokenizer, self.tokenizer, logprobs=logprobs, include_stop=include_stop, is_named=named)


def load_tokenizer(wanted: str | Path | None, default: str) -> Tokenizer | None:
    """Load the tokenizer of the folder or hub id `wanted`, or of the bundled model if that is its name; if `wanted` is
    None, the one in `default`, if there is one.

    Raises ModelError, also for a tokenizer that is damaged, or whose format cannot be converted.
    """
    if wanted is not None:
        name = demo_folder() if wanted == DEMO_MODEL else str(wanted)
        return Tokenizer.load(hub.local_folder(hub.HubSource(name), what="tokenizer") if hub.is_hub_id(name) else name)
    try:
        return Tokenizer.load(default)
    except ModelError as error:
        if conversion.has_tokenizer(default):  # a damaged one, which nobody would notice until the first text
            raise
        logger.warning("prompts must be token ids, and no text is made: %s", error)
        return None
