"""Generation: makes calls of request bodies. Each API that answers chats converts its body to a ChatBody, gets a call
from here, and writes the answer itself."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllm_lite.client.engines.any_session import AnySession
from vllm_lite.client.prompt import PromptLike, check_room, checked_ids
from vllm_lite.client.streams.stream import RequestStream, StreamFactory
from vllm_lite.errors import ContextLengthError, RequestError
from vllm_lite.protocol.adapters import AdapterInfo
from vllm_lite.protocol.params import MAX_NAME_CHARS, SamplingParams
from vllm_lite.runtime import log
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http.auth import name_of, owner_of
from vllm_lite.server.http.body import decoded
from vllm_lite.server.live_requests import LiveRequests
from vllm_lite.server.openai import bodies, forms
from vllm_lite.server.openai.bodies import ChatBody, ChatFields, ChatsBody, CompletionBody, FormFields, GenerateBody
from vllm_lite.server.openai.errors import ApiError, refused
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.forms import ToolsWanted
from vllm_lite.server.openai.grammars import GrammarBuilder
from vllm_lite.server.openai.parsing import Parsing
from vllm_lite.server.openai.prompts import MESSAGE_NAME, Check, PromptRenderer, content_of, with_marks

MAX_PROMPT_CANDIDATES = 1 << 18
"""Maximum number of candidates in the `prompt_logprobs` of one answer. As many take 100 MB, and 0.5 s of a thread."""
LATEST = ":latest"
"""Tag of names without one, for Ollama's clients."""
MAX_SHOWN = 20
"""Maximum number of model names in an error."""
NO_TOOLS = "tools: not shown to the model, whose chat template takes none"
SESSION_HEADER = "X-Session-ID"
"""Header that names the client's session: of several engines, one gets all requests of a session."""
_PROMPT_FIELDS = {"cmpl": "prompt", "chatcmpl": "messages", "gen": "token_ids"}
"""Field of the body that has the prompt, by the kind of the call."""

B = TypeVar("B", bound=msgspec.Struct)

logger = log.get(__name__)


@dataclass
class ServedModel:
    """The served model and its names. `path` is another name, accepted but not listed; `defaults` are SamplingParams
    for fields that a request omits; `root` is the model that the names stand for. Adapters are models with names of
    their own; `session` knows the current ones."""

    names: tuple[str, ...]
    path: str | None
    max_model_len: int
    defaults: dict[str, Any]
    formats: dict[str, Any] = field(default_factory=dict)
    root: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    session: AnySession | None = None

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that requests can name."""
        return {} if self.session is None else self.session.adapters

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names in lists of models: the model's, then the adapters'."""
        return *self.names, *self.adapters

    def adapter_of(self, name: str) -> str:
        """The adapter of this name, with or without Ollama's tag; "" for the model itself."""
        if name in self.names or name == self.path:
            return ""
        return next((each for each in (name, name.removesuffix(LATEST)) if each in self.adapters), "")

    def name(self, wanted: str | None) -> str:
        """Return the model name for the answer. Raises ApiError for a model that is not served."""
        if wanted is not None and wanted not in (*self.names, self.path) and wanted not in self.adapters:
            shown = ", ".join(self.all_names[:MAX_SHOWN])
            raise ApiError(
                404, f"the model {wanted[:MAX_NAME_CHARS]!r} does not exist; this server has {shown}", "model"
            )
        return wanted or self.names[0]

    def card(self, name: str) -> dict[str, Any]:
        adapter = self.adapters.get(self.adapter_of(name))
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "vllm_lite",
            "root": self.root or self.names[0] if adapter is None else adapter.path,
            "parent": None if adapter is None else adapter.parent or self.names[0],
            "max_model_len": self.max_model_len,
            "permission": [],
            "vllm_lite": self.formats,
        }


class Asked(NamedTuple, Generic[B]):
    """A decoded body that requests tokens; `headers` and the `model` name are for its answer."""

    request: Request
    body: B
    headers: dict[str, str]
    model: str
    named: Callable[[int], str] = MESSAGE_NAME
    """Maps the index of a chat message to its name in the body, for errors."""


class Made(NamedTuple):
    """A call that has not been started, and the headers of its answer."""

    call: Call
    headers: dict[str, str]


