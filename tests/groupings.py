"""Outputs of every shipped format through the writers of four dialects, grouped into deltas in any way.

A client must get the same items however many tokens the engine happens to send at once. `python -m tests.groupings
10000` tries that many random groupings and prints the number of those that made a difference.
"""

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from tests.response_events import events_of
from tests.response_transcripts import MESSAGES, TOOLS, WRITERS
from tests.scripted import END, tokenizer_of
from vllm_lite.client.streams.stream import StreamFactory
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.protocol.api import Finished, TokenLogprobs, Tokens, Welcome
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.messages.answers import MessageWriter
from vllm_lite.server.ollama.answers import OllamaWriter
from vllm_lite.server.openai.bodies import ChatBody, ChatMessage
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.openai.parsed import Writers
from vllm_lite.server.openai.parsing import Parsing
from vllm_lite.server.responses.event_log import EventLog
from vllm_lite.server.responses.output import Output, OutputStyle
from vllm_lite.server.responses.toolbox import Toolbox

Item = tuple[Any, ...]
"""("reasoning", text), ("text", text), ("call", name, arguments), and the reason for which the answer ended."""


@dataclass
class Case:
    """One output: tokens of the vocabulary of `format`, and the reason of its end."""

    format: str
    ids: list[int]
    reason: str = "stop"
    stop: str | None = None
    begun: str = ""
    parsing: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return rig(self.format).tokenizer.decode(self.ids, skip_special_tokens=False)


class Rig:
    """Parts of a server that serves a model of one format."""

    def __init__(self, name: str) -> None:
        self.writer = writer = WRITERS[name]
        rng = random.Random(name)
        self.texts = [text for each in MESSAGES.values() if (text := writer.write(each))]
        cuts = [cut(text, writer.tokens, rng) for text in [*self.texts, *hostile(name, rng)]]
        library, ids = tokenizer_of([part for parts in cuts for part in parts], writer.tokens, special=writer.special)
        self.tokenizer = Tokenizer(library.to_str().encode())
        self.outputs = [[ids[part] for part in parts] for parts in cuts]
        self.end = ids[END]
        size = max(ids.values()) + 1
        welcome = msgspec.structs.replace(Welcome(1, 1, "m", 2**17, size, (self.end,), 100, 16), vocab_size=size)
        self.factory = StreamFactory(welcome, self.tokenizer)
        self.spelling = Spelling(self.tokenizer)
        self.writers = Writers(self.spelling, Formats.of("", self.tokenizer, writer.names, None, ()))

    def call(self, case: Case, *, logprobs: bool) -> Call:
        body = ChatBody(messages=[ChatMessage("user", "Hi")], stream=True)
        parsing = Parsing(tuple(TOOLS), **case.parsing)
        style = msgspec.structs.replace(AnswerStyle.of(body, "m"), parsing=parsing, token_ids=True)
        prompt = self.tokenizer.encode(f"Hi{case.begun}", add_special_tokens=False)
        stop = [] if case.stop is None else [case.stop]
        wanted = SamplingParams(max_tokens=2**16, seed=1, stop=stop, logprobs=1 if logprobs else None)
        call = Call("chatcmpl-1", [self.factory.make(prompt, wanted, "1")], style)
        call.created = 1
        return call


@cache
def rig(name: str) -> Rig:
    return Rig(name)


# ---- outputs


def cut(text: str, tokens: Sequence[str], rng: random.Random) -> list[str | bytes]:
    """Cut a text into tokens: the added ones, and between them up to 12 bytes, which may end inside a character."""
    pattern = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    parts: list[str | bytes] = []
    for part in re.split(f"({pattern})", text) if tokens else [text]:
        if part in tokens:
            parts.append(part)
            continue
        data, most = part.encode(), rng.choice([1, 3, 12])
        while data:
            size = rng.randint(1, most)
            parts.append(data[:size])
            data = data[size:]
    return parts


