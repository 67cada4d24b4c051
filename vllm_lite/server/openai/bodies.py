"""Request bodies of OpenAI's API, as structs, and the table of other fields that are refused.

Sampling fields are passed on to SamplingParams. A field that would change the answer but is not supported is refused by
name, unless its value has no effect. Any other field is ignored, and named in the answer's Warning header.
"""

import re
from collections.abc import Iterable
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from vllm_lite.protocol.params import MAX_BIASES, MAX_LOGPROBS, MAX_NAME_CHARS, SamplingParams
from vllm_lite.server.openai.decoding import Fields, decode, top_level
from vllm_lite.server.openai.errors import ApiError

MAX_PROMPTS = 1024
MAX_WARNING_CHARS = 2048
"""No warning is added to a header longer than this; clients refuse headers of 8 KiB and more."""
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 256
MAX_CHOICES = 1024
"""Maximum number of choices of one request, over all its prompts."""
_UNSAFE = re.compile(r"[^\w.\[\]#/:'$~ -]")
MAX_NAMED, MAX_NAMED_CHARS = 16, 120
"""Maximum number of names in one Warning, and of characters of each."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
"""A name that the engine's decoder accepts: a message that it cannot decode gets no answer."""

_FORM = {"structured_outputs", "thinking_token_budget", "grammar", "thinking"}
_NOT_PASSED_ON = {"logprobs", "bad_words_token_ids", "detokenize", "extra_args", "output_kind", *_FORM}
"""Fields of SamplingParams that are not generated for bodies: each API declares its own logprobs, the others are for
Python only."""

if TYPE_CHECKING:
    _PassedOn = msgspec.Struct
else:
    _HINTS = get_type_hints(SamplingParams)  # without bounds: SamplingParams gives better errors than a decoder
    _PassedOn = msgspec.defstruct(
        "_PassedOn",
        [(name, hint | None, None) for name, hint in _HINTS.items() if name not in _NOT_PASSED_ON],
        frozen=True,
        kw_only=True,
    )


class SamplingFields(_PassedOn, frozen=True, kw_only=True):
    """The fields of SamplingParams, generated from its declaration and passed on to it; None: not given.

    Fields written out here are read or bounded by the server itself, or accept more values: `max_tokens` may be 0,
    `seed` negative. A decoder would not name the invalid key of `logit_bias`.
    """

    n: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: Name | None = None
    cache_salt: Name | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=MAX_BIASES)] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None


class FormFields(SamplingFields, frozen=True, kw_only=True):
    """Constraints on the output's form, under all the names that clients use; forms.py reads them. Forks refuse
    them."""

    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None
    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None


RequestId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.:-]+$(?!\n)")]
"""The lookahead is needed because Python's `$` also matches before a final line end."""


class ForkBody(FormFields, frozen=True, kw_only=True):
    """POST /v1/requests/{id}/fork: `n` branches; omitted fields are those of the forked request."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    resumable: bool | None = None
    request_id: RequestId | None = None
    return_token_ids: bool | None = None


class Body(ForkBody, frozen=True, kw_only=True):
    """Fields that completions and chats share: a fork's fields, and these. `return_token_offsets` is for /render."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_offsets: bool | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    marks: list[int] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def only_scores(self) -> bool:
        """Whether the answer has only the prompt, with its logprobs if requested, and no generated token."""
        return bool(self.echo) and self.max_tokens == 0


class Part(msgspec.Struct, frozen=True):
    """A part of a message's content; `type` says which field it has. Includes the types in answers, which come back in
    a chat's history."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[dict[str, Any]] | None = None
    image_url: str | dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    uuid: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """A called function; `arguments` are an object, or a JSON text as in OpenAI's API."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """A chat message. `reasoning` and `reasoning_content` are two names for the reasoning before an answer. A `refusal`
    takes the place of an answer's content."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[str | Part] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
Variables = dict[str, Any]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class ToolFunction(msgspec.Struct, frozen=True):
    """A function that a model may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, frozen=True):
    """The checked part of an entry of `tools`; the template gets the whole entry."""

    function: ToolFunction
    type: Literal["function"] = "function"


class ChatFields(Body, frozen=True, kw_only=True):
    """Fields of a chat other than its messages."""

    echo: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Name | None = None
    include_reasoning: bool | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: Variables | None = None


class ChatBody(ChatFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages


class ChatsBody(ChatFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions/batch: several chats, with one choice of the answer for each."""

    messages: Annotated[list[Messages], Meta(min_length=1, max_length=MAX_PROMPTS)]


