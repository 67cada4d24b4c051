"""Parsed chats: content, reasoning and calls as a client gets them, streamed, whole and resumed."""

import json
import random
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import msgspec
import pytest
import tokenizers

from tests.unit import resumable_stage
from tests.unit.resumable_stage import Stage, events_in, settle
from vllm_lite.client.streams.sample import Cursor
from vllm_lite.client.streams.stream import StreamFactory
from vllm_lite.client.text.detokenizer import Mark
from vllm_lite.client.text.response.events import CallDelta, OutputPiece
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.protocol.api import Finished, TokenLogprobs, Tokens, Welcome
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.structured import Thinking
from vllm_lite.server.calls.call import Call, CallContext
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.openai.bodies import ChatBody, ChatMessage
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.openai.parsed import Writers
from vllm_lite.server.openai.parsing import CallIds, Parsing, ThinkingCount, pieces


def _tokenizer() -> Tokenizer:
    """The demo model's, with the literals of hermes and Qwen as added tokens, some of them special."""
    library = tokenizers.Tokenizer.from_file(str(files("vllm_lite") / "demo_model" / "tokenizer.json"))
    library.add_tokens(["<tool_call>", "</tool_call>"])
    library.add_special_tokens(["<think>", "</think>"])
    return Tokenizer(library.to_str().encode())


TOKENIZER = _tokenizer()
WELCOME = msgspec.structs.replace(Welcome(1, 1, "demo", 2048, 2048, (1, 4), 100, 16), vocab_size=4096)
FACTORY = StreamFactory(WELCOME, TOKENIZER)
FORMATS = Formats.of("", TOKENIZER, ("hermes", "qwen3"), None, ())
TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "the \N{BEAR FACE} cave"}}\n</tool_call>'
TRANSCRIPT = f"<think>I want to look. Twice.</think>\n\nI will look.\n{CALL}\n{CALL}"
BODY: dict[str, Any] = {"messages": [ChatMessage("user", "Hi")]}


END = TOKENIZER.added_tokens["<|end|>"]


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class ParsedStage(Stage):
    """A server that takes answers apart."""

    def begin(self, parsing: Parsing, *, echo: str = "", prompt: str = "", n: int = 1, **fields: Any) -> Any:
        sampling = {name: fields.pop(name) for name in ("logprobs", "stop", "skip_special_tokens") if name in fields}
        body = ChatBody(**BODY, **{"stream": True, "resumable": True, **fields})
        style = msgspec.structs.replace(AnswerStyle.of(body, "demo"), parsing=parsing, echo=(echo,) if echo else ())
        wanted = SamplingParams(max_tokens=100, seed=1, n=n, **sampling)
        stream = FACTORY.make(
            tokens(f"<|user|>Hi<|assistant|>{prompt}"), wanted, self.calls.stream_ids("chatcmpl-1", 1)[0]
        )
        call = Call("chatcmpl-1", [stream], style)
        call.created = 1
        return self._reads(self.live.respond(call, stream=fields.get("stream", True), headers={}))


async def on_stage(play: Callable[[ParsedStage], Any], **how: Any) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(resumable_stage, "FACTORY", FACTORY)
    try:
        stage = ParsedStage(**how)
        stage.live.writers = Writers(Spelling(TOKENIZER), FORMATS)
        return await play(stage)
    finally:
        patch.undo()


async def say(stage: ParsedStage, ids: Sequence[int], cuts: Sequence[int], reason: Any = "stop", **more: Any) -> None:
    """The engine generates `ids`, cut into messages, and an end token unless it has another `reason` to end."""
    ids = [*ids, END] if reason == "stop" else ids
    name, at = next(iter(stage.session.sinks)), 0
    index, scores = more.get("index", 0), more.get("logprobs")
    for end in (*cuts, len(ids)):
        part = list(ids[at:end])
        entries = [TokenLogprobs(-0.5, 1, ((token, -0.5),)) for token in part] if scores else None
        if end == len(ids):
            await stage.say(Finished(name, at, part, reason, None, None, 0, entries, index))
        elif part:
            await stage.say(Tokens(name, at, part, entries, index))
        at = end