class Generation:
    """Makes the calls of this server without starting them. Every method raises ApiError."""

    def __init__(
        self,
        config: ServeConfig,
        model: ServedModel,
        factory: StreamFactory,
        prompts: PromptRenderer,
        live: LiveRequests,
        formats: Formats | None = None,
    ) -> None:
        """`formats` describe the model's tool calls and reasoning; None for a model without a tokenizer."""
        self.model = model
        self.prompts = prompts
        self.live = live
        self._config = config
        self._factory = factory
        self._formats = formats
        self._grammars = GrammarBuilder(formats, config.tool_strict_level)
        self._has_warned = False

    async def read(self, request: Request, kind: type[B]) -> Asked[B]:
        """Read and decode the body. Raises ApiError also if no call may start now."""
        return await self.asked(request, await self.live.reader.receive(request), kind)

    async def asked(self, request: Request, data: bytes, kind: type[B]) -> Asked[B]:
        """Decode a body. Raises ApiError also if no call may start now."""
        body, headers = await decoded(data, kind)
        name = self.model.name(getattr(body, "model", None))
        self.live.calls.check()
        return Asked(request, body, headers, name)

    async def completion(self, asked: Asked[CompletionBody], call_id: str | None = None) -> Made:
        """Make the call of a completion; `call_id` as for chat()."""
        request, body = asked.request, asked.body
        params = bodies.sampling(body, self.model.defaults, _completion_changes(body))
        params, notes = await self._grammars.held(_budgeted(params, body), forms.form_of(body), None, request)
        prompts = with_marks(await self.prompts.of_completion(body, params, request), body.marks)
        if (infill := self.prompts.infill(body)) is not None and not params.ignore_eos:
            params = bodies.changed(params, stop_token_ids=[*params.stop_token_ids, *infill.ends])
        if len(prompts) * params.n > bodies.MAX_CHOICES:
            raise ApiError(400, f"n times the prompts are {len(prompts) * params.n}; at most {bodies.MAX_CHOICES}", "n")
        asked = _noting(asked, notes)
        return await self._made(asked, prompts, params, echo=None if body.echo else (), call_id=call_id)

    async def chat(self, asked: Asked[ChatBody], call_id: str | None = None) -> Made:
        """Make the call of a chat. `call_id`: a unique id that the caller has made in the form of its API. Forks of
        such a call are answered as chats."""
        request, body = asked.request, asked.body
        self._check_generates()
        params = bodies.sampling(body, {"max_tokens": None, **self.model.defaults}, _chat_changes(body))
        tools, form = forms.tools_of(body), forms.form_of(body)
        params, notes = await self._grammars.held(_budgeted(params, body), form, tools, request)
        found = await self.prompts.of_chat(body, params, request, sees=True)
        parsing = None
        if self._formats is not None:
            parsing = _parsing(self._formats, body, tools)
            params = self._thinking(params, found.token_ids, is_forced=parsing is not None and parsing.is_forced)
        last = body.messages[-1]
        echo = (content_of(last).text,) if body.echo and last.role == "assistant" else ()
        headers = self._unseen(tools, found.warned(_noting(asked, notes).headers, asked.named))
        return await self._made(asked._replace(headers=headers), [found.prompt], params, echo, parsing, call_id)

    async def chats(self, asked: Asked[ChatsBody]) -> Made:
        """Make the call of several chats, with a choice for each."""
        request, body = asked.request, asked.body
        self._check_generates()
        for name in ("stream", "tools", "use_beam_search"):
            if getattr(body, name):
                raise ApiError(400, f"{name} is not supported for several chats at once; send each of them alone", name)
        fields = {name: getattr(body, name) for name in ChatFields.__struct_fields__}
        chats = [ChatBody(**{**fields, "messages": messages}) for messages in body.messages]
        params = bodies.sampling(body, {"max_tokens": None, **self.model.defaults}, _chat_changes(body))
        if params.n != 1:
            raise ApiError(400, f"n must be 1 for several chats at once, got {params.n}", "n")
        params, notes = await self._grammars.held(_budgeted(params, body), forms.form_of(body), None, request)
        prompts, headers = list[list[int]](), _noting(asked, notes).headers
        for place, chat in enumerate(chats):
            found = await self.prompts.of_chat(chat, params, request)
            headers = found.warned(headers, f"messages[{place}][{{}}]".format)
            prompts.append(found.token_ids)
        parsing = None
        if self._formats is not None:
            parsing = _parsing(self._formats, chats[0], None)
            params = self._thinking(params, prompts[0], is_forced=False)
        return await self._made(asked._replace(headers=headers), prompts, params, (), parsing)

    async def tokens(self, asked: Asked[GenerateBody]) -> Made:
        request, body, given = asked.request, asked.body, asked.body.sampling_params
        has_text = bool(given.stop) or body.output_mode == "text"
        if has_text and given.detokenize is False:
            text = "stop strings and output_mode text need detokenize, which is false; leave it out"
            raise ApiError(400, text, "detokenize")
        if body.output_mode == "text" and self.prompts.tokenizer is None:
            raise ApiError(400, "output_mode text needs a tokenizer, which this server does not have", "output_mode")
        changes: dict[str, Any] = {"logprobs": given.logprobs, "detokenize": has_text}
        changes |= {name: value for name in ("cache_salt", "priority") if (value := getattr(body, name)) is not None}
        params = bodies.sampling(given, {"max_tokens": None, **self.model.defaults}, changes)
        params, notes = await self._grammars.held(_budgeted(params, given), forms.form_of(given), None, request)
        asked = _noting(asked, notes)
        return await self._made(asked, with_marks([body.token_ids], body.marks), params)

    def replayed(self, body: ChatBody | CompletionBody, model: str, call_id: str, prompts: Sequence[list[int]]) -> Call:
        """A call without an engine, to be given the tokens that others have generated for `body`."""
        changes = _chat_changes(body) if isinstance(body, ChatBody) else _completion_changes(body)
        params = bodies.sampling(body, {"max_tokens": None}, {**changes, "prompt_logprobs": None})
        style = AnswerStyle.of(body, model)
        parsing = None
        if isinstance(body, ChatBody) and self._formats is not None:
            parsing = _parsing(self._formats, body, forms.tools_of(body))
        style = msgspec.structs.replace(
            style, parsing=parsing, prompt_logprobs=False, only_scores=False, resumable=False
        )
        return Call(call_id, [self._factory.replayed(call_id, ids, params) for ids in prompts], style)

    def respond(self, made: Made, asked: Asked[Any]) -> Response:
        """The response that starts a call, streamed if its body asks for that. Raises ApiError if it cannot be resumed
        as asked."""
        return self.live.respond(made.call, stream=asked.body.stream, headers=made.headers)

    @property
    def generates(self) -> bool:
        """Whether the model generates text."""
        return self._factory.limits.pooler.generates

    def checked_ids(self, token_ids: list[int], field: str) -> list[int]:
        """The ids in `field` of a body, if all are in the vocabulary. Raises ApiError."""
        try:
            return checked_ids(token_ids, self._factory.limits.vocab_size)
        except RequestError as error:
            raise refused(error, field) from error

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self._factory.limits.eos_token_ids)

    @property
    def knows_thinking(self) -> bool:
        """Whether the format of the model's reasoning is known."""
        return self._formats is not None and self._formats.reasoning is not None

    def _check_generates(self) -> None:
        """Raise ApiError if the model generates no text. A chat checks this before it misses a template, as encoders
        have none."""
        try:
            self._factory.check_generates()
        except RequestError as error:
            raise refused(error, "messages") from error

    def _thinking(self, params: SamplingParams, prompt: Sequence[int], *, is_forced: bool) -> SamplingParams:
        """Let the grammar and the thinking budget know where the model's reasoning ends."""
        if self._formats is None or (params.grammar is None and params.thinking_token_budget is None):
            return params
        thinking = self._formats.thinking(prompt, is_forced=is_forced)
        return params if thinking is None else bodies.changed(params, thinking=thinking)

    def _unseen(self, tools: ToolsWanted | None, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers, with a warning if the chat template does not show the model its tools."""
        if tools is None or self.prompts.shows_tools:
            return headers
        if not self._has_warned:
            self._has_warned = True
            logger.warning("a request has tools, and the model's chat template shows it none: %s", NO_TOOLS)
        return bodies.with_warning(headers, NO_TOOLS)

    async def _made(
        self,
        asked: Asked[Any],
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        echo: tuple[str, ...] | None = (),
        parsing: Parsing | None = None,
        call_id: str | None = None,
    ) -> Made:
        """Make a call. `echo` precedes each prompt's answers; None for the prompt's own text."""
        style = AnswerStyle.of(asked.body, asked.model)
        names_ids = getattr(asked.body, "return_tokens_as_token_ids", None)
        if self._config.return_tokens_as_token_ids if names_ids is None else names_ids:
            style = msgspec.structs.replace(style, names_ids=True)
        if self._config.enable_force_include_usage:
            style = style.with_usage()
        call_id = call_id or await self.live.new_id(style.kind, asked.body.request_id, asked.request)
        owner = owner_of(asked.request, call_id)
        streams = await self._streams(name_of(call_id, owner), style.kind, prompts, params, asked.request)
        adapter = self.model.adapter_of(asked.model)
        for stream in streams:
            stream.adapter = adapter
        echo = tuple(await self._texts(streams)) if echo is None else echo
        call = Call(call_id, streams, msgspec.structs.replace(style, echo=echo, parsing=parsing), owner=owner)
        call.affinity = asked.request.headers.get(SESSION_HEADER)
        return Made(call, asked.headers)

    async def _streams(
        self, name: str, kind: str, prompts: Sequence[PromptLike], params: SamplingParams, request: Request
    ) -> list[RequestStream]:
        """Make the streams of the call `name`, without starting them. Raises ApiError."""
        ids = self.live.calls.stream_ids(name, len(prompts))

        def made(check: Check) -> list[RequestStream]:
            streams = []
            for place, (prompt, stream_id) in enumerate(zip(prompts, ids, strict=True)):
                check()
                try:
                    streams.append(self._factory.make(prompt, params, stream_id, check))
                except RequestError as error:
                    if len(prompts) > 1 and (isinstance(error, ContextLengthError) or not bodies.field_of(str(error))):
                        error.args = (f"{_PROMPT_FIELDS[kind]}[{place}]: {error}",)
                    raise
            return streams

        try:
            streams = await self.prompts.tokenized(made, prompts, request)
            if params.max_tokens != self.model.defaults.get("max_tokens"):  # the model's own is cut without an error
                check_room([stream.prompt for stream in streams], params.max_tokens, self.model.max_model_len)
        except RequestError as error:
            raise refused(error, bodies.field_of(str(error), _PROMPT_FIELDS[kind])) from error
        check_scores(streams)
        if self._config.enable_log_requests:
            for stream in streams:
                logger.info("%s: tokens %s, %s", stream.request_id, stream.prompt.token_ids, params)
        return streams

    async def _texts(self, streams: Sequence[RequestStream]) -> list[str]:
        """Return the prompts of `streams` as texts."""
        texts = []
        for stream in streams:
            skip, text, ids = stream.params.skip_special_tokens, stream.prompt.text, stream.prompt.token_ids
            texts.append(await self.prompts.decode(ids, skip_special_tokens=skip) if text is None else text)
            await asyncio.sleep(0)
        return texts


def _noting(asked: Asked[B], places: Sequence[str]) -> Asked[B]:
    """Add the parts of a schema that are not enforced to the answer's headers."""
    return asked._replace(headers=bodies.warned(asked.headers, "not held", places))


def check_scores(streams: Sequence[RequestStream]) -> None:
    """Raise ApiError for more prompt logprobs than one answer may have."""
    wanted = streams[0].params.prompt_logprobs
    if wanted is None:
        return
    length = sum(len(stream.prompt.token_ids) for stream in streams)
    if length * (wanted + 1) > MAX_PROMPT_CANDIDATES:
        text = f"prompt_logprobs of {wanted} for {length} prompt tokens are {length * (wanted + 1)} candidates"
        raise ApiError(400, f"{text}; an answer has at most {MAX_PROMPT_CANDIDATES}", "prompt_logprobs")


def _budgeted(params: SamplingParams, body: FormFields) -> SamplingParams:
    """Set the params' thinking budget to that of `body`, if any. Raises ApiError."""
    budget = forms.thinking_budget(body)
    return params if budget is None else bodies.changed(params, thinking_token_budget=budget)


def _parsing(formats: Formats, body: ChatBody, tools: ToolsWanted | None) -> Parsing | None:
    """The parsing of a chat's answers into calls, reasoning and content; None if all of it is content."""
    parsing = Parsing(
        tools=() if tools is None else tuple(tools.given),
        is_forced=tools is not None and tools.is_forced,
        is_named=tools is not None and tools.mode == "named",
        parallel=tools is None or tools.parallel or tools.mode == "named",
        include_reasoning=body.include_reasoning is not False,
        num_calls_before=sum(len(message.tool_calls or ()) for message in body.messages),
    )
    return parsing if formats.finds(parsing.tools, is_forced=parsing.is_forced) else None


def _completion_changes(body: CompletionBody) -> dict[str, Any]:
    """Return the sampling params that have other names in a completion's body. Raises ApiError."""
    bodies.check_named(body, has_logprobs=body.logprobs is not None)
    changes: dict[str, Any] = {"logprobs": None if body.logprob_token_ids else body.logprobs}
    if body.only_scores:  # the engine always samples a token, which the answer leaves out
        changes |= {"max_tokens": 1, "min_tokens": 0}
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise ApiError(400, "echo with logprobs is not supported in a stream", "echo")
        changes["prompt_logprobs"] = body.logprobs
    return changes


def _chat_changes(body: ChatFields) -> dict[str, Any]:
    """Return the sampling params that have other names in a chat's body. Raises ApiError."""
    bodies.check_named(body, has_logprobs=bool(body.logprobs))
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    if body.top_logprobs == -1:
        raise bodies.too_many_logprobs("top_logprobs")
    has_top = body.logprobs and not body.logprob_token_ids
    changes: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if has_top else None}
    if body.max_completion_tokens is not None:
        changes["max_tokens"] = body.max_completion_tokens
    return changes
