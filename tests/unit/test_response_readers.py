"""Calls of several formats that share a reader with few others: blocks of calls, names as keys, wrapped values."""

# ruff: noqa: RUF001 - DeepSeek's literals have such letters

import json
import random
from typing import Any

import pytest

from tests.response_transcripts import pieces_of, read
from vllm_lite.client.text.response.calls import MAX_CALLS, MAX_NAME_CHARS
from vllm_lite.client.text.response.shipped import compose

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "list": {"type": "array"},
                "deep": {"type": "object"},
                "days": {"type": "integer"},
            },
        },
    },
}


def whole(name: str, text: str) -> tuple[str, list[list[str]]]:
    """Read `text` as the calls of a format in several cuts, which have to agree. Returns content and calls."""
    response_format = compose(name, None, {})
    found = read(response_format, pieces_of(text, {}), tools=[TOOL])
    for most in (1, 2, 5, 30):
        assert read(response_format, pieces_of(text, {}, random.Random(most), most), tools=[TOOL]) == found
    return found.content, found.calls


def given(name: str, text: str) -> list[Any]:
    """The arguments of all calls of `f`, which is all there is."""
    content, calls = whole(name, text)
    assert content == ""
    assert all(called == "f" for called, _ in calls)
    return [json.loads(arguments) for _, arguments in calls]


# ---- blocks of calls


def block(*calls: str) -> str:
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


def invoke(inner: str = "", name: str = "f") -> str:
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def test_a_block_may_have_several_calls() -> None:
    text = '<parameter name="text">a</parameter>\n'
    assert given("minimax_m2", block(invoke())) == [{}]
    assert given("minimax_m2", block(invoke(text), invoke(), invoke(text))) == [{"text": "a"}, {}, {"text": "a"}]
    assert given("minimax_m2", block(invoke(text)) + "\n" + block(invoke())) == [{"text": "a"}, {}]


def test_a_call_outside_of_a_block_is_text() -> None:
    assert whole("minimax_m2", invoke()) == (invoke().strip(), [])


@pytest.mark.parametrize(
    ("inner", "arguments", "content"),
    [
        ("no call", None, "<minimax:tool_call>\nno call</minimax:tool_call>"),
        (
            '<invoke name="">\n</invoke>\n',
            None,
            '<minimax:tool_call>\n<invoke name="">\n</invoke>\n</minimax:tool_call>',
        ),
        (invoke("text"), None, f"<minimax:tool_call>\n{invoke('text')}</minimax:tool_call>"),
        (invoke() + "text", ["{}"], "text</minimax:tool_call>"),
        (invoke() + '<invoke name="', ["{}"], '<invoke name="'),
        (invoke() + '<invoke name="g">x', ["{}"], '<invoke name="g">x</minimax:tool_call>'),
        (invoke() + invoke(name="\x07"), ["{}"], f"{invoke(name=chr(7))}</minimax:tool_call>"),
        (invoke() + invoke("x", "g"), ["{}"], f"{invoke('x', 'g')}</minimax:tool_call>"),
        (invoke('<parameter name="text">a</parameter>x'), ['{"text": "a"}'], "x</invoke>\n</minimax:tool_call>"),
    ],
)
def test_nothing_of_a_broken_block_is_lost(inner: str, arguments: list[str] | None, content: str) -> None:
    found, calls = whole("minimax_m2", block(inner))
    assert [text for _, text in calls] == (arguments or [])
    assert found == content


def test_a_block_without_end() -> None:
    start = f"<minimax:tool_call>\n{invoke()}"
    assert whole("minimax_m2", start) == ("", [["f", "{}"]])
    assert whole("minimax_m2", start + "</minimax:to") == ("", [["f", "{}"]])
    assert whole("minimax_m2", f'{start}<invoke name="f">') == ('<invoke name="f">', [["f", "{}"]])
    assert whole("minimax_m2", f'{start}<invoke name="f">\n<parameter name="text">a')[1][1] == ["f", '{"text": "a']


def test_a_block_is_bounded() -> None:
    content, calls = whole("minimax_m2", block(*[invoke()] * (MAX_CALLS + 1)))
    assert len(calls) == MAX_CALLS
    assert content.startswith("<invoke")
    content, calls = whole("minimax_m2", block(invoke(), invoke(name="n" * (MAX_NAME_CHARS + 1))))
    assert (len(calls), content.startswith('<invoke name="nnn')) == (1, True)


# ---- values with a type


def dsml(name: str, is_string: str, value: str) -> str:
    tag = "｜DSML｜parameter"
    inner = f'<｜DSML｜invoke name="f">\n<{tag} name="{name}"{is_string}>{value}</{tag}>\n</｜DSML｜invoke>\n'
    return f"<｜DSML｜function_calls>\n{inner}</｜DSML｜function_calls>"