def message_of(chunks: Sequence[str], index: int = 0) -> dict[str, Any]:
    """Join the chunks of one choice as a client does."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": [], "scores": 0, "usage": None}
    for each in chunks:
        if each == "[DONE]":
            continue
        chunk = json.loads(each)
        found["usage"] = chunk.get("usage") or found["usage"]
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(found["calls"])
                    assert call["type"] == "function"
                    found["calls"].append([call["id"], call["function"]["name"], ""])
                found["calls"][call["index"]][2] += call["function"]["arguments"]
            found["scores"] += len((choice["logprobs"] or {}).get("content", ()))
            if choice["finish_reason"] is not None:
                found["finish"].append(choice["finish_reason"])
    return found


async def streamed(
    transcript: str = TRANSCRIPT,
    parsing: Parsing | None = None,
    *,
    cuts: Sequence[int] | None = None,
    reason: str = "stop",
    **fields: Any,
) -> dict[str, Any]:
    ids = tokens(transcript)

    async def play(stage: ParsedStage) -> list[str]:
        client = stage.begin(Parsing(TOOLS) if parsing is None else parsing, **fields)
        await settle()
        await say(stage, ids, range(1, len(ids)) if cuts is None else cuts, reason, logprobs="logprobs" in fields)
        await client.ended()
        return [data for _, data in events_in(client.data)]

    return message_of(await on_stage(play))


# ---- deltas that a client gets


async def test_an_answer_is_taken_apart() -> None:
    found = await streamed()
    assert found["reasoning"] == "I want to look. Twice."
    assert found["content"].strip() == "I will look."
    assert [name for _, name, _ in found["calls"]] == ["look", "look"]
    assert [json.loads(arguments) for *_, arguments in found["calls"]] == [{"where": "the \N{BEAR FACE} cave"}] * 2
    assert found["finish"] == ["tool_calls"]
    ids = [call_id for call_id, *_ in found["calls"]]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") and len(each) == 29 for each in ids)


async def test_arguments_come_piecewise() -> None:
    """The name as soon as it is known, and arguments as they are generated."""
    ids = tokens(CALL)

    async def play(stage: ParsedStage) -> list[str]:
        client = stage.begin(Parsing(TOOLS))
        await settle()
        await say(stage, ids, range(1, len(ids)))
        await client.ended()
        return [data for _, data in events_in(client.data)]

    deltas = [json.loads(each)["choices"][0]["delta"] for each in (await on_stage(play))[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert len(calls) > 5
    assert ["id" in call for call in calls] == [True] + [False] * (len(calls) - 1)


async def test_the_answer_does_not_depend_on_token_batches() -> None:
    expected, ids, rng = await streamed(), tokens(TRANSCRIPT), random.Random(1)
    for _ in range(5):
        cuts = sorted(rng.sample(range(1, len(ids)), rng.randrange(len(ids) - 1)))
        assert await streamed(cuts=cuts) == expected


@pytest.mark.parametrize("n", [1, 2])
async def test_a_whole_answer_is_the_same(n: int) -> None:
    streams = await streamed()
    ids = tokens(TRANSCRIPT)

    async def play(stage: ParsedStage) -> Any:
        client = stage.begin(Parsing(TOOLS), stream=False, resumable=False, n=n)
        await settle()
        for index in range(n):
            await say(stage, ids, [5], index=index)
        await client.ended()
        return json.loads(client.data)

    answer = await on_stage(play)
    for index in range(n):
        message = answer["choices"][index]["message"]
        assert answer["choices"][index]["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning"]) == (streams["content"], streams["reasoning"])
        assert message["reasoning_content"] == message["reasoning"]
        found = [
            [call["id"], call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]
        ]
        assert [each[1:] for each in found] == [each[1:] for each in streams["calls"]]
        assert (found == streams["calls"]) is (index == 0)
        assert all(set(call) == {"id", "type", "function"} for call in message["tool_calls"])
    assert answer["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": n * len(tokens("<think>I want to look. Twice.</think>"))
    }


async def test_content_is_null_beside_nothing_but_calls() -> None:
    async def play(stage: ParsedStage) -> Any:
        client = stage.begin(Parsing(TOOLS), stream=False, resumable=False)
        await settle()
        await say(stage, tokens(CALL), [])
        await client.ended()
        return json.loads(client.data)

    message = (await on_stage(play))["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning"] is None
    assert len(message["tool_calls"]) == 1


async def test_text_that_spells_a_token_is_text() -> None:
    """The tokens of the demo model's own alphabet spell the literal; only the added token is one."""
    spelled = [token for letter in "<tool_call>" for token in tokens(letter)]
    assert TOKENIZER.added_tokens["<tool_call>"] not in spelled

    async def play(stage: ParsedStage) -> list[str]:
        client = stage.begin(Parsing(TOOLS))
        await settle()
        await say(stage, [*spelled, *tokens('{"name": "look", "arguments": {}}')], [])
        await client.ended()
        return [data for _, data in events_in(client.data)]

    found = message_of(await on_stage(play))
    assert found["content"] == '<tool_call>{"name": "look", "arguments": {}}'
    assert (found["calls"], found["finish"]) == ([], ["stop"])


