"""Grammars of tool calls: each text that they accept is parsed by the format's own parser as calls of these tools."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.grammar_walk import Walker
from tests.response_transcripts import WRITERS, ids_of, pieces_of, read
from vllm_lite.client.text.response import shipped
from vllm_lite.client.text.response.template import Format
from vllm_lite.errors import RequestError
from vllm_lite.structured.calls.tools import CallShape, Choice, Tool, tool_grammar

CITY = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/small"}, "maxItems": 3},
        "deep": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "none": {"type": "null"},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOLS = (Tool("get_weather", CITY, strict=True), Tool("write-all", TEXT, strict=True), Tool("now"))
SCHEMAS = {"get_weather": CITY, "write-all": TEXT, "now": {"type": "object", "maxProperties": 0}}
AS_SENT = [{"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS]

JSON_SHAPE = CallShape(
    call_begin='<tool_call>\n{"name": "', name_end='", "arguments": ', call_end="}\n</tool_call>", between="\n"
)
PYTHON_SHAPE = CallShape(
    begin="[", call_begin="", name_end="(", call_end=")", between=", ", end="]", arguments="python"
)
TAG_SHAPE = CallShape(
    call_begin="<call=",
    name_end=">",
    call_end="</call>",
    arguments="tagged",
    key_begin="<",
    key_end=">",
    value_end="\n</v>\n",
)
SHAPES = {"json": JSON_SHAPE, "python": PYTHON_SHAPE, "tagged": TAG_SHAPE}


@cache
def walker_of(name: str) -> Walker:
    return Walker(WRITERS[name].tokens)


@cache
def format_of(name: str) -> tuple[Format, dict[str, int], CallShape]:
    writer = WRITERS[name]
    ids = ids_of(writer.tokens)
    response_format = shipped.compose(writer.names[0], None, ids, ids.values() if writer.special else ())
    return response_format, ids, msgspec.convert(dict(response_format.shape or {}), CallShape)


FORMATS = [
    name
    for name, writer in WRITERS.items()
    if writer.names[0] is not None and shipped.descriptions()[writer.names[0]].shape is not None
]


def grammar_of(name: str, tools: tuple[Tool, ...], choice: Choice, *, parallel: bool = True) -> str:
    added = walker_of(name).added_tokens
    grammar = tool_grammar(format_of(name)[2], tools, choice, parallel=parallel, added_tokens=added).text
    assert grammar is not None
    return grammar


def calls_in(name: str, text: str) -> list[list[str]]:
    response_format, ids, _ = format_of(name)
    message = read(response_format, pieces_of(text, ids), tools=AS_SENT)
    assert message.content.strip() == "", text
    return message.calls


# ---- every format, read back


END_TOKENS = ("<|call|>", "<|return|>", "<|im_end|>", "<|observation|>", "<|eom_id|>", "<|tool_response>", "<|calls|>")
"""Tokens of which published checkpoints say that they end an output (`eos_token_id` of generation_config.json)."""


@pytest.mark.parametrize("name", sorted(shipped.descriptions()))
def test_no_shape_has_a_token_that_ends_outputs(name: str) -> None:
    """Masks let such a token end a complete output only, so a call that has to have one could never be finished."""
    written = json.dumps(shipped.descriptions()[name].shape, ensure_ascii=False)
    assert not [token for token in END_TOKENS if token in written]


@pytest.mark.parametrize("name", FORMATS)
def test_accepted_text_is_parsed_as_calls(name: str) -> None:
    grammar, ended = grammar_of(name, TOOLS, "required"), 0
    for seed in range(8):
        text, is_whole = walker_of(name).walk(grammar, random.Random(seed))
        if not is_whole:
            continue
        ended += 1
        calls = calls_in(name, text)
        assert calls, text
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
    assert ended >= 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_tool_is_called_once(name: str) -> None:
    grammar = grammar_of(name, TOOLS[:1], "named")
    for seed in range(3):
        text, is_whole = walker_of(name).walk(grammar, random.Random(seed))
        assert is_whole
        ((called, _),) = calls_in(name, text)
        assert called == "get_weather"


OTHER_FORMS = (
    *("mistral, list", "openai", "cohere", "gigachat3, role", "phi4_mini, tokens", "xlam, fenced"),
    *("solar_open", "muse_glimmer"),
)
"""Forms of calls that parsers accept, but that are not of their format's shape."""


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in OTHER_FORMS])
def test_calls_as_models_write_them_are_accepted(name: str) -> None:
    written = WRITERS[name].calls([("get_weather", {"unit": "celsius", "days": 3})])
    walker = walker_of(name)
    assert walker.takes(grammar_of(name, TOOLS, "required"), written)
    assert walker.takes(grammar_of(name, TOOLS, "auto"), written)
    assert walker.takes(grammar_of(name, TOOLS, "auto"), "Only text, [x] {1} <b>.")
    assert not walker.takes(grammar_of(name, TOOLS, "required"), "Only text.")
    wrong = WRITERS[name].calls([("get_weather", {"unit": "kelvin", "days": 3})])
    assert not walker.takes(grammar_of(name, TOOLS, "auto"), wrong)