class GenerateParams(FormFields, frozen=True, kw_only=True):
    """Sampling fields of POST /inference/v1/generate."""

    logprobs: int | None = None
    detokenize: bool | None = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /inference/v1/generate: token ids in, token ids out; with `output_mode` "text" also their text."""

    token_ids: list[int]
    token_offsets: Any = None
    marks: list[int] | None = None
    sampling_params: GenerateParams = GenerateParams()
    model: str | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    resumable: bool | None = None
    request_id: RequestId | None = None
    cache_salt: Name | None = None
    priority: int | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: either a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: Variables | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /abort_requests."""

    request_ids: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=MAX_PROMPTS)]


class UpdateWeightsBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /update_weights: new weights of the same model, in a folder. vLLM's `update_info` describes a transfer, and
    is refused."""

    model: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    mode: Literal["abort", "wait", "keep"] | None = None
    update_info: Any = None


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter. `lora_path` is a folder on the engine's host."""

    lora_name: Annotated[str, Meta(max_length=256)] = ""
    lora_path: Annotated[str, Meta(max_length=4096)] = ""
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(max_length=256)] = ""
    lora_int_id: int | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


SAMPLING = SamplingFields.__struct_fields__
FORM = frozenset(FormFields.__struct_fields__) - frozenset(SAMPLING)
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_ALWAYS_REFUSED = """
audio chat_template custom_logit_processor documents ebnf features functions logits_processors lora_path prediction
previous_input_messages prompt_embeds regex repetition_detection return_hidden_states return_prompt_text structural_tag
trace_decode_token_ids watermarking web_search_options
"""
_OFF_AT_0 = """
dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff mirostat mirostat_mode no_repeat_ngram_size smoothing_factor
top_a xtc_probability
"""
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ALWAYS_REFUSED.split(), ()),
    **dict.fromkeys(_OFF_AT_0.split(), (0,)),
    "function_call": ("none",),
    "modalities": (["text"],),
    "padding": ("do_not_pad",),
    "tfs": (1,),
    "typical_p": (1,),
    "verbosity": ("medium",),
}
"""Unsupported fields that would change the answer, and the values, besides NOTHING, that have no effect."""

_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(FORM, ()),
    "suffix": (),
    "response_format": ({"type": "text"},),
    "thinking_token_budget": (-1,),
    "max_thinking_tokens": (-1,),
    "tools": (),
    "tool_choice": ("none", "auto"),
}
"""Fields that only some bodies have; the others refuse them. A fork keeps the constraints of its request."""

_REASONS = {
    "chat_template": ": templates come from the model or the server's --chat-template, never from a request",
    "functions": ": send them as tools",
    "function_call": ": send it as tool_choice",
    "regex": ": send it as structured_outputs",
    "ebnf": ": send it as structured_outputs",
    "padding": ": a text is read at its own length",
    "previous_input_messages": ": send previous_response_id, or all as input",
    "structural_tag": ": send it as structured_outputs or response_format",
}

_SPELLINGS = {
    bool: {
        **dict.fromkeys((b"1.0", b'"yes"', b'"y"', b'"on"', b'"t"'), msgspec.Raw(b"true")),
        **dict.fromkeys((b"0.0", b'"no"', b'"n"', b'"off"', b'"f"'), msgspec.Raw(b"false")),
    },
    int: {b"true": msgspec.Raw(b"1"), b"false": msgspec.Raw(b"0")},
}
_SPELLINGS[float] = _SPELLINGS[int]
"""Values that pydantic accepts and msgspec does not, and their replacements; by the type of the field."""
MAX_SPELLING = max(len(spelling) for known in _SPELLINGS.values() for spelling in known)

B = TypeVar("B", bound=msgspec.Struct)


def read(data: bytes, kind: type[B]) -> tuple[B, list[str]]:
    """Decode a body. Returns it and the names of ignored fields. Raises ApiError."""
    data, fields = top_level(data)
    ignored = _ignored(fields, kind)
    respelled = _respelled(fields, kind)
    if kind is GenerateBody and bytes(memoryview(fields.get("sampling_params", b""))[:1]) == b"{":
        inner = decode(fields["sampling_params"], Fields)
        ignored += _ignored(inner, GenerateParams)
        if more := _respelled(inner, GenerateParams):
            respelled["sampling_params"] = msgspec.Raw(msgspec.json.encode({**inner, **more}))
    body: B = decode(msgspec.json.encode({**fields, **respelled}) if respelled else data, kind)
    return body, ignored


def fields_of(kind: type[msgspec.Struct]) -> set[str]:
    """Return the names of the fields that a body accepts."""
    return set(kind.__struct_fields__) - (FORM if kind is ForkBody else frozenset())


def _respelled(fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct]) -> dict[str, msgspec.Raw]:
    """Return the fields with a value in _SPELLINGS, with the value that msgspec accepts."""
    spellings, found = _spellings(kind), dict[str, msgspec.Raw]()
    for name, raw in fields.items():
        known = spellings.get(name)
        if known is not None and memoryview(raw).nbytes <= MAX_SPELLING:
            respelled = known.get(bytes(raw).lower())
            if respelled is not None:
                found[name] = respelled
    return found