@pytest.mark.parametrize(
    ("parsing", "changes"),
    [
        (Parsing(TOOLS, include_reasoning=False), {"reasoning": ""}),
        (Parsing(TOOLS, is_named=True), {"finish": ["stop"]}),
    ],
)
async def test_answers_depend_on_the_requests_parsing(parsing: Parsing, changes: dict[str, Any]) -> None:
    assert await streamed(parsing=parsing) == {**await streamed(), **changes}


async def test_only_one_call_is_sent_if_only_one_is_allowed() -> None:
    found, all_of_it = await streamed(parsing=Parsing(TOOLS, parallel=False)), await streamed()
    assert found == {**all_of_it, "calls": all_of_it["calls"][:1]}


async def test_without_tools_calls_are_content() -> None:
    found = await streamed(parsing=Parsing())
    assert found["content"].strip() == TRANSCRIPT.split("</think>")[1].strip()
    assert (found["calls"], found["finish"]) == ([], ["stop"])


async def test_a_prompt_may_have_begun_the_thinking() -> None:
    found = await streamed("I want</think>Yes.", prompt="<think>\n", stream_options=None)
    assert (found["reasoning"].strip(), found["content"].strip()) == ("I want", "Yes.")


async def test_the_continued_message_is_echoed() -> None:
    found = await streamed(" there.", echo="Hi", prompt="<|im_start|>assistant\nHi")
    assert found["content"] == "Hi there."


async def test_an_answer_that_is_cut_keeps_its_beginning() -> None:
    ids = tokens(TRANSCRIPT)
    cut = TOKENIZER.decode(ids[: -len(tokens("</tool_call>")) - 6], skip_special_tokens=False)
    found = await streamed(cut, reason="length")
    assert found["finish"] == ["length"]
    assert len(found["calls"]) == 2
    assert json.loads(found["calls"][0][2])
    assert found["calls"][0][2].startswith(found["calls"][1][2].rstrip("\N{REPLACEMENT CHARACTER}"))


async def test_a_call_that_was_cut_before_its_name_is_content() -> None:
    found = await streamed('<tool_call>\n{"na', reason="length")
    assert (found["content"], found["calls"], found["finish"]) == ('<tool_call>\n{"na', [], ["length"])


async def test_logprobs_are_those_of_all_tokens() -> None:
    found = await streamed(logprobs=1)
    assert found["scores"] == len([*tokens(TRANSCRIPT), END])
    assert {**found, "scores": 0} == await streamed()


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_do_not_tell_the_reasoning_that_is_not_shown(stream: bool) -> None:
    ids = tokens(TRANSCRIPT)

    async def play(stage: ParsedStage) -> str:
        hidden = Parsing(TOOLS, include_reasoning=False)
        client = stage.begin(hidden, logprobs=1, return_token_ids=True, stream=stream, resumable=stream)
        await settle()
        await say(stage, ids, range(1, len(ids)), logprobs=True)
        await client.ended()
        return str(client.data, "utf-8")

    told = await on_stage(play)
    assert ("will look" in told) is not stream
    assert '"name":"look"' in told
    assert not re.search(r'"(logprob|bytes)":|"token_ids":\[\d|Twice', told)


async def test_stop_strings_are_looked_for_in_all_text_except_special_tokens() -> None:
    assert (await streamed(stop=["look. Twice"]))["reasoning"].strip() == "I want to"
    assert (await streamed(stop=["Twice.\n\nI will"]))["content"].strip() == ""
    found = await streamed(stop=["</think>", "will look"])
    assert found["content"].strip() == "I"
    assert found["finish"] == ["stop"]


async def test_a_tag_that_could_begin_a_stop_string_is_still_one() -> None:
    """A tag that may begin a stop string is held back until it is decided: half of the tag would be text."""
    expected = await streamed()
    assert await streamed(stop=["<tool_call>never"]) == expected
    assert await streamed(stop=["ll>\nnever", "call>never"]) == expected


# ---- streams that are gone on with