def test_one_call_at_most_if_they_are_not_parallel() -> None:
    one, two = (WRITERS["hermes"].calls([("now", {})] * count) for count in (1, 2))
    for choice in ("required", "auto"):
        for parallel in (False, True):
            grammar = grammar_of("hermes", TOOLS, choice, parallel=parallel)
            assert walker_of("hermes").takes(grammar, one)
            assert walker_of("hermes").takes(grammar, two) is parallel


def test_a_literal_that_is_a_token_is_not_spelled() -> None:
    walker = walker_of("hermes")
    spelled = tool_grammar(JSON_SHAPE, TOOLS, "required", added_tokens={}).text
    tokens = tool_grammar(JSON_SHAPE, TOOLS, "required", added_tokens=walker.added_tokens).text
    assert spelled is not None
    assert tokens is not None
    text = WRITERS["hermes"].calls([("now", {})])
    ids = Walker().tokenizer.tokenize_str(text)  # the same vocabulary without the added tokens
    assert walker.matcher(spelled).validate_tokens(ids) == len(ids)
    assert walker.matcher(tokens).validate_tokens(ids) == 0


# ---- choices and strictness


def plain(shape: str, tools: list[Tool], choice: Choice = "required") -> str:
    grammar = tool_grammar(SHAPES[shape], tools, choice).text
    assert grammar is not None
    return grammar


def test_auto_holds_strict_tools_only() -> None:
    loose = Tool("loose", CITY)
    assert tool_grammar(JSON_SHAPE, [loose], "auto").text is None
    grammar, walker = plain("json", [loose, TOOLS[0]], "auto"), Walker()
    begin = 'Ah. <tool_call>\n{"name": "'
    assert walker.takes(grammar, begin + 'loose", "arguments": {"x": [1]}}\n</tool_call> and so')
    assert not walker.takes(grammar, begin + 'get_weather", "arguments": {"x": [1]}}\n</tool_call>')
    assert not walker.takes(grammar, begin + 'other", "arguments": {}}\n</tool_call>')
    assert not walker.takes(grammar, f"text {begin} text")
    assert walker.takes(grammar, "a <tool_call> that is text")


def test_names_may_be_held_where_no_arguments_are() -> None:
    grammar, walker = tool_grammar(JSON_SHAPE, [Tool("loose", CITY)], "auto", is_held=True).text, Walker()
    assert grammar is not None
    begin = 'Ah. <tool_call>\n{"name": "'
    assert walker.takes(grammar, begin + 'loose", "arguments": {"x": [1]}}\n</tool_call> and so')
    assert not walker.takes(grammar, begin + 'other", "arguments": {}}\n</tool_call>')


def test_a_common_text_begins_no_call() -> None:
    grammar, walker = plain("python", [Tool("now", strict=True)], "auto"), Walker()
    assert walker.takes(grammar, "a [list] of [now, then] and [now()] now")
    assert not walker.takes(grammar, "[now(x=1)]")


