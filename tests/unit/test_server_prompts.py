"""Bodies to prompts and back: roles of a chat, arguments of the template, limits of length, and many tokens that are
read without blocking the loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest
from starlette.requests import Request

from tests.tokenizers_for_tests import KINDS
from vllm_lite.client.chat import plain_messages
from vllm_lite.client.media.prompt_images import Pictured, PromptImages
from vllm_lite.client.media.sources import GivenImage
from vllm_lite.client.prompt import max_text_bytes, read_prompt
from vllm_lite.client.spans import Text
from vllm_lite.client.streams import sample
from vllm_lite.client.streams.sample import PromptScores, candidates
from vllm_lite.client.streams.stream import StreamFactory
from vllm_lite.client.text.templates.chat_template import ChatTemplate
from vllm_lite.client.text.templates.template_process import Render, Rendered
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.client.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import PromptLogprobs, TokenLogprobs, Welcome
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server import generation
from vllm_lite.server.openai import bodies
from vllm_lite.server.openai import prompts as server_prompts
from vllm_lite.server.openai.bodies import ChatBody, CompletionBody, TokenizeBody
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.prompts import ROLES, PromptRenderer, TemplateVariables, with_marks
from vllm_lite.server.openai.rendering import Renderer, TextTooLongError

LIMITS = Welcome(1, 1, "x", 8192, 2048, (1, 4), 100, 16)
REQUEST = Request({"type": "http", "method": "POST", "headers": []})


class Here:
    """A Renderer that renders in this process."""

    template = ChatTemplate(
        TemplateSource(
            "{% for each in messages %}{{ each.role }}:{{ each.content }}"
            "{% for call in each.tool_calls %}[{{ call.id }} {{ call.function.name }} {{ call.function.arguments.x }}]"
            "{% endfor %}{{ each.tool_call_id }}{{ each.reasoning_content }};{% endfor %}{{ reasoning_effort }}"
            "{% for tool in tools or [] %}({{ tool.function.name }}{{ tool.extra }}){% endfor %}"
            "{% if deep %}{{ deep.in[0] }}{% endif %}"
        )
    )
    takes_tools = True

    async def render(self, chat: Render, _: Callable[[], Awaitable[bool]], num_bytes: int = 0) -> Rendered:
        del num_bytes
        made = self.template.rendering(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=chat.variables,
            tools=chat.tools,
        )
        if len(made.text) > chat.max_chars:
            raise TextTooLongError("too long", len(made.text))
        return Rendered(*made)


PROMPTS = PromptRenderer(None, cast(Renderer, Here()), LIMITS.max_model_len)


async def rendered(
    *roles: str, kind: type[ChatBody] | type[TokenizeBody] = ChatBody, prompts: PromptRenderer = PROMPTS, **fields: Any
) -> str:
    messages = [{"role": role, "content": "x"} for role in roles]
    body = bodies.read(msgspec.json.encode({"messages": messages, **fields}), kind)[0]
    return (await prompts.render(body, None, REQUEST)).text


@pytest.mark.parametrize("role", ROLES)
async def test_a_known_role_is_given_to_the_template(role: str) -> None:
    """A developer's as the system's, by a template that does not name it."""
    assert await rendered("user", role) == f"user:x;{'system' if role == 'developer' else role}:x;"


@pytest.mark.parametrize("role", ["narrator", "User", "user ", "system\n"])
@pytest.mark.parametrize("kind", [ChatBody, TokenizeBody])
async def test_an_unknown_role_is_refused(role: str, kind: Any) -> None:
    with pytest.raises(ApiError) as caught:
        await rendered("user", role, kind=kind)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert caught.value.message == f"messages[1].role must be one of {', '.join(ROLES)}, got {role!r}"


async def test_the_template_gets_the_reasoning_effort() -> None:
    assert await rendered("user", reasoning_effort="low") == "user:x;low"
    assert await rendered("user", reasoning_effort=None) == "user:x;"
    assert (
        await rendered("user", reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
        == "user:x;high"
    )


async def test_an_effort_unknown_to_the_template_is_replaced() -> None:
    prompts = PromptRenderer(
        None, cast(Renderer, Here()), LIMITS.max_model_len, TemplateVariables({}, {"xhigh": "max"})
    )
    assert await rendered("user", prompts=prompts, reasoning_effort="xhigh") == "user:x;max"
    assert await rendered("user", prompts=prompts, reasoning_effort="low") == "user:x;low"


async def test_variables_of_the_request_override_the_servers() -> None:
    """The chat's own variables win, by either of its fields."""
    prompts = PromptRenderer(
        None, cast(Renderer, Here()), LIMITS.max_model_len, TemplateVariables({"reasoning_effort": "server"})
    )
    assert await rendered("user", prompts=prompts) == "user:x;server"
    assert await rendered("user", prompts=prompts, reasoning_effort="low") == "user:x;low"
    assert await rendered("user", prompts=prompts, chat_template_kwargs={"reasoning_effort": "high"}) == "user:x;high"
    assert await rendered("user", prompts=prompts, kind=TokenizeBody) == "user:x;server"