def hostile(name: str, rng: random.Random) -> list[str]:
    """Hostile text: text between and after calls, invalid calls, reasoning that does not end, parts in any order."""
    writer = WRITERS[name]
    one, two = writer.calls([("get_weather", {"city": "Paris"})]), writer.calls([("now", {})])
    texts = [
        f"First.\n\n{one}\n\nSecond. {two} Third.",
        f"{one}Behind it.{two}",
        f"  \n{one}\n{two}\n  ",
        f"{one[: len(one) * 2 // 3]}",
        f"{one[:-3]} {two[:-2]} and so on",
        one.replace('"', "'", 1) + two,
        one.replace("get_weather", "get weather") + one,
        f"A {one[:12]} B {one[: len(one) // 2]}{two}{one}",
        one + " " * 1100 + two + "\n" * 1100 + "End.",
    ]
    if writer.think is not None:
        thought = writer.think("Let me see.\n")
        begun = thought[: thought.index("see") + 4]
        texts += [
            begun,
            f"{begun}\n{one}",
            f"{begun} {one}\n{two}\n",
            f"{begun} {one} no, {two}",
            f"{begun} {one[:-4]}",
            f"{begun} {one}{thought}So {two} is it.{thought}",
            f"{thought}{one}{thought}{two}Done.",
            f"{begun} {writer.calls([('no_such_tool', {})])}",
            f"{begun} {one[:15]} {one[:15]} {two}",
        ]
    usual = [text for each in MESSAGES.values() if (text := writer.write(each)) and len(text) < 500]
    for _ in range(12):
        parts = [
            text[a : a + rng.randint(1, 60)]
            for text in rng.sample(usual + texts[:8], 5)
            for a in range(0, len(text), 40)
        ]
        rng.shuffle(parts)
        texts.append("".join(parts[:12]))
    return texts


def random_case(rng: random.Random) -> Case:
    name = rng.choice(list(WRITERS))
    made = rig(name)
    ids = rng.choice(made.outputs)
    case = Case(name, ids, rng.choice(["stop", "stop", "length"]))
    if rng.random() < 0.3:
        case.ids = ids[: rng.randint(0, len(ids))]
    if rng.random() < 0.2 and case.ids:
        text, at = case.text, rng.randrange(max(1, len(case.text)))
        case.stop = text[at : at + rng.randint(1, 6)].strip("\N{REPLACEMENT CHARACTER}") or None
    think = made.writer.think
    if think is not None and rng.random() < 0.2:
        case.begun = think("x").split("x", 1)[0].strip()
    if rng.random() < 0.2:
        case.parsing = {rng.choice(["parallel", "include_reasoning"]): False}
    return case


def random_cuts(case: Case, rng: random.Random) -> list[int]:
    """Choose where deltas end: a few long ones, or nearly as many as there are tokens."""
    count = len(case.ids)
    return sorted(rng.sample(range(1, count), rng.randint(0, count - 1))) if count > 1 else []


# ---- an output through a dialect


def spoken(case: Case, cuts: Sequence[int], read: Callable[[Call], None], call: Call) -> None:
    """Let the engine send the output in messages that end at `cuts`; `read` is called after each."""
    made, stream = rig(case.format), call.streams[0]
    ids = [*case.ids, made.end] if case.reason == "stop" else case.ids
    scored = stream.params.logprobs is not None
    at = 0
    for end in [*cuts, len(ids)]:
        part = ids[at:end]
        scores = [TokenLogprobs(-0.5, 1, ((token, -0.5),)) for token in part] if scored else None
        if end == len(ids):
            stream.apply(Finished("1", at, part, case.reason, None, None, 0, scores))  # type: ignore[arg-type]
        else:
            stream.apply(Tokens("1", at, part, scores))
        if stream.finished or part:
            read(call)
        at = end


def chat(case: Case, cuts: Sequence[int]) -> list[Item]:
    """Check the order of a stream's chunks. Returns the items that a client assembles from them."""
    made = rig(case.format)
    call = made.call(case, logprobs=True)
    writer = made.writers.of(call)
    chunks: list[Any] = []

    def read(call: Call) -> None:
        for choice, delta in call.reading.deltas():
            lines = writer.chunk(choice, delta).decode().split("\n\n")[:-1]
            chunks.extend(json.loads(line.removeprefix("data: "))["choices"][0] for line in lines)

    spoken(case, cuts, read, call)
    items: list[Item] = []
    scores, ids = 0, list[int]()
    for chunk in chunks:
        delta = chunk["delta"]
        ids += chunk.get("token_ids", ())
        assert len(delta.keys() - {"reasoning_content"}) <= 1, "one chunk has one kind"
        scores += len((chunk["logprobs"] or {}).get("content", ()))
        _add_text(items, "reasoning", delta.get("reasoning"))
        _add_text(items, "text", delta.get("content"))
        for each in delta.get("tool_calls", ()):
            function = each["function"]
            if "id" in each:
                items.append(("call", function["name"], ""))
            assert items[-1][0] == "call"
            items[-1] = (*items[-1][:2], items[-1][2] + function["arguments"])
    reasons = [chunk["finish_reason"] for chunk in chunks]
    assert [reason is None for reason in reasons] == [True] * (len(reasons) - 1) + [False]
    may_hide = not ids and case.parsing.get("include_reasoning") is False
    assert may_hide or ids == call.streams[0].samples[0].token_ids
    return [*items, ("end", reasons[-1], scores)]