def test_tools_that_are_not_strict_ignore_unsupported_keywords() -> None:
    parameters = {"properties": {"a": {"type": "integer", "not": {}}, "b": {"type": "boolean"}}, "required": ["a"]}
    grammar = plain("json", [Tool("f", parameters)])
    assert Walker().takes(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    assert not Walker().takes(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>')
    with pytest.raises(RequestError, match="tool 'f': the JSON schema at #/properties/a: the keyword 'not'"):
        plain("json", [Tool("f", parameters, strict=True)])


@pytest.mark.parametrize(
    ("shape", "schema", "said"),
    [
        ("tagged", {"type": "string", "pattern": "a"}, "#/properties/p: .* cannot hold the keyword 'pattern'"),
        (
            "python",
            {"type": "array", "prefixItems": [{"type": "null"}]},
            "#/properties/p: .* the keyword 'prefixItems'",
        ),
        ("json", {"type": "strin"}, "#/properties/p: type is 'strin'; it must be one of array, boolean"),
    ],
)
def test_strict_tools_are_refused_where_a_format_cannot_hold_them(shape: str, schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"tool 'f': the JSON schema at {said}" if "#" in said else said):
        plain(shape, [Tool("f", {"properties": {"p": schema}, "required": ["p"]}, strict=True)])


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([], "required", "at least one tool"),
        ([TOOLS[0], TOOLS[1]], "named", "exactly one; got 2"),
        ([Tool('a"b')], "required", "a tool's name has 1 to 64"),
        ([Tool("a", {"type": "array"}, strict=True)], "required", "tool 'a': .* are an object, got the type 'array'"),
    ],
)
def test_refusals(tools: list[Tool], choice: Choice, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        tool_grammar(JSON_SHAPE, tools, choice)


# ---- values that are not JSON


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "boolean"}, ["True", "False"], ["true", "0"]),
        ({"type": ["string", "null"]}, ['"a\\n"', "None"], ["null", "a"]),
        ({"enum": ["x", 1, None, [2]]}, ['"x"', "'x'", "1", "None", "[2]"], ["x", "2"]),
        ({"const": "a'\"\n"}, ["'a\\'\"\\n'", '"a\'\\"\\n"'], []),
        ({"type": "string", "maxLength": 1}, ['"a"'], ['"ab"', "'a'"]),
        ({"anyOf": [{"const": True}, {"type": "number"}]}, ["True", "1.5"], ["False"]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            ["[1]", "[1, 2]"],
            ["[]", "[1,2]"],
        ),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}, ['{"b": [None, {"x": 1}]}'], ["{}"]),
        ({"$ref": "#/$defs/tree"}, ['{"v": 1, "t": {"v": 2}}'], ['{"t": {"v": 2}}']),
        ({}, ['{"a": [1, "b", True]}', "None", "[]"], ["true"]),
    ],
)
def test_values_as_python(schema: Any, taken: list[str], refused: list[str]) -> None:
    tree = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "t": {"$ref": "#/$defs/tree"}},
        "required": ["v"],
    }
    parameters = {"properties": {"p": schema}, "required": ["p"], "$defs": {"tree": tree}}
    grammar = plain("python", [Tool("f", parameters, strict=True)])
    assert [value for value in taken + refused if Walker().takes(grammar, f"[f(p={value})]")] == taken


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "string"}, ["free <text>\nof lines", "", "5"], ["a</v>\nb"]),
        ({"type": ["string", "null"]}, ["null", "x"], []),
        ({"enum": ["x y", "z"]}, ["z", "x y"], ['"z"', "x"]),
        ({"type": "integer"}, ["5"], ["five"]),
        ({"type": "array", "items": {"type": "boolean"}}, ["[true]", "[]"], ["True"]),
    ],
)
def test_values_between_tags(schema: Any, taken: list[str], refused: list[str]) -> None:
    grammar = plain("tagged", [Tool("f", {"properties": {"p": schema}, "required": ["p"]}, strict=True)])
    texts = [value for value in taken + refused if Walker().takes(grammar, f"<call=f><p>{value}\n</v>\n</call>")]
    assert texts == taken


def test_optional_arguments_may_be_missing_in_any_combination() -> None:
    properties = {name: {"type": "boolean"} for name in "abc"}
    for required in ([], ["b"], ["a", "c"]):
        tool = Tool("f", {"properties": properties, "required": required}, strict=True)
        python, tagged = plain("python", [tool]), plain("tagged", [tool])
        for chosen in range(8):
            names = [name for place, name in enumerate("abc") if chosen >> place & 1]
            is_right = set(required) <= set(names)
            pairs, tags = (
                ", ".join(f"{name}=True" for name in names),
                "".join(f"<{name}>true\n</v>\n" for name in names),
            )
            assert Walker().takes(python, f"[f({pairs})]") is is_right
            assert Walker().takes(tagged, f"<call=f>{tags}</call>") is is_right
