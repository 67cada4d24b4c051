"""The parser alone: texts that only look like calls, prompts that begin the message, patterns, and the text that is
held back."""

import json
import random
from typing import Any

import msgspec
import pytest

from tests.response_transcripts import TOOLS, pieces_of, read
from vllm_lite.client.text.response import template as template_module
from vllm_lite.client.text.response.choose import choose, thinking_of
from vllm_lite.client.text.response.events import Event, OutputPiece, ReasoningDelta, TextDelta
from vllm_lite.client.text.response.json_value import JsonValue, Malformed
from vllm_lite.client.text.response.parser import ResponseParser
from vllm_lite.client.text.response.shipped import compose, descriptions, names_of
from vllm_lite.client.text.response.template import read_template
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.config import demo_folder
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.structured.calls.call_shape import CallShape

IDS = {"<tool_call>": 1, "</tool_call>": 2, "<think>": 3, "</think>": 4, "<|im_end|>": 5}
CHATML = "<|im_start|>assistant\n"
HERMES = compose("hermes", "qwen3", IDS, {5})


def whole(text: str, response_format: Any = HERMES, **options: Any) -> tuple[str, str, list[list[str]]]:
    """Read `text` in several cuts, which have to agree."""
    message = read(response_format, pieces_of(text, IDS), **options)
    for seed in range(6):
        pieces = pieces_of(text, IDS, random.Random(seed), 1 if seed == 0 else 6)
        assert read(response_format, pieces, **options) == message
    return message.reasoning, message.content, message.calls


def text_of(event: Event) -> str:
    assert isinstance(event, ReasoningDelta | TextDelta)
    return event.text


# ---- calls that are none


@pytest.mark.parametrize(
    "body",
    [
        "no json",
        "{'name': 'f'}",
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f\\n", "arguments": {}}'.replace("f", "f\\u0000"),
        '{"arguments": [1], "name": "f"}',
        '{"arguments": "no object", "name": "f"}',
        '{"other": {"name": "f"}}',
        '{"name": "f", "name": "g", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        "{",
        "[]]",
        '"f"',
        '{"name": "' + "f" * 300 + '"}',
    ],
)
def test_malformed_calls_are_content(body: str) -> None:
    text = f"Look: <tool_call>\n{body}\n</tool_call> Done."
    assert whole(text) == ("", text, [])


@pytest.mark.parametrize(
    ("body", "arguments", "rest"),
    [
        ('{"name": "f", "arguments": {"a": x}}', '{"a": ', "x}}"),
        ('{"name": "f", "arguments": {"a": 01}}', '{"a": 0', "1}}"),
        ('{"name": "f", "arguments": {"a": tru_}}', '{"a": tru', "_}}"),
        ('{"name": "f", "arguments": {"a": "\\x"}}', '{"a": "', 'x"}}'),
        ('{"name": "f", "arguments": {"a": 1]}', '{"a": 1', "]}"),
        ('{"name": "f", "arguments": {"a": 1}} and more', '{"a": 1}', "and more"),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {}}', '{"a": 1}', ', "arguments": {}}'),
        ('{"name": "f", "arguments": {}, "more": [1}', "{}", ', "more": [1}'),
    ],
)
def test_a_call_that_was_sent_ends_and_the_rest_is_content(body: str, arguments: str, rest: str) -> None:
    reasoning, content, calls = whole(f"<tool_call>{body}</tool_call>")
    assert (reasoning, calls) == ("", [["f", arguments]])
    assert content == f"{rest}</tool_call>"


