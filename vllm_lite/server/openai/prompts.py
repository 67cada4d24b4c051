"""PromptRenderer: makes prompts of bodies: texts, token ids, and messages through the chat template."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from vllm_lite.client.media.image_pool import NUM_PROCESSES
from vllm_lite.client.media.prompt_images import Pictured, PromptImages
from vllm_lite.client.media.sources import Fetch, GivenImage, image_of_part, is_of_web, url_of_part
from vllm_lite.client.prompt import (
    PromptLike,
    SpansPrompt,
    TokensPrompt,
    check_text,
    encode,
    max_text_bytes,
    too_many_bytes,
)
from vllm_lite.client.spans import Span
from vllm_lite.client.text.detokenizer import Detokenizer, TokenTexts, vocabulary
from vllm_lite.client.text.infill import Infill
from vllm_lite.client.text.templates.chat_template import with_read_arguments
from vllm_lite.client.text.templates.left_out import LeftOut, described
from vllm_lite.client.text.templates.message_parts import MAY_BE_EMPTY, Content, TakeImage, read_parts, reasoning_fields
from vllm_lite.client.text.templates.template_process import Render, Rendered
from vllm_lite.client.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from vllm_lite.errors import RequestError, VllmLiteError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.http.auth import holder_of
from vllm_lite.server.http.body import memory_of
from vllm_lite.server.http.disconnect import Threads
from vllm_lite.server.http.long_work import through
from vllm_lite.server.openai.bodies import (
    MAX_PROMPTS,
    ChatBody,
    ChatMessage,
    CompletionBody,
    TokenizeBody,
    with_warning,
)
from vllm_lite.server.openai.errors import ApiError, refused
from vllm_lite.server.openai.forms import check_depth
from vllm_lite.server.openai.rendering import Renderer, TextTooLongError
from vllm_lite.server.openai.steady import steady_message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NUM_TOKENIZERS = 2
"""Number of long texts that are tokenized at a time, each of them in about 100 MB."""
MESSAGE_NAME: Callable[[int], str] = "messages[{}]".format
"""Maps the index of a chat message to its name."""
NUM_FETCHERS = 8
"""Number of requests whose images are fetched at a time, so that a slow image server does not delay others."""
SLICE_TOKENS = 16_384
"""Number of tokens decoded at a time, in 10 ms."""

ImagePart = tuple[Mapping[str, Any], str]
"""An image part, and the name of the content that has it."""
Check = Callable[[], None]
"""Raises if the client has disconnected."""
T = TypeVar("T")
_FORMS = "a text, a list of texts, a list of token ids or a list of such lists"


def with_marks(prompts: list[PromptLike], marks: list[int] | None) -> list[PromptLike]:
    """Add the body's marks to the prompt, which must then be a single one of token ids. Raises ApiError."""
    if marks is None:
        return prompts
    if len(prompts) > 1 or not isinstance(prompts[0], list):
        raise ApiError(400, "marks count the tokens of one prompt; give it as a list of token ids", "marks")
    return [TokensPrompt(prompt_token_ids=prompts[0], marks=marks)]


class ChatPrompt(NamedTuple):
    """The token ids of a chat, and the parts of its messages that the template left out."""

    token_ids: list[int]
    left_out: tuple[LeftOut, ...]
    spans: Sequence[Span] | None = None
    """Tokens and images in order, if there are images; `token_ids` has placeholders for these."""

    @property
    def prompt(self) -> PromptLike:
        return self.token_ids if self.spans is None else SpansPrompt(spans=self.spans)

    def warned(self, headers: dict[str, str], name: Callable[[int], str] = MESSAGE_NAME) -> dict[str, str]:
        """The answer's headers, with a warning of parts that the template left out. `name` maps a message's index to
        its name."""
        return with_warning(headers, described(self.left_out, name)) if self.left_out else headers


class TemplateVariables(NamedTuple):
    """Template variables that the server sets: a chat may override `defaults`; `efforts` maps a reasoning effort to its
    replacement."""

    defaults: Mapping[str, Any] = MappingProxyType({})
    efforts: Mapping[str, str] = MappingProxyType({})


_NOTHING_TOLD = TemplateVariables()