def chat_whole(case: Case, cuts: Sequence[int]) -> list[Item]:
    made = rig(case.format)
    call = made.call(case, logprobs=False)
    spoken(case, cuts, lambda _: None, call)
    choice = json.loads(made.writers.of(call).whole())["choices"][0]
    message = choice["message"]
    items: list[Item] = [("reasoning", message["reasoning"]), ("text", message["content"])]
    calls = [each["function"] for each in message.get("tool_calls", ())]
    items += [("call", each["name"], each["arguments"]) for each in calls]
    return [*items, ("end", choice["finish_reason"])]


def responses(case: Case, cuts: Sequence[int]) -> list[Item]:
    """Check that the events of a stream add up to its output. Returns the items."""
    made = rig(case.format)
    call = made.call(case, logprobs=True)
    response: dict[str, Any] = {"id": "resp_1", "status": "in_progress", "output": []}
    log = EventLog(max_bytes=2**24)
    message = made.writers.message(call, call.choices[0])
    output = Output(response, message, made.spelling, log=log, shown=OutputStyle(1, False, Toolbox(())))
    output.begin()

    def read(call: Call) -> None:
        for _, delta in call.reading.deltas():
            output.feed(delta)

    spoken(case, cuts, read, call)
    output.finish("completed" if case.reason == "stop" else "incomplete", {})
    parts: dict[int, str] = {}
    scores: dict[int, int] = {}
    for event in events_of(log):
        if event["type"].endswith(".delta"):
            at = event["output_index"]
            parts[at] = parts.get(at, "") + event["delta"]
            scores[at] = scores.get(at, 0) + len(event.get("logprobs", ()))
    items: list[Item] = []
    for at, item in enumerate(response["output"]):
        if item["type"] == "function_call":
            assert item["call_id"]
            items.append(("call", item["name"], item["arguments"], item["status"]))
            assert item["arguments"] == parts.get(at, "")
        else:
            text = item["content"][0]["text"]
            assert text == parts.get(at, "")
            kind = "text" if item["type"] == "message" else "reasoning"
            items.append((kind, text, item["status"], len(item["content"][0].get("logprobs", ()))))
    return items


def messages(case: Case, cuts: Sequence[int]) -> list[Item]:
    """Check the events of a stream: blocks in order, each with deltas of its kind. Returns the items."""
    made = rig(case.format)
    call = made.call(case, logprobs=False)
    writer = MessageWriter(call, made.writers.message(call, call.choices[0]), "r")
    data = [b"".join(writer.opening())]

    def read(call: Call) -> None:
        data.extend(writer.chunk(choice, delta) for choice, delta in call.reading.deltas())

    spoken(case, cuts, read, call)
    data.extend(writer.closing())
    items: list[Item] = []
    is_open = False
    for block in b"".join(data).decode().split("\n\n")[:-1]:
        event = json.loads(block.split("\ndata: ")[1])
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(items)
                begun = event["content_block"]
                kind = {"thinking": "reasoning", "tool_use": "call"}.get(begun["type"], "text")
                items.append((kind, begun["name"], "") if kind == "call" else (kind, ""))
                is_open = True
            case "content_block_delta":
                assert is_open
                delta, item = event["delta"], items[-1]
                if delta["type"] != "signature_delta":
                    name = {"call": "partial_json", "text": "text", "reasoning": "thinking"}[item[0]]
                    items[-1] = (*item[:-1], item[-1] + delta[name])
            case "content_block_stop":
                assert is_open
                is_open = False
            case "message_delta":
                items.append(("end", event["delta"]["stop_reason"], event["delta"]["stop_sequence"]))
    assert not is_open
    return items


def messages_whole(case: Case, cuts: Sequence[int]) -> list[Item]:
    made = rig(case.format)
    call = made.call(case, logprobs=False)
    spoken(case, cuts, lambda _: None, call)
    body = json.loads(MessageWriter(call, made.writers.message(call, call.choices[0]), "r").whole())
    items: list[Item] = []
    for block in body["content"]:
        match block["type"]:
            case "text":
                items.append(("text", block["text"]))
            case "thinking":
                items.append(("reasoning", block["thinking"]))
            case _:
                items.append(("call", block["name"], json.dumps(block["input"])))
    return [*items, ("end", body["stop_reason"], body["stop_sequence"])]