@pytest.mark.parametrize("end", ["", "\n", "\n<", "\n</tool_", "\n</tool_call"])
def test_an_output_that_ends_in_a_closing_literal(end: str) -> None:
    """The call is complete, and the incomplete literal after it is dropped."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}'
    assert whole(call + end, compose("hermes", None, {})) == ("", "", [["f", "{}"]])


def test_a_good_call_behind_a_bad_one() -> None:
    bad, good = "<tool_call>{bad}</tool_call>", '<tool_call>{"name": "f"}</tool_call>'
    assert whole(f"{bad}\n{good}") == ("", bad, [["f", "{}"]])
    assert whole(f"<tool_call>{good}") == ("", "<tool_call>", [["f", "{}"]])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"id": [1, {"x": "y"}], "name": "f", "parameters": {"a": 1}, "more": 1e3}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": "two\nlines"}}', '{"a": "two\\nlines"}'),
        ('[{"name": "f", "arguments": {"a": 1}}]', '{"a": 1}'),
    ],
)
def test_calls_in_other_words(body: str, arguments: str) -> None:
    assert whole(f"<tool_call>{body}</tool_call>") == ("", "", [["f", arguments]])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"answer": 1}'),
        ("llama3_json", '{"name": "Ann", "age": 3}'),
        ("llama3_json", '{"name": "Ann"}'),
        ("llama3_json", '{ {"name": "f", "parameters": {}}'),
        ("llama3_json", 'So: {"name": "f", "parameters": {}}'),
        ("pythonic", "[a(1)]"),
        ("pythonic", "[a] or [b(c=1)]"),
        ("pythonic", "[a(b=c)]"),
    ],
)
def test_content_that_begins_like_a_call(name: str, text: str) -> None:
    """Without a token that opens a call, its beginning has to be certain; after other text there are no calls."""
    assert whole(text, compose(name, None, {})) == ("", text, [])


def test_a_call_inside_reasoning_is_reasoning() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert whole(f"<think>Maybe {call}?</think>No.") == (f"Maybe {call}?", "No.", [])


def test_special_tokens_that_no_field_names_are_dropped() -> None:
    assert whole("Hi<|im_end|> there") == ("", "Hi there", [])
    assert whole('<tool_call>{"name": <|im_end|>"f"}</tool_call>') == ("", "", [["f", "{}"]])
    assert whole("a </think> b") == ("", "a </think> b", [])  # named, and not special: text


def test_a_closing_literal_inside_a_string() -> None:
    as_text = compose("hermes", "qwen3", {})
    body = json.dumps({"a": "</tool_call> and <tool_call>"})
    text = f'<tool_call>{{"name": "f", "arguments": {body}}}</tool_call>'
    for pieces in (pieces_of(text, {}), pieces_of(text, {}, random.Random(1), 3)):
        assert read(as_text, pieces).calls == [["f", body]]


def test_white_space_inside_content_stays() -> None:
    text = 'One.\n\n<tool_call>{"name": "f"}</tool_call>\n\nTwo.  \n'
    assert whole(text)[1] == "One.\n\n\n\nTwo."


def test_lone_surrogates_are_no_marks() -> None:
    assert read(HERMES, [OutputPiece("\ud800{\ud801")]).content == "\ufffd{\ufffd"


def test_values_of_tags_have_the_types_of_the_schema() -> None:
    ids = {"<tool_call>": 1, "</tool_call>": 2}
    coder = compose("qwen3_coder", None, ids)
    tags = {"city": "5", "days": "x5", "flag": "True", "list": "[1, 2]", "other": "7", "free": "a b"}
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in tags.items())
    text = f"<tool_call>\n<function=get_weather>\n{inside}</function>\n</tool_call>"
    ((_, arguments),) = read(coder, pieces_of(text, ids, random.Random(0), 5)).calls
    assert json.loads(arguments) == {
        "city": "5",
        "days": "x5",
        "flag": True,
        "list": [1, 2],
        "other": 7,
        "free": "a b",
    }


def test_text_between_tags_ends_the_call() -> None:
    coder = compose("qwen3_coder", None, IDS)
    text = "<tool_call><function=f><parameter=a>1</parameter> oops <parameter=b>2</parameter></function></tool_call>"
    _, content, calls = whole(text, coder)
    assert calls == [["f", '{"a": 1}']]
    assert content == "oops <parameter=b>2</parameter></function>"


# ---- JSON by its prefixes


@pytest.mark.parametrize(
    "text", ['{"a": [1, -2.5e+3, true, null, "\\u00e9\\n", {}], "b": {"c": []}}', "[[[]]]", '"x"', "{}", "[ 1 , 2 ]"]
)
def test_json_is_its_own_prefix(text: str) -> None:
    for size in range(1, len(text) + 1):
        value = JsonValue()
        out: list[str] = []
        for place in range(0, len(text), size):
            assert value.feed(text[place : place + size], 0, out) == len(text[place : place + size])
        assert value.is_done
        assert "".join(out) == text


@pytest.mark.parametrize(
    ("text", "place"),
    [("{,", 1), ("[1 2", 3), ('{"a" 1', 5), ("[1,]", 3), ("{1: 2}", 1), ("nul,", 3), ('{"a": 1,}', 8), ("-x", 1)],
)
def test_the_first_contradiction_is_found(text: str, place: int) -> None:
    for size in (1, 3, len(text)):
        assert contradiction(text, size) == place


def contradiction(text: str, size: int) -> int | None:
    value = JsonValue()
    for start in range(0, len(text), size):
        try:
            value.feed(text[start : start + size], 0, [])
        except Malformed as error:
            return start + error.place
    return None


def test_json_that_is_too_deep_is_refused() -> None:
    with pytest.raises(Malformed):
        JsonValue().feed("[" * 1000, 0, [])


# ---- prompts


@pytest.mark.parametrize(
    ("prefix", "text", "expected"),
    [
        (f"x{CHATML}<think>\n", "hm\n</think>\n\nok", ("hm", "ok")),
        (f"{CHATML}<think>\n\n</think>\n\n", "ok", ("", "ok")),
        ("no anchor <think>\n", "hm</think>ok", ("hm", "ok")),
        ("no anchor </think>", "ok", ("", "ok")),
        (f"<think> of a user {CHATML}", "ok", ("", "ok")),
        (f"{CHATML}Once upon", " a time", ("", " a time")),
        (f"{CHATML}Once upon ", "a time", ("", "a time")),
        (f"{CHATML}<think>First,", " second</think>ok", (" second", "ok")),
    ],
)
def test_the_prompt_may_begin_the_message(prefix: str, text: str, expected: tuple[str, str]) -> None:
    assert whole(text, prefix=prefix)[:2] == expected


def test_reasoning_from_the_first_token_on() -> None:
    r1 = compose(None, "deepseek_r1", IDS)
    assert whole("hm</think>ok", r1) == ("hm", "ok", [])
    assert whole("<think>hm</think>ok", r1) == ("hm", "ok", [])
    assert whole("<think>\nhm", r1, prefix=f"{CHATML}<think>\n") == ("hm", "", [])
    assert whole("hm", r1, prefix=f"{CHATML}<think>\n") == ("hm", "", [])
    assert whole("ok", r1, prefix=f"{CHATML}<think>\n\n</think>\n\n") == ("", "ok", [])


# ---- templates of checkpoints

OWN: dict[str, Any] = {
    "start_anchor": CHATML,
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>\w+):",
            "close": "</tool_call>",
            "repeats": True,
            "content": "kv-lines",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def test_a_template_of_a_checkpoint() -> None:
    own = read_template(OWN, IDS, {5})
    text = "<think>a</think>b<tool_call>get_weather:city: Paris\ndays: 3</tool_call><|im_end|>"
    reasoning, content, calls = whole(text, own)
    assert (reasoning, content) == ("a", "b")
    assert [(name, json.loads(text)) for name, text in calls] == [("get_weather", {"city": "Paris", "days": 3})]


def test_a_call_of_a_template_that_cannot_be_read_is_content() -> None:
    spec = {**OWN, "fields": {"content": {}, "tool_calls": {"open": "<tool_call>", "close": "</tool_call>"}}}
    text = "a <tool_call>no call</tool_call> b"
    assert whole(text, read_template(spec, IDS)) == ("", text, [])


def test_a_pattern_that_takes_too_long_ends_the_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "PATTERN_SECONDS", 1e-3)
    spec = {**OWN, "fields": {"content": {}, "thinking": {"open_pattern": r"(x+x+)+y", "close": "</think>"}}}
    slow = read_template(spec, {})
    text = "x" * 400 + "z and <think> more y"
    parser = ResponseParser(slow, "", TOOLS)
    events = [*parser.feed([OutputPiece(text[:300])]), *parser.feed([OutputPiece(text[300:])]), *parser.finish()]
    assert "".join(text_of(event) for event in events) == text
    assert parser.is_broken


def test_a_pattern_waits_for_so_long_only() -> None:
    spec = {**OWN, "fields": {"content": {}, "thinking": {"open_pattern": r"<a[^>]*>", "close": "</a>"}}}
    own = read_template(spec, {})
    parser = ResponseParser(own, "", TOOLS)
    text = "<a" + "b" * 5000
    sent = "".join(text_of(event) for letter in text for event in parser.feed([OutputPiece(letter)]))
    assert len(text) - len(sent) <= template_module.MAX_HELD_CHARS
    assert sent + "".join(map(text_of, parser.finish())) == text


def test_a_too_long_delimiter_hides_no_later_one() -> None:
    """A text that begins like a delimiter but is too long is content, and a delimiter may follow it; the size of the
    pieces does not matter."""
    spec = {**OWN, "fields": {"content": {}, "thinking": {"open_pattern": r"<a[^>]*>", "close": "</a>"}}}
    own = read_template(spec, {})
    text = f"1<a{'b' * 1500}<a>in</a>2"
    for size in (1, 100, 1100, len(text)):
        message = read(own, [OutputPiece(text[place : place + size]) for place in range(0, len(text), size)])
        assert (message.reasoning, message.content) == ("in", f"1<a{'b' * 1500}2")


@pytest.mark.parametrize("opening", [{"open": ["<a", "<ab"]}, {"open_pattern": "<ab?"}])
def test_the_longest_literal_opens(opening: dict[str, Any]) -> None:
    own = read_template({**OWN, "fields": {"content": {}, "thinking": {**opening, "close": ">"}}}, {})
    assert whole("1<abx>2", own) == ("x", "12", [])
    assert whole("1<ax>2", own) == ("x", "12", [])


def test_fields_that_open_and_close_on_nothing_end() -> None:
    field = {"open_pattern": "(?=a)", "close_pattern": "(?=a)"}
    own = read_template({**OWN, "fields": {"content": {}, "thinking": field}}, {})
    message = read(own, [OutputPiece("aaa"), OutputPiece("ba")])
    assert sorted(message.reasoning + message.content) == sorted("aaaba")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2"),
        ({"fields": {}}, "non-empty"),
        ({"what": 1}, "unknown key 'what'"),
        ({"fields": {"content": {"what": 1}}}, "unknown key 'what'"),
        ({"fields": {"content": {"content": "yaml"}}}, "'yaml'"),
        ({"fields": {"content": {"open": ""}}}, "1 to 256"),
        ({"fields": {"content": {"open": "a", "open_pattern": "b"}}}, "one of them"),
        ({"fields": {"content": {"open_pattern": "("}}}, "not a regular expression"),
        ({"fields": {"content": {}, "other": {}}}, "only one field"),
        ({"fields": {"content": {"transform": "a {content}"}}}, "mixes"),
        ({"fields": {"content": {"content": "xml-inline", "content_args": {"tag_pattern": "x"}}}}, "'key' and 'value'"),
    ],
)
def test_a_wrong_template_is_refused_with_its_place(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_template({**OWN, **change}, {})


# ---- which format is in force


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(demo_folder())


def test_how_a_format_is_chosen(tokenizer: Tokenizer, tmp_path: Any) -> None:
    made = choose(None, tokenizer, template="... <tool_call> </tool_call> ... <think>")
    assert (made.calls, made.reasoning) == ("hermes", "qwen3")
    assert "chat template" in made.why
    made = choose(None, tokenizer, template="<tool_call> </tool_call> <function= <parameter=")
    assert (made.calls, made.reasoning) == ("qwen3_coder", None)
    made = choose(None, tokenizer, template="<tool_call> </tool_call> <arg_key> <arg_value>")
    assert made.calls == "glm45"
    assert choose(None, tokenizer, architectures=["GptOssForCausalLM"]).calls == "openai"
    made = choose(None, tokenizer, names=("mistral", "none"), template="<tool_call> </tool_call> <think>")
    assert (made.calls, made.reasoning) == ("mistral", None)
    with pytest.raises(ConfigError, match=r"--tool-call-parser is 'nope'; it must be one of .*hermes"):
        choose(None, tokenizer, names=("nope", None))
    with pytest.raises(ConfigError, match="--reasoning-parser"):
        choose(None, tokenizer, names=(None, "hermes"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": OWN}))
    made = choose(tmp_path, tokenizer, template="<tool_call> </tool_call>")
    assert (made.calls, made.reasoning) == ("response_template", "response_template")
    assert choose(tmp_path, tokenizer, names=("hermes", None), template="").calls == "hermes"


def test_thinking_in_token_ids(tokenizer: Tokenizer) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    hermes = compose("hermes", "qwen3", tokenizer.added_tokens)
    thinking = thinking_of(hermes, tokenizer, CHATML)
    assert thinking is not None
    assert (thinking.begin, thinking.end, thinking.is_open) == (ids("<think>"), ids("</think>"), False)
    opened = thinking_of(hermes, tokenizer, f"{CHATML}<think>\n")
    assert opened is not None
    assert opened.is_open
    assert thinking_of(hermes, tokenizer, f"{CHATML}<think>\n\n</think>\n\n") is None
    assert thinking_of(compose("hermes", None, {}), tokenizer, CHATML) is None
    implied = thinking_of(compose(None, "deepseek_r1", {}), tokenizer, CHATML)
    assert implied is not None
    assert implied.is_open


def test_all_descriptions_can_be_read() -> None:
    for name, item in descriptions().items():
        assert item.tool_calls or item.reasoning
        assert (item.shape is None) is (item.tool_calls is None or name == "minimax_m3"), name
        assert item.shape is None or isinstance(msgspec.convert(item.shape, CallShape), CallShape), name
        made = compose(name if item.tool_calls else None, name if item.reasoning else None, {})
        assert made.has_calls == (item.tool_calls is not None)
        assert made.has_reasoning == (item.reasoning is not None)
    for part in ("tool_calls", "reasoning"):
        names = names_of(part)
        assert len(names) == len(set(names))