class PromptRenderer:
    """Makes the prompts of one model. Every method raises ApiError. `request` is watched while the work waits: if its
    client disconnects, the work is dropped."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        renderer: Renderer | None,
        max_model_len: int,
        told: TemplateVariables = _NOTHING_TOLD,
        images: PromptImages | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        """`images` puts images into prompts, if the model takes any; `fetch` downloads images, if that is allowed."""
        self.tokenizer = tokenizer
        self._images = images
        self._cutters = Threads(NUM_PROCESSES, "images")
        self._fetch = fetch
        self._fetchers = Threads(NUM_FETCHERS, "fetch")
        self._told = told
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._vocabulary: TokenTexts | None = None
        self._infill: Infill | None = None
        self._threads = Threads(NUM_TOKENIZERS, "tokenizer")

    @property
    def takes_images(self) -> bool:
        return self._images is not None

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return self._renderer is not None and self._renderer.takes_tools

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self._renderer is not None

    @property
    def filler(self) -> Infill | None:
        """Makes prompts for gaps; None if the vocabulary has no tokens for them."""
        if self._infill is None and self.tokenizer is not None:
            self._infill = Infill.of(self.tokenizer)
        return self._infill

    async def of_completion(self, body: CompletionBody, params: SamplingParams, request: Request) -> list[PromptLike]:
        """Return the prompts: lists of token ids, and texts that are still to be tokenized with special tokens."""
        prompts, infill, suffix = several(body.prompt, "prompt", MAX_PROMPTS), self.infill(body), body.suffix or ""
        is_plain = body.add_special_tokens is False and any(isinstance(prompt, str) for prompt in prompts)
        if infill is None and not is_plain:
            return prompts

        def encoded(check: Check) -> list[PromptLike]:
            ids: list[Any] = [self._encoded(it, False, params, check) if isinstance(it, str) else it for it in prompts]
            if infill is None:
                return ids
            check_text(suffix, self.tokenizer, self._max_model_len, params, check)
            return [infill.prompt(before, suffix) for before in ids]

        try:
            return await self.tokenized(encoded, [*prompts, suffix], request)
        except RequestError as error:
            raise refused(error, "prompt") from error

    def infill(self, body: CompletionBody) -> Infill | None:
        """The fill-in-the-middle prompt; None without a suffix."""
        if not body.suffix:
            return None
        if body.echo:
            raise ApiError(400, "echo shows a prompt that the answer continues; a suffix comes after it", "echo")
        if body.marks is not None:
            raise ApiError(400, "marks count the tokens of a prompt as it is; a suffix makes another of it", "marks")
        if self.filler is None:
            raise ApiError(
                400, "suffix needs a model that fills in; the vocabulary of this one has no token for it", "suffix"
            )
        return self.filler

    async def of_parts(self, prompts: Sequence[Sequence[str | int]], request: Request) -> list[list[int]]:
        """Return the token ids of prompts of texts and token ids. Only a text at the beginning gets special tokens."""

        def encoded(check: Check) -> list[list[int]]:
            found = []
            for prompt in prompts:
                ids = list[int]()
                for place, part in enumerate(prompt):
                    ids += self._encoded(part, place == 0, None, check) if isinstance(part, str) else [part]
                found.append(ids)
            return found

        texts = [part for prompt in prompts for part in prompt if isinstance(part, str)]
        return await self._checked(encoded, texts, request)

    async def of_words(self, words: Sequence[str], request: Request) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        return await self._checked(
            lambda check: [self._encoded(word, False, None, check) for word in words], words, request
        )

    async def of_gap(
        self,
        filler: Infill,
        before: Sequence[str],
        behind: str,
        files: Sequence[tuple[str | None, str]],
        most: int,
        request: Request,
    ) -> list[int]:
        """Return the token ids that request the text between `before` and `behind`. `files`, names and texts, come
        first; if there are more than `most` tokens, their beginning is left out."""

        def encoded(check: Check) -> list[int]:
            ids = [token for text in before for token in self._encoded(text, False, None, check)]
            check_text(behind, self.tokenizer, self._max_model_len, None, check)
            shown = list[int]()
            for name, text in files:
                shown += filler.file(self._encoded(text if name is None else f"{name}\n{text}", False, None, check))
            return filler.prompt(ids, behind, shown, most)

        texts = [*before, behind, *(text for _, text in files)]
        return await self._checked(encoded, texts, request)

    async def _checked(self, work: Callable[[Check], T], texts: Sequence[str], request: Request) -> T:
        """As tokenized(). Raises ApiError for RequestError."""
        try:
            return await self.tokenized(work, texts, request)
        except RequestError as error:
            raise refused(error, "prompt") from error

    async def of_chat(
        self, body: ChatBody | TokenizeBody, params: SamplingParams | None, request: Request, *, sees: bool = False
    ) -> ChatPrompt:
        """Render and tokenize a chat, which must fit into the context if `params` are given. Special tokens are the
        template's, unless more are requested. `sees`: images are accepted, if the model takes them."""
        parts: list[ImagePart] | None = [] if sees and self._images is not None else None
        made = await self.render(body, params, request, parts)
        if parts:
            special = bool(body.add_special_tokens)
            pictured = await self._with_images(
                parts,
                made.text,
                lambda text, check: self._encoded(text, special, params, check),
                request,
                body.mm_processor_kwargs,
            )
            return ChatPrompt(pictured.token_ids, made.left_out, pictured.spans)
        ids = await self.of_text(made.text, bool(body.add_special_tokens), params, request, "messages")
        return ChatPrompt(ids, made.left_out)

    async def _with_images(
        self,
        parts: Sequence[ImagePart],
        text: str,
        encode: Callable[[str, Check], list[int]],
        request: Request,
        changes: Mapping[str, Any] | None,
    ) -> Pictured:
        """The prompt of a chat with images, which child processes preprocess while other requests continue."""
        owner = holder_of(request)

        def read(check: Check) -> list[GivenImage]:
            files = []
            for part, where in parts:
                check()
                files.append(image_of_part(part, where, self._fetch, owner))
            return files

        def work(check: Check) -> Pictured:
            if self._images is None:
                raise RequestError("this model does not accept images")
            return self._images.pictured(text, files or read(check), lambda text: encode(text, check), changes)

        try:
            is_fetched = self._fetch is not None and any(is_of_web(url_of_part(part)) for part, _ in parts)
            files = await self._fetchers.run(read, request.receive) if is_fetched else []
            return await self._cutters.run(work, request.receive)
        except RequestError as error:
            raise refused(error, "messages") from error

    async def of_text(
        self, text: str, add_special_tokens: bool, params: SamplingParams | None, request: Request, field: str
    ) -> list[int]:
        """Tokenize `text`, from this `field` of the body. It must fit into the context if `params` are given."""
        try:
            return await self.tokenized(
                lambda check: self._encoded(text, add_special_tokens, params, check), [text], request
            )
        except RequestError as error:
            raise refused(error, field) from error

    async def render(
        self,
        body: ChatBody | TokenizeBody,
        params: SamplingParams | None,
        request: Request,
        parts: list[ImagePart] | None = None,
    ) -> Rendered:
        """Render a chat to text, with special tokens, and find the parts that the template left out. Images are
        appended to `parts`, and refused without it."""
        if self._renderer is None:
            raise ApiError(
                400,
                "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
                "messages",
            )
        continued = bool(body.continue_final_message)
        generated = not continued if body.add_generation_prompt is None else body.add_generation_prompt
        given = body.chat_template_kwargs or {}
        size = memory_of(request)
        await through(size, partial(check_depth, given, "chat_template_kwargs", "chat_template_kwargs"))
        variables = dict(self._told.defaults)
        if isinstance(body, ChatBody) and (effort := body.reasoning_effort) is not None:
            variables["reasoning_effort"] = self._told.efforts.get(effort, effort)
        messages = _plain(body.messages or [], None if parts is None else lambda *part: parts.append(part))
        chat = Render(
            messages=list(messages.values()),
            add_generation_prompt=generated,
            continue_final_message=continued,
            variables={**variables, **given},
            max_chars=max_text_bytes(self._max_model_len),
            tools=body.tools if isinstance(body, TokenizeBody) or body.tool_choice != "none" else None,
        )

        async def is_wanted() -> bool:
            return not await request.is_disconnected()

        try:
            made = await self._renderer.render(chat, is_wanted, size)
        except TextTooLongError as error:
            raise refused(too_many_bytes(error.num_chars, self._max_model_len, params), "messages") from error
        except VllmLiteError as error:
            raise refused(error, "messages") from error
        places = list(messages)
        return Rendered(made.text, tuple(each._replace(place=places[each.place]) for each in made.left_out))

    async def tokenized(self, work: Callable[[Check], T], prompts: Sequence[PromptLike], request: Request) -> T:
        """Call `work`, which tokenizes `prompts`, in a thread if they are long."""
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= LONG_TEXT_CHARS:
            return work(lambda: None)
        return await self._threads.run(work, request.receive)

    async def beginnings(self, texts: Sequence[str], num_tokens: int, request: Request) -> list[str]:
        """Cut each text to its first `num_tokens` tokens."""
        words = self.tokenizer
        if words is None:
            return list(texts)

        def work(check: Check) -> list[str]:
            found = []
            for text in texts:
                check()
                found.append(words.beginning(text, num_tokens))
            return found

        return await self._threads.run(work, request.receive)

    async def offsets(
        self, texts: Sequence[str | None], token_ids: Sequence[list[int]], request: Request
    ) -> list[msgspec.Raw | None]:
        """Offsets of each text's tokens in characters, as JSON; None if `token_ids` are not the text's tokens."""
        words = self.tokenizer

        def work(check: Check) -> list[msgspec.Raw | None]:
            found: list[msgspec.Raw | None] = []
            for text, ids in zip(texts, token_ids, strict=True):
                check()
                places = None if text is None or words is None else words.offsets(text, ids)
                found.append(None if places is None else msgspec.Raw(msgspec.json.encode(places)))
            return found

        return await self._threads.run(work, request.receive)

    def _encoded(self, text: str, add_special_tokens: bool, params: SamplingParams | None, check: Check) -> list[int]:
        """Tokenize one text. Raises RequestError as well."""
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; give /v1/completions a prompt of token ids", "prompt")
        check()
        check_text(text, self.tokenizer, self._max_model_len, params, check)
        return encode(text, self.tokenizer, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode `token_ids`. Other tasks of the loop run between slices of a long list."""
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer, so token ids cannot be told as text")
        if len(token_ids) <= SLICE_TOKENS:
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        self._vocabulary = self._vocabulary or vocabulary(self.tokenizer)
        machine = Detokenizer(self._vocabulary, skip_special_tokens=skip_special_tokens)
        pieces = []
        for place in range(0, len(token_ids), SLICE_TOKENS):
            pieces.append(machine.feed(token_ids[place : place + SLICE_TOKENS]))
            await asyncio.sleep(0)
        return "".join([*pieces, machine.flush()])


def several(given: Any, field: str, most: int) -> list[PromptLike]:
    """Make a list of one prompt or many, at most `most`; a list of integers is one prompt. Raises ApiError, which names
    the field."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) != 1:
        raise ApiError(400, f"{field} must be {_FORMS}, got {'a mixed' if kinds else 'an empty'} list", field)
    if kinds == {int}:
        return [list(given)]
    if len(given) > most:
        raise ApiError(400, f"{field} takes a list of at most {most}, got {len(given)}", field)
    return list(given)


def _plain(messages: Sequence[ChatMessage], take_image: TakeImage | None) -> dict[int, dict[str, Any]]:
    """Convert messages for ChatTemplate, each with a text or text parts, by their index in the body."""
    plain = {}
    for place, given in enumerate(messages):
        if given.role not in ROLES:
            known = ", ".join(ROLES)
            raise ApiError(400, f"messages[{place}].role must be one of {known}, got {given.role!r}", "messages")
        if (message := steady_message(given)) is None:
            continue
        content = content_of(message, place, take_image)
        for call in message.tool_calls or ():
            check_depth(call.function.arguments, f"messages[{place}].tool_calls", "messages")
        plain[place] = {"role": message.role, "content": content.for_template, **_more(message, content)}
    return plain


def _more(message: ChatMessage, content: Content) -> dict[str, Any]:
    """Return a message's fields other than role and text, under the names that templates use."""
    more: dict[str, Any] = {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name))}
    if message.tool_calls:
        more["tool_calls"] = with_read_arguments(msgspec.to_builtins(message.tool_calls))
    reasoning = message.reasoning_content or message.reasoning or content.reasoning
    return more | reasoning_fields(reasoning, calls_behind_text=bool(message.tool_calls and content.text))


def content_of(message: ChatMessage, place: int = -1, take_image: TakeImage | None = None) -> Content:
    """Collect the texts of all parts of a message, and its reasoning."""
    content, where = message.content, f"messages[{place}].content"
    if content is None and message.role in MAY_BE_EMPTY:
        return Content(message.refusal or "")
    if content is None:
        raise ApiError(400, f"{where} is missing", "messages")
    if isinstance(content, str):
        return Content(content)
    try:
        parts = [part if isinstance(part, str) else msgspec.structs.asdict(part) for part in content]
        return read_parts(parts, where, take_image)
    except RequestError as error:
        raise ApiError(400, str(error), "messages") from error
