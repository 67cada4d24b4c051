"""LLM: lists of prompts in, lists of results out, with an engine of its own. The methods are vLLM's."""

import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from vllm_lite.client.beam import BeamSearchParams, beams_of, sampling_of
from vllm_lite.client.decisions import methods as decisions
from vllm_lite.client.engines.launch_engines import launch_engines
from vllm_lite.client.engines.operations import OPERATION_TIMEOUT_S, check_done, operation_of
from vllm_lite.client.generation_config import check_source, generation_defaults, read_overrides
from vllm_lite.client.llm_arguments import (
    AnyStream,
    as_list,
    named,
    pairs_of,
    params_for_each,
    raise_errors,
    with_priorities,
)
from vllm_lite.client.lora import LOAD_TIMEOUT_S, LoRARequest, LoRARequests, begin_load, check_loaded
from vllm_lite.client.media.programs import ProgramImages
from vllm_lite.client.outputs import BeamSearchOutput, RequestOutput
from vllm_lite.client.pooling import (
    PoolingFactory,
    PoolingRequestOutput,
    PoolingStream,
    ScoringOutput,
    by_text,
    joined,
    similarity,
)
from vllm_lite.client.progress import TokenBar
from vllm_lite.client.prompt import PromptLike, Prompts
from vllm_lite.client.streams.stream import Event, RequestStream, StreamFactory, load_tokenizer
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.client.token_classes import BACKGROUND, EntityFinder, classified, texts_of
from vllm_lite.config import DEMO_MODEL, EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError, RequestError
from vllm_lite.protocol.api import PrefixCacheReset, Welcome
from vllm_lite.protocol.operations import PauseMode
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import PoolingParams, PoolingTask
from vllm_lite.protocol.stats import Stats
from vllm_lite.transport.time_slice import short_slices

if TYPE_CHECKING:  # Jinja is imported when it is needed
    from vllm_lite.client.chat import ChatTokenizer, Conversation
    from vllm_lite.client.text.templates.chat_template import Tool

SamplingParamsForEach = SamplingParams | Sequence[SamplingParams] | None
_LOOK_S = 1.0
"""Seconds after which a wait wakes up, for Ctrl-C; the session guarantees that every stream ends."""
_UNSUPPORTED_METHODS = frozenset({"reward"})