@pytest.mark.parametrize(
    ("name", "is_string", "value", "expected"),
    [
        ("days", ' string="true"', "3", "3"),
        ("days", ' string="false"', "3", 3),
        ("unknown", ' string="true"', "[1]", "[1]"),
        ("unknown", ' string="false"', "[1]", [1]),
        ("text", ' string="true"', "\n a \n", "\n a \n"),
        ("text", ' string="false"', "no json", "no json"),
        ("text", ' string="false"', "NaN", "NaN"),
        ("days", "", "3", 3),
        ("text", "", "3", "3"),
    ],
)
def test_values_have_their_marked_types(name: str, is_string: str, value: str, expected: Any) -> None:
    assert given("deepseek_v32", dsml(name, is_string, value)) == [{name: expected}]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "a"),
        ("<![CDATA[a]]>", "a"),
        ("<![CDATA[a</param> ]] <b>]]>", "a</param> ]] <b>"),
        ("<![CDATA[\na\n]]>", "\na\n"),
        ("<![CDATA[]]>", ""),
        ("", ""),
        ("<![CDAT", "<![CDAT"),
        ("<![cdata[a]]>", "<![cdata[a]]>"),
        ("a<![CDATA[b]]>", "a<![CDATA[b]]>"),
    ],
)
def test_a_value_may_be_wrapped(value: str, expected: str) -> None:
    assert given("minicpm5", f'<function name="f"><param name="text">{value}</param></function>') == [
        {"text": expected}
    ]


def test_a_wrapped_value_without_end_is_sent_as_far_as_it_is_sure() -> None:
    start = '<function name="f"><param name="text">'
    assert whole("minicpm5", start + "<![CDA") == ("", [["f", '{"text": ']])
    assert whole("minicpm5", start + "<![CDATA[a]]") == ("", [["f", '{"text": "a']])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("list", "['a', 1, True, None]", ["a", 1, True, None]),
        ("list", '["a", true]', ["a", True]),
        ("deep", "{'a': {'b': 0.5}}", {"a": {"b": 0.5}}),
        ("list", "{'a': 1}", "{'a': 1}"),
        ("list", "['a', f()]", "['a', f()]"),
        ("deep", "{1, 2}", "{1, 2}"),
        ("list", "[1e999]", "[1e999]"),
        ("list", "[b'a']", "[b'a']"),
        ("list", "[" * 3000, "[" * 3000),
    ],
)
def test_containers_may_be_written_as_python_prints_them(name: str, value: str, expected: Any) -> None:
    """Seed-OSS's template prints values of history so."""
    text = f"<seed:tool_call>\n<function=f>\n<parameter={name}>{value}</parameter>\n</function>\n</seed:tool_call>"
    assert given("seed_oss", text) == [{name: expected}]


# ---- names as keys


def test_a_name_may_be_a_key() -> None:
    calls = '<|tools_prefix|>[{"f": {"text": "a"}}, {"f": {}}]<|tools_suffix|>'
    assert given("apertus", calls) == [{"text": "a"}, {}]
    assert given("apertus", '<|tools_prefix|>{"f": {}}<|tools_suffix|>') == [{}]


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        ("[{}]", [], "[{}]"),
        ('[{"f": 1}]', [], '[{"f": 1}]'),
        ('[{"f": "{}"}]', [], '[{"f": "{}"}]'),
        ('[{"": {}}]', [], '[{"": {}}]'),
        ('["f"]', [], '["f"]'),
        ('[{"f": {}, "g": {}}]', [["f", "{}"]], ', "g": {}}]'),
        ('[{"f": {}]', [["f", "{}"]], "]"),
        ('[{"f": {}x', [["f", "{}"]], "x"),
    ],
)
def test_other_objects_are_no_calls(text: str, calls: list[list[str]], rest: str) -> None:
    opening = "" if calls else "<|tools_prefix|>"
    assert whole("apertus", f"<|tools_prefix|>{text}<|tools_suffix|>") == (f"{opening}{rest}<|tools_suffix|>", calls)


def test_values_of_python_have_the_types_of_the_schema() -> None:
    """Llama 4's template puts all values of history between quotes."""
    assert given("pythonic", "[f(days='3', text='4', list=['5'], deep=\"{'a': 1}\", more='6')]") == [
        {"days": 3, "text": "4", "list": ["5"], "deep": {"a": 1}, "more": "6"}
    ]


# ---- JSON without a literal of its own


def test_a_list_of_calls_is_one_only_at_the_start() -> None:
    calls = '[{"name": "f", "arguments": {"text": "a"}}]'
    assert given("xlam", calls) == [{"text": "a"}]
    assert given("xlam", f"```json\n{calls}\n```") == [{"text": "a"}]
    assert whole("xlam", f"Look: {calls}") == (f"Look: {calls}", [])
    assert whole("xlam", '[{"city": "Paris"}]') == ('[{"city": "Paris"}]', [])
    assert whole("xlam", "```json\n[1]\n```") == ("```json\n[1]\n```", [])


def test_numbers_between_quotes_have_the_types_of_the_schema() -> None:
    """A call of FunctionGemma is read as a whole, as templates put all values of history between its quotes."""
    call = "<start_function_call>call:f{days:<escape>3<escape>,text:<escape>4<escape>}<end_function_call>"
    assert given("functiongemma", call) == [{"days": 3, "text": "4"}]


def test_the_word_before_phi_s_calls_is_a_word() -> None:
    assert given("phi4_mini_json", 'functools[{"name": "f", "arguments": {}}]') == [{}]
    text = "from functools import reduce; functools[0]"
    assert whole("phi4_mini_json", text) == (text, [])


def test_a_written_type_overrides_the_look_of_a_value() -> None:
    """The written type also takes precedence over the schema."""
    tags = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>3<|close|>argument<|sep|>'
        for key, kind in (("a", "string"), ("b", "number"), ("text", "number"))
    )
    text = f'<|open|>call tool="f" index="1"<|sep|>{tags}<|close|>call<|sep|>'
    ((_, arguments),) = whole("kimi_k3", text)[1]
    assert json.loads(arguments) == {"a": "3", "b": 3, "text": 3}