def ollama(case: Case, cuts: Sequence[int]) -> list[Item]:
    """The lines of a stream."""
    made = rig(case.format)
    call = made.call(case, logprobs=True)
    writer = OllamaWriter(call, made.writers.message(call, call.choices[0]), made.spelling, "chat")
    data: list[bytes] = []

    def read(call: Call) -> None:
        data.extend(writer.chunk(choice, delta) for choice, delta in call.reading.deltas())

    spoken(case, cuts, read, call)
    data.extend(writer.closing())
    items: list[Item] = []
    scores, reason = 0, None
    for line in b"".join(data).splitlines():
        found = json.loads(line)
        message = found["message"]
        _add_text(items, "reasoning", message.get("thinking"))
        _add_text(items, "text", message.get("content"))
        calls = [each["function"] for each in message.get("tool_calls", ())]
        items += [("call", each["name"], json.dumps(each["arguments"])) for each in calls]
        scores += len(found.get("logprobs", ()))
        reason = found.get("done_reason")
    return [*items, ("end", reason, scores)]


def ollama_whole(case: Case, cuts: Sequence[int]) -> list[Item]:
    made = rig(case.format)
    call = made.call(case, logprobs=False)
    spoken(case, cuts, lambda _: None, call)
    body = json.loads(OllamaWriter(call, made.writers.message(call, call.choices[0]), made.spelling, "chat").whole())
    message = body["message"]
    items: list[Item] = [("reasoning", message.get("thinking")), ("text", message["content"])]
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return [
        *items,
        *[("call", each["name"], json.dumps(each["arguments"])) for each in calls],
        ("end", body["done_reason"]),
    ]


def _add_text(items: list[Item], kind: str, text: str | None) -> None:
    if text and items and items[-1][0] == kind:
        items[-1] = (kind, items[-1][1] + text)
    elif text:
        items.append((kind, text))


DIALECTS: dict[str, Callable[[Case, Sequence[int]], list[Item]]] = {
    "chat": chat,
    "chat, whole": chat_whole,
    "responses": responses,
    "messages": messages,
    "messages, whole": messages_whole,
    "ollama": ollama,
    "ollama, whole": ollama_whole,
}


def in_order(items: Sequence[Item]) -> list[Item]:
    """The items in order, without information that only some dialects have, and without truncated calls: only some
    dialects show them, and without them two texts or two reasonings become one."""
    said = [item[:3] if item[0] == "call" else item[:2] for item in items if item[0] != "end"]
    whole: list[Item] = []
    for item in said:
        if item[0] != "call":
            _add_text(whole, item[0], item[1])
            continue
        try:
            whole.append((*item[:2], json.dumps(json.loads(item[2]))))
        except ValueError:
            continue
    return whole


def gathered(items: Sequence[Item]) -> tuple[str, str, list[Item]]:
    """The items without the order of reasoning, text and calls."""
    told = in_order(items)
    reasoning, text = ("".join(item[1] for item in told if item[0] == kind) for kind in ("reasoning", "text"))
    return reasoning, text, [item for item in told if item[0] == "call"]


def disagreements(found: dict[str, list[Item]]) -> list[str]:
    """Compare the items of one output in all dialects."""
    expected = in_order(found["chat"])
    names = ["responses", "messages", "messages, whole", "ollama"]
    wrong = [name for name in names if in_order(found[name]) != expected]
    wrong += [name for name in ("chat, whole", "ollama, whole") if gathered(found[name]) != gathered(expected)]
    return [f"{name} is not as chat: {found[name]} {found['chat']}" for name in wrong]


def differences(rng: random.Random) -> list[str]:
    """Send one random grouping of one random output through all dialects. Returns the differences from an engine that
    sends one token at a time."""
    case = random_case(rng)
    cuts, singly = random_cuts(case, rng), range(1, len(case.ids))
    found, all_items = [], dict[str, list[Item]]()
    for name, dialect in DIALECTS.items():
        expected = dialect(case, singly)
        all_items[name] = got = dialect(case, cuts)
        if got != expected:
            found.append(f"{name}:\n  {got}\n  {expected}")
    found += disagreements(all_items)
    return [f"{case} {case.text!r} {cuts}", *found] if found else []


def main(count: int, seed: int) -> int:
    num_different = 0
    for number in range(count):
        try:
            found = differences(random.Random(f"{seed}/{number}"))
        except (AssertionError, KeyError, IndexError) as error:
            found = [f"{seed}/{number}: {type(error).__name__} {error}"]
        num_different += bool(found)
        if found and num_different <= 5:
            print("\n".join(found))
        if number % 500 == 499 or number + 1 == count:
            print(f"{number + 1} groupings: {num_different} different", flush=True)
    return num_different


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1) > 0)