TOOLS = [{"type": "function", "function": {"name": "f"}, "extra": "!"}]


@pytest.mark.parametrize("kind", [ChatBody, TokenizeBody])
async def test_the_template_gets_tools_unchanged(kind: Any) -> None:
    assert await rendered("user", kind=kind, tools=TOOLS) == "user:x;(f!)"
    assert await rendered("user", kind=kind, tools=[]) == "user:x;"


async def test_tools_that_may_not_be_called_are_not_shown() -> None:
    assert await rendered("user", tools=TOOLS, tool_choice="none") == "user:x;"


@pytest.mark.parametrize(("arguments", "seen"), [('{"x": 5}', "5"), ({"x": 5}, "5"), ("[1]", ""), ('{"x"', "")])
async def test_earlier_calls_come_to_the_template(arguments: Any, seen: str) -> None:
    """Templates want arguments as an object; what is none stays the text that it was."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    body = bodies.read(msgspec.json.encode({"messages": messages}), ChatBody)[0]
    assert (await PROMPTS.render(body, None, REQUEST)).text == f"assistant:[c1 f {seen}]hm;tool:7c1;"


HISTORY = [  # an assistant's message as a client sends it back, the text and the thought that templates get of it
    ({"content": None, "refusal": "I will not."}, "I will not.", ""),
    ({"content": "yes", "refusal": None}, "yes", ""),
    ({"content": [{"type": "refusal", "refusal": "no"}]}, "no", ""),
    ({"content": [{"type": "output_text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]}, "a\nb\nc", ""),
    (
        {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "so"}]},
        "so",
        "hm",
    ),
    ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}, "", "hm"),
    ({"content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "so"}]}, "so", ""),
    ({"content": "so", "reasoning_content": "hm", "thinking_blocks": [{"type": "thinking"}]}, "so", "hm"),
]


@pytest.mark.parametrize(("message", "text", "thought"), HISTORY)
async def test_fields_of_an_answer_may_be_sent_back(message: dict[str, Any], text: str, thought: str) -> None:
    """Over HTTP and in Python alike."""
    messages = [{"role": "assistant", **message}]
    body = bodies.read(msgspec.json.encode({"messages": messages}), ChatBody)[0]
    assert (await PROMPTS.render(body, None, REQUEST)).text == f"assistant:{text}{thought};"
    (plain,) = plain_messages(messages)
    texts = plain["content"] if isinstance(plain["content"], str) else [part["text"] for part in plain["content"]]
    assert texts == text or "\n".join(texts) == text
    assert plain.get("reasoning_content", "") == thought


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "thinking"}, "holds 'thinking' without a text as its 'thinking'"),
        ({"type": "thinking", "thinking": [{"type": "text"}]}, "thinking holds 'text' without a text as its 'text'"),
        ({"type": "refusal", "text": "no"}, "holds 'refusal' without a text as its 'refusal'"),
        ({"type": "x" * 1000}, f"holds {'x' * 60!r}; only text is supported"),
    ],
)
async def test_a_part_without_its_text_is_refused(part: dict[str, Any], error: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [part]}]
    body = bodies.read(msgspec.json.encode({"messages": messages}), ChatBody)[0]
    with pytest.raises(ApiError) as caught:
        await PROMPTS.render(body, None, REQUEST)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert caught.value.message.startswith("messages[1].content")
    assert caught.value.message.endswith(error)


async def test_arguments_of_earlier_calls_may_be_nested_but_not_deeply() -> None:
    deep: Any = 1
    for _ in range(70):
        deep = {"in": deep}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": deep}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = bodies.read(msgspec.json.encode({"messages": messages}), ChatBody)[0]
    with pytest.raises(ApiError, match=r"^messages\[1\]\.tool_calls is nested more than 64 deep"):
        await PROMPTS.render(body, None, REQUEST)


async def test_variables_of_a_template_may_be_nested_but_not_deeply() -> None:
    assert await rendered("user", chat_template_kwargs={"deep": {"in": [5]}}) == "user:x;5"
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(ApiError, match=r"^chat_template_kwargs is nested more than 64 deep"):
        await rendered("user", chat_template_kwargs={"deep": deep})


@pytest.mark.parametrize("kind", [ChatBody, TokenizeBody])
@pytest.mark.parametrize("cut", [None, -1, 5])
async def test_a_chat_that_exceeds_the_context_is_an_overflow(kind: Any, cut: int | None) -> None:
    """Except for prompts that are truncated or only tokenized, which are limited by bytes alone."""
    num_bytes = max_text_bytes(LIMITS.max_model_len) + 32
    message = {"role": "user", "content": "x" * (num_bytes - len("user:;"))}
    body = bodies.read(msgspec.json.encode({"messages": [message]}), kind)[0]
    params = SamplingParams(max_tokens=3, truncate_prompt_tokens=cut) if kind is ChatBody else None
    with pytest.raises(ApiError) as caught:
        await PROMPTS.of_chat(body, params, REQUEST)
    error = caught.value
    assert (error.status, error.param) == (400, "messages")
    if params is None or cut is not None:
        assert (error.code, error.message[:35]) == (None, f"the prompt has {num_bytes} bytes; at most"[:35])
        return
    assert error.code == "context_length_exceeded"
    assert f"requested 3 output tokens and your prompt contains at least {num_bytes // 32} input" in error.message


@pytest.mark.parametrize("texts", [["x" * 600_000], ["x", " the" * 20_000]])
async def test_texts_that_exceed_the_context_are_an_overflow(texts: list[str]) -> None:
    prompts = PromptRenderer(Tokenizer(KINDS["byte level"]()), None, 512)
    body = bodies.read(msgspec.json.encode({"prompt": texts, "add_special_tokens": False}), CompletionBody)[0]
    request = Request({"type": "http", "method": "POST", "headers": []}, asyncio.Event().wait)  # type: ignore[arg-type]
    with pytest.raises(ApiError) as caught:
        await prompts.of_completion(body, SamplingParams(), request)
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    assert caught.value.code == "context_length_exceeded"


async def test_long_words_are_tokenized_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, threads = Tokenizer(KINDS["byte level"]()), set[int]()
    wanted, encode = tokenizer.encode("the", add_special_tokens=False), Tokenizer.encode

    def noted(*args: Any, **options: Any) -> list[int]:
        threads.add(threading.get_ident())
        return encode(*args, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    request = Request({"type": "http", "method": "POST", "headers": []}, asyncio.Event().wait)  # type: ignore[arg-type]
    words = ["the", "x" * LONG_TEXT_CHARS]
    assert (await PromptRenderer(tokenizer, None, 512).of_words(words, request))[0] == wanted
    assert threads
    assert threading.get_ident() not in threads


# ---- memory of one answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
async def test_many_ids_are_decoded_in_slices(kind: str, skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same text; no slice is larger than one may be, and the loop has its turn behind each."""
    monkeypatch.setattr(server_prompts, "SLICE_TOKENS", 7)
    tokenizer = Tokenizer(KINDS[kind]())
    ids = tokenizer.encode("the cat sat. été 🙂 the 猫" * 20)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    text = await PromptRenderer(tokenizer, None, 8192).decode(ids, skip_special_tokens=skip)
    ticking.cancel()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert turns >= len(ids) // 7