class LLM:
    """Generates text for scripts, with an engine of its own, which ends with `close()`, the `with` block, or the
    interpreter."""

    def __init__(  # noqa: PLR0913 - all have defaults
        self,
        model: str | Path = DEMO_MODEL,
        tokenizer: str | Path | None = None,
        *,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        disable_log_stats: bool = True,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        allowed_media_domains: Sequence[str] = (),
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Start an engine and wait until it serves.

        `model` is a checkpoint's folder or its hub id. `settings` are fields of EngineConfig: tensor_parallel_size=1,
        dtype="auto", quantization=None, seed=0, gpu_memory_utilization=0.9, swap_space=None, max_model_len=None,
        enforce_eager=False, single_process=False and the rest; the environment fills in what is not given. What
        vLLM's LLM has and would change nothing here is taken as well. Statistics are logged with
        disable_log_stats=False alone.

        get_default_sampling_params() are those of the checkpoint's generation_config.json, or of the one in the folder
        `generation_config`; "vllm" ignores it. `override_generation_config`, such as {"temperature": 0.5}, overrides
        the file. `limit_mm_per_prompt`, such as {"image": 4}, limits the images of a prompt, `allowed_media_domains`
        are domains from which they may be fetched, and `mm_processor_kwargs` sizes of their processor.
        Raises ConfigError, ModelError or EngineError.
        """
        overrides = read_overrides(override_generation_config)
        try:
            check_source(generation_config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        given = {"model": str(model), "tokenizer": None if tokenizer is None else str(tokenizer), **settings}
        given["disable_log_stats"] = disable_log_stats
        loaded: Tokenizer | None = None
        defaults: dict[str, Any] = {}

        def load_text_parts(config: ResolvedConfig) -> None:
            nonlocal loaded, defaults
            loaded = load_tokenizer(tokenizer and config.tokenizer, config.tokenizer)
            defaults = generation_defaults(config.model, generation_config, overrides).params

        self._images = ProgramImages(limit_mm_per_prompt, allowed_media_domains, mm_processor_kwargs)
        self.launched = launch_engines(EngineConfig.load(given), meanwhile=load_text_parts, streams=False)
        self._defaults = defaults
        self._finalizer = weakref.finalize(self, self.launched.close)
        try:
            self._streams = StreamFactory(self.launched.engine, loaded)
            self._pooling = PoolingFactory(self.launched.engine, loaded)
        except BaseException:
            self.close()
            raise
        self._tokenizer: ChatTokenizer | None = None
        self._is_asleep = False
        prefix = os.urandom(8).hex()
        self._request_ids = map(f"{prefix}-{{}}".format, itertools.count())  # not a generator: threads share it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and its workers. May be called repeatedly."""
        self._finalizer()
        self._images.close()

    shutdown = close

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _UNSUPPORTED_METHODS:
                raise AttributeError(f"LLM has no {name}() yet: there are embed(), classify(), score() and encode()")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def config(self) -> ResolvedConfig:
        """The configuration in use, with all defaults resolved."""
        return self.launched.config

    @property
    def engine(self) -> Welcome:
        """The engine's description: model, limits, number and size of its KV blocks."""
        return self.launched.engine

    @property
    def address(self) -> str:
        """The address at which other clients reach the same engine."""
        return self.launched.address

    def get_tokenizer(self) -> "ChatTokenizer":
        """The tokenizer that generate() and chat() use: encode, decode, apply_chat_template. Raises ModelError."""
        if self._tokenizer is None:
            from vllm_lite.client.chat import ChatTokenizer

            folder = self.config.tokenizer
            self._tokenizer = ChatTokenizer(self._streams.tokenizer, folder, self.engine.eos_token_ids)
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling params that apply if none are given: the model's recommendations, if it has any."""
        return SamplingParams(**self._defaults)

    def stats(self) -> Stats:
        """The engine's counters. Raises EngineError if it does not answer."""
        return self.launched.session.stats()

    def reset_prefix_cache(self, *, stored: bool = False) -> PrefixCacheReset:
        """Empty the prefix cache, with `stored` also the one on disk, and return the numbers of dropped blocks. Raises
        EngineError if the engine does not answer."""
        session = self.launched.session
        return session.wait(session.reset_prefix_cache(stored=stored))

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Release the memory of weights and KV cache until wake_up(). Level 1 keeps processes, which wake faster, level
        2 none. Raises EngineError if that fails."""
        self._operate("sleep", level=level, mode=mode)
        self._is_asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Let a sleeping engine load the model again; with `tags`, once "weights" and "kv_cache" have both been given.
        Raises EngineError if that fails; then the engine stays asleep."""
        self._operate("wake_up", tags=tags or ())
        self._is_asleep = self.stats().sleep_level is not None

    def update_weights(self, model: str | Path, mode: PauseMode = "wait") -> None:
        """Serve the weights in another folder, of the same model trained further. Raises RequestError if the folder
        cannot be served; then the previous weights are served again."""
        self._operate("update_weights", model=str(model), mode=mode)

    def start_profile(self) -> None:
        """Let the workers profile their steps, by profiler_config. Raises RequestError without one."""
        self._operate("start_profile")

    def stop_profile(self) -> None:
        """End the profile, and let the workers write it."""
        self._operate("stop_profile")

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParamsForEach = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        *,
        priority: int | Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; the results are in the order of the prompts.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; prompts of token ids may
        also be given as `prompt_token_ids`. To a model that sees images it may be {"prompt": text, "multi_modal_data":
        {"image": [image, ...]}}, with the model's placeholder in the text for each. `sampling_params` is one for all or
        one for each (default: get_default_sampling_params()), and so are `priority` (default: that of the params) and
        `lora_request`, which is loaded if it is not (default: no adapter). Raises RequestError before anything is sent
        if a prompt is invalid, and after all others have ended if one failed; EngineDeadError if the engine died.
        Ctrl-C aborts everything in flight.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise RequestError("generate() takes prompts, or else prompt_token_ids")
        several = as_list(prompts if prompt_token_ids is None else prompt_token_ids)
        for place, prompt in enumerate(several):
            if isinstance(prompt, Mapping) and "multi_modal_data" in prompt:
                with named(f"prompt {place}" if len(several) > 1 else ""):
                    several[place] = self._images.of_data(prompt, self.config.model, self.get_tokenizer().encode)
        return self._run(several, sampling_params, use_tqdm, lora_request, priority)

    def chat(  # noqa: PLR0913 - what vLLM's has
        self,
        messages: "Conversation | Sequence[Conversation]",
        sampling_params: SamplingParamsForEach = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: "Sequence[Tool] | None" = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role": ..., "content": ...}, or several.

        The checkpoint's chat template makes prompts of them, or `chat_template`: Jinja, or a file with it.
        `chat_template_kwargs` are variables for it, `tools` those that the model may call. `continue_final_message`,
        which needs add_generation_prompt=False, continues the last message. To a model that sees images a content may
        be parts, such as {"type": "image", "image": path, bytes or Pillow image}, also with a `uuid`, and
        `mm_processor_kwargs` are sizes of its processor. Raises as generate() does, and ModelError if there is no
        template or no tokenizer.
        """
        from vllm_lite.client.chat import checked_tools, conversations, rendered

        tokenizer, several, sees = self.get_tokenizer(), conversations(messages), bool(self.engine.placeholders)
        template = tokenizer.template(chat_template)
        prompts: list[PromptLike] = []
        for place, conversation in enumerate(several):
            with named(f"conversation {place}" if len(several) > 1 else ""):
                parts = list[tuple[Mapping[str, Any], str]]()
                text = rendered(
                    template,
                    conversation,
                    partial(_append, parts) if sees else None,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    variables=chat_template_kwargs,
                    tools=checked_tools(tools),
                )
                if parts:
                    encode = partial(tokenizer.encode, add_special_tokens=False)
                    prompts.append(self._images.of_chat(text, parts, self.config.model, encode, mm_processor_kwargs))
                    continue
                prompts.append({"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False), "prompt": text})
        return self._run(prompts, sampling_params, use_tqdm, lora_request, priority)

    def beam_search(self, prompts: Prompts, params: BeamSearchParams, use_tqdm: bool = False) -> list[BeamSearchOutput]:
        """Find each prompt's likeliest continuations. Raises as generate() does.

        generate() does the same, beside other requests, with use_beam_search in its SamplingParams.
        """
        found = self._run(as_list(prompts), sampling_of(params), use_tqdm)
        return [beams_of(output, self._streams.tokenizer) for output in found]

    # ---- vectors and scores

    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Make a vector of each prompt: `outputs.embedding` of each result, in the order of the prompts.

        Raises as generate() does, and RequestError if the model makes no vectors.
        """
        return self.encode(prompts, pooling_params, use_tqdm, pooling_task="embed", lora_request=lora_request)

    def classify(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Classify each prompt: `outputs.probs` has a number for each of the model's labels. Raises as embed() does."""
        return self.encode(prompts, pooling_params, use_tqdm, pooling_task="classify", lora_request=lora_request)

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        pooling_task: PoolingTask | None = None,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Run a task of the model's pooler on each prompt, by default the pooler's first task.

        `outputs` of a result depends on the task: embedding, probs, score, or data with a vector for each token.
        Raises as embed() does.
        """
        params, several = pooling_params or PoolingParams(), as_list(prompts)
        task = pooling_task or params.task or self._pooling.first_task
        ids = [next(self._request_ids) for _ in several]
        return self._pool(self._pooling.make(several, params, task, ids), use_tqdm, lora_request)

    def token_classify(  # noqa: PLR0913 - all but the texts have defaults
        self,
        texts: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        aggregation: str | None = None,
        ignore_labels: Sequence[str] = BACKGROUND,
        stride: int | None = None,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Find the entities of each text: `outputs.entities` of each result, and `outputs.redacted`.

        `aggregation` makes entities of tokens: "none", "simple", "first", "average" or "max", as transformers' pipeline
        does, or "viterbi", the default where the labels are tags of spans (B-, I-, E-, S-); "simple" is elsewhere. A
        text that is longer than the model takes is computed in windows which share `stride` tokens. For the numbers of
        each token, `encode` has the task "token_classify". Raises as embed() does.
        """
        several = texts_of(texts)
        finder = EntityFinder(self.engine.pooler, self._pooling.tokenizer, aggregation, ignore_labels)
        ids = [next(self._request_ids) for _ in several]
        streams = self._pooling.make_placed(several, pooling_params or PoolingParams(), stride, ids)
        return [classified(stream, finder) for stream in self._pooled(streams, use_tqdm, lora_request)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput]:
        """Score pairs of texts: `outputs.score`. `data_1` is one text for all of `data_2`, or as many texts.

        A model with a single label scores the pair itself; for an embedding model it is the cosine similarity.
        Raises as embed() does.
        """
        pairs = pairs_of(data_1, data_2)
        params = pooling_params or PoolingParams()
        if "score" in self._pooling.tasks:
            ids = [next(self._request_ids) for _ in pairs]
            return self._pool(self._pooling.make_pairs(pairs, params, ids), use_tqdm, lora_request)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = dict(zip(texts, self.embed(texts, params, use_tqdm, lora_request=lora_request), strict=True))
        scored = []
        for first, second in pairs:
            both = vectors[first], vectors[second]
            score = similarity(*(each.outputs.embedding for each in both))
            ids_of_both = [token for each in both for token in each.prompt_token_ids]
            scored.append(PoolingRequestOutput(next(self._request_ids), ScoringOutput(score), ids_of_both))
        return scored

    decide = decisions.decide

    # ---- inside

    def _operate(self, name: str, **values: object) -> None:
        session = self.launched.session
        check_done(session.wait(session.operate(operation_of(name, **values)), OPERATION_TIMEOUT_S))

    def _run(
        self,
        prompts: list[PromptLike],
        sampling_params: SamplingParamsForEach,
        use_tqdm: bool,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        self._check_awake()
        streams = self._make_streams(prompts, sampling_params, priority)
        self._set_adapters(streams, lora_request)
        self._follow(streams, use_tqdm)
        raise_errors(streams)
        return [stream.output() for stream in streams]

    def _check_awake(self) -> None:
        if self._is_asleep:  # nobody would wake it while this waits
            raise RequestError("the engine sleeps: call wake_up() first")

    def _pool(
        self, streams: list[PoolingStream], use_tqdm: bool, lora_request: LoRARequests
    ) -> list[PoolingRequestOutput]:
        return [stream.output() for stream in self._pooled(streams, use_tqdm, lora_request)]

    def _pooled(self, streams: list[PoolingStream], use_tqdm: bool, lora_request: LoRARequests) -> list[PoolingStream]:
        """Run streams to their end, and return one per text."""
        self._check_awake()
        texts = list(by_text(streams))
        self._set_adapters([own[0] for own in texts], lora_request)
        for own in texts:
            for window in own:
                window.adapter = own[0].adapter
        self._follow(streams, use_tqdm)
        whole = [joined(own) for own in texts]
        raise_errors(whole)
        return whole

    def _follow(self, streams: Sequence[AnyStream], use_tqdm: bool) -> None:
        """Send all requests and wait until they have ended."""
        inbox: SimpleQueue[list[Event]] = SimpleQueue()
        running: dict[str, AnyStream] = {}
        with TokenBar(len(streams), enabled=use_tqdm) as progress:
            try:
                for stream in streams:
                    running[stream.request_id] = stream
                    self.launched.session.submit(stream.message(), inbox.put)
                with short_slices():  # tokens must not wait for threads that compute the next ones
                    while running:
                        self._collect(inbox, running, progress)
            finally:
                for request_id in running:
                    self.launched.session.drop(request_id)

    def _make_streams(
        self,
        prompts: list[PromptLike],
        sampling_params: SamplingParamsForEach,
        priority: int | Sequence[int] | None,
    ) -> list[RequestStream]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = with_priorities(params_for_each(sampling_params, len(prompts)), priority)
        streams = []
        for place, prompt in enumerate(prompts):
            with named(f"prompt {place}" if len(prompts) > 1 else ""):
                streams.append(self._streams.make(prompt, params[place], next(self._request_ids)))
        return streams

    def _set_adapters(self, streams: Sequence[AnyStream], given: LoRARequests) -> None:
        """Give each stream its adapter, once that is loaded."""
        if isinstance(given, Sequence) and len(given) != len(streams):
            raise RequestError(f"lora_request must be one for all or one for each of {len(streams)} prompts")
        each = list(given) if isinstance(given, Sequence) else [given] * len(streams)
        session = self.launched.session
        for request in dict.fromkeys(each):
            if (asked := begin_load(session, request)) is not None:
                check_loaded(session.wait(asked, LOAD_TIMEOUT_S))
        for stream, request in zip(streams, each, strict=True):
            stream.adapter = "" if request is None else request.lora_name

    def _collect(self, inbox: SimpleQueue[list[Event]], running: dict[str, AnyStream], progress: TokenBar) -> None:
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
            stream.settle(self.launched.session)
            if stream.finished:
                del running[stream.request_id]
                progress.request()


def _append(parts: list[tuple[Mapping[str, Any], str]], part: Mapping[str, Any], where: str) -> None:
    parts.append((part, where))
