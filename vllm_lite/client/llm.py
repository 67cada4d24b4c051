"""LLM: lists of prompts in, lists of results out, with an engine of its own."""

import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from vllm_lite.client.launch import launch
from vllm_lite.client.outputs import RequestOutput
from vllm_lite.client.progress import Progress
from vllm_lite.client.prompt import PromptLike
from vllm_lite.client.stream import Event, RequestStream, StreamFactory, load_tokenizer
from vllm_lite.client.tokenizer import Tokenizer
from vllm_lite.config import DEMO_MODEL, EngineConfig
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Stats, Welcome
from vllm_lite.protocol.params import SamplingParams

_LOOK_S = 1.0
"""How often a wait looks around; the session ends every stream by a deadline of its own."""


class LLM:
    """An engine of one's own, for scripts. It ends with `close()`, with the `with` block, or with the interpreter."""

    def __init__(self, model: str | Path = DEMO_MODEL, tokenizer: str | Path | None = None, **settings: Any) -> None:
        """Start an engine and wait until it serves.

        `model` is a checkpoint's folder, `settings` are fields of EngineConfig; the environment fills in what is not
        given. Raises ConfigError, ModelError or EngineError.
        """
        given = {"model": str(model), "tokenizer": None if tokenizer is None else str(tokenizer), **settings}
        words: Tokenizer | None = None

        def load_words(config: EngineConfig) -> None:
            nonlocal words
            words = load_tokenizer(tokenizer and config.tokenizer, config.tokenizer or config.model)

        self._launched = launch(EngineConfig.load(given), meanwhile=load_words)
        self._finalizer = weakref.finalize(self, self._launched.close)
        try:
            self._streams = StreamFactory(self._launched.engine, words)
        except BaseException:
            self.close()
            raise
        prefix = os.urandom(8).hex()
        self._request_ids = (f"{prefix}-{number}" for number in itertools.count())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and its workers. May be called again."""
        self._finalizer()

    @property
    def config(self) -> EngineConfig:
        """The configuration in use, with every default filled in."""
        return self._launched.config

    @property
    def engine(self) -> Welcome:
        """What the engine said of itself: model, limits, number and size of its KV blocks."""
        return self._launched.engine

    def stats(self) -> Stats:
        """The engine's counters. Raises EngineError if it does not answer."""
        return self._launched.session.stats()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; the results are in the order of the prompts.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; `sampling_params` is
        one for all or one for each. Raises RequestError before anything is sent if a prompt is invalid, and after
        all others have ended if one failed; EngineDeadError if the engine died. Ctrl-C aborts everything in flight.
        """
        streams = self._make_streams(prompts, sampling_params)
        inbox: SimpleQueue[list[Event]] = SimpleQueue()
        running: dict[str, RequestStream] = {}
        with Progress(len(streams), enabled=use_tqdm) as progress:
            try:
                for stream in streams:
                    running[stream.request_id] = stream
                    self._launched.session.submit(stream.message(), inbox.put)
                while running:
                    self._collect(inbox, running, progress)
            finally:
                for request_id in running:
                    self._launched.session.drop(request_id)
        _raise_errors(streams)
        return [stream.output() for stream in streams]

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        beam_width: int = 4,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Search each prompt's likeliest continuations: `beam_width` of them in its result's `outputs`, best first.

        They are ranked by cumulative_logprob / len(token_ids) ** length_penalty. For more, such as stop_token_ids, give
        generate() SamplingParams with use_beam_search. Raises as generate() does.
        """
        params = SamplingParams(
            use_beam_search=True,
            n=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        return self.generate(prompts, params, use_tqdm)

    # ---- inside

    def _make_streams(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestStream]:
        several = _as_list(prompts)
        params = _params_for_each(sampling_params, len(several))
        streams = []
        for place, prompt in enumerate(several):
            try:
                streams.append(self._streams.make(prompt, params[place], next(self._request_ids)))
            except RequestError as error:
                raise RequestError(f"prompt {place}: {error}" if len(several) > 1 else str(error)) from error
        return streams

    def _collect(self, inbox: SimpleQueue[list[Event]], running: dict[str, RequestStream], progress: Progress) -> None:
        try:
            events = inbox.get(timeout=_LOOK_S)
        except Empty:
            return
        for event in events:
            stream = running.get(event.request_id)
            if stream is None:
                continue
            before = stream.num_tokens
            stream.apply(event)
            progress.tokens(stream.num_tokens - before)
            if stream.finished:
                self._launched.session.drop(stream.request_id)  # nothing to drop if the engine ended it
                del running[stream.request_id]
                progress.request()


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt or several: a list of integers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several


def _params_for_each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"sampling_params must be one for all or one for each of {count} prompts, got {len(given)}")
    return list(given)


def _raise_errors(streams: Sequence[RequestStream]) -> None:
    failed = [(place, stream.error) for place, stream in enumerate(streams) if stream.error is not None]
    for _, error in failed:
        if not isinstance(error, RequestError):
            raise error
    if failed:
        place, error = failed[0]
        others = f" ({len(failed) - 1} other prompts failed as well)" if len(failed) > 1 else ""
        raise RequestError(f"prompt {place}: {error}{others}" if len(streams) > 1 else str(error)) from error