def test_candidates_are_made_when_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def seen(tokenizer: Any, token_id: int, entry: TokenLogprobs, **asked: Any) -> Any:
        made.append(token_id)
        return candidates(tokenizer, token_id, entry, **asked)

    monkeypatch.setattr(sample, "candidates", seen)
    scores = PromptScores(None, [7, 8, 9, 10])
    entry = TokenLogprobs(-1.0, 1, ((5, -1.0),))
    scores.take(PromptLogprobs(1, [entry]))
    scores.take(PromptLogprobs(1, [entry, entry]))  # the first of them again
    assert (made, scores.complete) == ([], False)
    assert [list(found or ()) for found in scores.entries] == [[], [8, 5], [9, 5]]
    scores.take(PromptLogprobs(3, [entry, entry]))  # one more than there are tokens
    assert scores.complete
    assert [list(found or ()) for found in scores.entries] == [[], [8, 5], [9, 5], [10, 5]]
    assert made == [8, 9, 10]


def marks_of(given: Any, *, is_hybrid: bool = True, **params: Any) -> tuple[int, ...]:
    limits = msgspec.structs.replace(LIMITS, wants_marks=is_hybrid)
    return read_prompt(given, None, limits, SamplingParams(**params)).marks


def test_given_marks_replace_detected_ones() -> None:
    ids = [5, 6, 4, 7, 8, 1, 9]
    assert marks_of(ids) == (3, 6)
    assert marks_of({"prompt_token_ids": ids, "marks": None}) == (3, 6)
    (given,) = with_marks([ids], [2, 7])
    assert marks_of(given) == (2, 7)
    assert marks_of(given, is_hybrid=False) == (2, 7), "those of its user are of use to any model"
    assert marks_of(ids, is_hybrid=False) == ()
    assert marks_of(given, truncate_prompt_tokens=3) == (3,), "they count from where the prompt is cut"
    assert marks_of(given, truncate_prompt_tokens=3, truncation_side="right") == (2,), "the others are cut off"
    assert marks_of({"prompt_token_ids": ids, "marks": []}) == ()