@pytest.mark.parametrize(("logprobs", "count"), [(None, None), (1, None), (None, 2), (1, 3)])
async def test_a_stream_continues_after_any_of_its_events(logprobs: int | None, count: int | None) -> None:
    """Also if one of `count` deltas has reasoning, text and calls: each event has an id of its own."""
    ids = tokens(TRANSCRIPT)
    cuts = range(1, len(ids)) if count is None else range(len(ids) // count, len(ids), len(ids) // count)
    fields: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}

    async def play(stage: ParsedStage) -> tuple[list[tuple[str, str]], list[list[str]]]:
        first = stage.begin(Parsing(TOOLS), stream_options=None, **fields)
        await settle()
        await say(stage, ids, cuts, logprobs=logprobs is not None)
        await first.ended()
        assert first.data.count(b"id: ") == first.data.count(b"data: ")
        events, rests = events_in(first.data), []
        for last, _ in events[:-1]:
            again = await stage.resume(last=last)
            await again.ended()
            rests.append([data for _, data in events_in(again.data)])
        return events, rests

    events, rests = await on_stage(play)
    expected = message_of([data for _, data in events])
    for place, rest in enumerate(rests):
        before = [data for _, data in events[: place + 1]]
        assert message_of([*before, *rest]) == expected
        assert rest[-1] == "[DONE]"


def test_another_server_takes_the_same_apart() -> None:
    """Another server gets the parsing of a call from its context."""
    style = msgspec.structs.replace(
        AnswerStyle.of(ChatBody(**BODY), "demo"), parsing=Parsing(TOOLS, num_calls_before=3)
    )
    call = Call("chatcmpl-1", [FACTORY.make([5], SamplingParams(), "1")], style)
    context = msgspec.msgpack.decode(msgspec.msgpack.encode(call.context(0)), type=CallContext)
    assert context.style == style
    big = {"type": "function", "function": {"name": "look", "parameters": {"description": "x" * 70_000}}}
    call.style = msgspec.structs.replace(style, parsing=Parsing((big,)), resumable=True)
    small = call.context(0).style
    assert small.parsing is not None
    assert small.parsing.tools == ({"type": "function", "function": {"name": "look"}},)
    assert not small.resumable


# ---- the parts


def test_pieces_are_cut_at_added_tokens() -> None:
    stream = FACTORY.make([5], SamplingParams(max_tokens=100), "1")
    ids = tokens("a<think>b</think><tool_call>c")
    cursor = Cursor(0, stream.samples[0])
    found: list[OutputPiece] = []
    for place, token in enumerate(ids):
        stream.apply(Tokens("1", place, [token]))
        if (delta := cursor.delta()) is not None:
            found += pieces(delta)
    added = TOKENIZER.added_tokens
    tags = [
        OutputPiece("", added["<think>"]),
        OutputPiece("", added["</think>"]),
        OutputPiece("<tool_call>", added["<tool_call>"]),
    ]
    assert found == [OutputPiece("a"), tags[0], OutputPiece("b"), *tags[1:], OutputPiece("c")]
    whole = stream.output().outputs[0]
    assert pieces(whole) == found
    assert whole.marks[0] == Mark(1, 1, 1, added["<think>"])


@pytest.mark.parametrize(("name", "start", "length"), [("hermes", "call_", 29), ("mistral", "", 9), ("", "call_", 29)])
def test_ids_of_calls_are_always_the_same(name: str, start: str, length: int) -> None:
    call = CallDelta(1, "look", "{}")
    made = CallIds(name, "chatcmpl-1/5/0", 2).of(call)
    assert made == CallIds(name, "chatcmpl-1/5/0", 9).of(call)
    assert made != CallIds(name, "chatcmpl-1/5/1", 2).of(call)
    assert made.startswith(start)
    assert len(made) == length
    assert made.replace("_", "").isalnum()


def test_the_ids_of_kimi_count_on() -> None:
    assert CallIds("kimi_k2", "x", 2).of(CallDelta(1, "look", "{}")) == "functions.look:3"


@pytest.mark.parametrize(
    ("thinking", "ids", "count"),
    [
        (None, [1, 2, 3], 0),
        (Thinking(end=(2,), begin=(1,)), [1, 5, 6, 2, 7], 4),
        (Thinking(end=(2,), begin=(1,)), [5, 6, 7], 0),
        (Thinking(end=(2,), begin=(1,)), [1, 5, 6], 3),
        (Thinking(end=(2, 3), begin=(1, 1)), [1, 1, 2, 2, 3, 7], 5),
        (Thinking(end=(2,), is_open=True), [5, 6, 2, 7, 5], 3),
    ],
)
def test_tokens_of_reasoning_are_counted(thinking: Thinking | None, ids: list[int], count: int) -> None:
    counter = ThinkingCount(thinking)
    for token in ids:
        counter.feed([token])
    assert counter.count == count