@cache
def _spellings(kind: type[msgspec.Struct]) -> dict[str, dict[bytes, msgspec.Raw]]:
    """Return the spellings for each field that is a flag or a number."""
    hints = get_type_hints(kind)
    return {name: known for name, hint in hints.items() for each, known in _SPELLINGS.items() if hint == each | None}


def _ignored(fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct]) -> list[str]:
    """Return the names of ignored fields. Raises ApiError for one that is refused."""
    known = fields_of(kind)
    for name in fields.keys() - known:
        harmless = REFUSED.get(name, _ELSEWHERE.get(name))
        if harmless is not None and not _means_nothing(decode(fields[name], Any), harmless):
            where = "by this server" if name in REFUSED else "here"
            raise ApiError(400, f"{name} is not supported {where}{_REASONS.get(name, '')}", name)
    return sorted(fields.keys() - known - REFUSED.keys() - _ELSEWHERE.keys())


def _means_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether a refused field has no effect with this value. 0 is not False here: as a limit it has an effect."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in (*NOTHING, *harmless))


def warning(ignored: Iterable[str]) -> dict[str, str]:
    """The Warning header that names ignored fields. Clients choose the names, so only safe characters are kept."""
    return warned({}, "ignored", ignored)


def warned(headers: dict[str, str], what: str, names: Iterable[str]) -> dict[str, str]:
    """`headers` with a Warning that `what` applies to `names`; unchanged if there are none."""
    safe = [
        _UNSAFE.sub("?", name.encode("ascii", "replace").decode())[:MAX_NAMED_CHARS]
        for name in islice(names, MAX_NAMED)
    ]
    return with_warning(headers, f"{what}: {', '.join(safe)}") if safe else headers


def with_warning(headers: dict[str, str], text: str) -> dict[str, str]:
    """`headers` with one more Warning, if there is room for it. `text` must be ASCII without quotes."""
    before = f"{headers['Warning']}, " if "Warning" in headers else ""
    return headers if len(before) > MAX_WARNING_CHARS else {**headers, "Warning": f'{before}299 vllm-lite "{text}"'}


def sampling(body: SamplingFields, defaults: dict[str, Any], changes: dict[str, Any]) -> SamplingParams:
    """Make the sampling params: `changes` override the fields of `body`, which override `defaults`. Raises ApiError."""
    given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    for name in ("logprobs", "prompt_logprobs"):
        if changes.get(name, given.get(name)) == -1:
            raise too_many_logprobs(name)
    if body.logit_bias:
        given["logit_bias"] = {key: _number(bias) for key, bias in body.logit_bias.items()}
    if isinstance(body.seed, int) and body.seed < 0:  # OpenAI's seeds are signed
        given["seed"] = body.seed % 2**64
    try:
        return SamplingParams(**{**defaults, **given, **changes})
    except (ValueError, TypeError) as error:
        text, field = str(error), field_of(str(error))
        if getattr(body, "max_completion_tokens", None) is not None:  # which gave max_tokens
            text = re.sub(r"\bmax_tokens\b", "max_completion_tokens", text)
            field = "max_completion_tokens" if field == "max_tokens" else field
        raise ApiError(400, text, field) from error


def _number(value: Any) -> Any:
    """Convert a text that is a number; return anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def check_named(body: SamplingFields, *, has_logprobs: bool) -> None:
    """Raise ApiError for `logprob_token_ids` without logprobs, or without output tokens."""
    if not body.logprob_token_ids:
        return
    if not has_logprobs:
        raise ApiError(400, "logprob_token_ids needs logprobs", "logprob_token_ids")
    if body.max_tokens == 0:
        raise ApiError(400, "logprob_token_ids needs output tokens, and max_tokens is 0", "logprob_token_ids")


def too_many_logprobs(name: str) -> ApiError:
    """The error for -1, which requests the logprobs of the whole vocabulary."""
    text = f"{name} of -1 are those of the whole vocabulary; an answer has at most {MAX_LOGPROBS} for each token"
    return ApiError(400, text, name)


def changed(params: SamplingParams, **changes: Any) -> SamplingParams:
    """Copy `params` with `changes`. Raises ApiError if they conflict with others."""
    try:
        return msgspec.structs.replace(params, **changes)
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), field_of(str(error))) from error


def field_of(message: str, default: str | None = None) -> str | None:
    """The field that an error of the client library or the engine is about: its first word, or a field that it
    names."""
    names = SamplingParams.__struct_fields__
    words = re.findall(r"\w+", message)
    if words and words[0] in names:
        return str(words[0])
    return next((word for word in words if "_" in word and word in names), default)