@pytest.mark.parametrize("marks", [[0], [8], [3, 3], [4, 2], [True], [1.0], ["1"]])
def test_marks_that_do_not_fit_are_refused(marks: list[Any]) -> None:
    with pytest.raises(RequestError, match=r"^marks must ascend from 1 to at most 7, the prompt's tokens; got "):
        marks_of({"prompt_token_ids": [5] * 7, "marks": marks}, is_hybrid=False)


def test_marks_are_of_one_prompt_of_token_ids() -> None:
    for prompts in (["a text"], [[1], [2]]):
        with pytest.raises(ApiError, match="marks count the tokens of one prompt"):
            with_marks(cast(Any, prompts), [1])
    with pytest.raises(RequestError, match="marks count tokens, so they need prompt_token_ids"):
        marks_of({"prompt": "a text", "marks": [1]})
    with pytest.raises(RequestError, match="marks must be a list of at most 4096 numbers of tokens, got 4097"):
        marks_of({"prompt_token_ids": [5] * 7, "marks": [1] * 4097})
    with pytest.raises(RequestError, match="marks must be a list of at most 4096 numbers of tokens, got int"):
        marks_of({"prompt_token_ids": [5] * 7, "marks": 3})


def test_the_number_of_candidates_in_an_answer_is_limited() -> None:
    factory = StreamFactory(LIMITS, None)
    for wanted, num_prompts in ((None, 64), (0, 64), (64, 1), (31, 2)):
        params = SamplingParams(prompt_logprobs=wanted)
        generation.check_scores([factory.make([1] * 4000, params, str(place)) for place in range(num_prompts)])
    params = SamplingParams(prompt_logprobs=32)
    with pytest.raises(ApiError, match="32 for 8000 prompt tokens are 264000 candidates; an answer has at most 262144"):
        generation.check_scores([factory.make([1] * 4000, params, str(place)) for place in range(2)])


# ---- images


class Seen:
    """A fake PromptImages that records the images."""

    def __init__(self) -> None:
        self.given: list[tuple[list[GivenImage], Any]] = []

    def pictured(
        self, text: str, images: list[GivenImage], encode: Callable[[str], list[int]], changes: Any
    ) -> Pictured:
        del text, encode
        self.given.append((list(images), changes))
        return Pictured([1, 2], [Text([1, 2])])


async def test_a_uuid_is_the_senders_own() -> None:
    """The uuids of one key are not those of another, and the stored name does not reveal the key."""
    seen = Seen()
    prompts = PromptRenderer(None, cast(Renderer, Here()), 100, images=cast(PromptImages, seen))
    part = {"type": "image_url", "image_url": None, "uuid": "cat"}
    asked = {"messages": [{"role": "user", "content": [part]}], "mm_processor_kwargs": {"max_pixels": 5}}
    body = bodies.read(msgspec.json.encode(asked), ChatBody)[0]

    async def ask(key: bytes) -> None:
        scope = {"type": "http", "method": "POST", "headers": [], "vllm_lite.key": key}

        async def receive() -> Any:
            await asyncio.Event().wait()

        await prompts.of_chat(body, None, Request(scope, receive), sees=True)

    for key in (b"mine", b"yours", b"mine", b""):
        await ask(key)
    owners = [images[0].owner for images, _ in seen.given]
    assert owners[0] == owners[2]
    assert len({*owners}) == 3
    assert owners[3] == ""
    assert not any("mine" in owner or "yours" in owner for owner in owners)
    assert all(
        images == [GivenImage(None, "cat", owner)] for (images, _), owner in zip(seen.given, owners, strict=True)
    )
    assert [changes for _, changes in seen.given] == [{"max_pixels": 5}] * 4
