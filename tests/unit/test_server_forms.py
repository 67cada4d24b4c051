"""Forms of answers that a request wants: the same form under many names, tools, and faults of either."""

import asyncio
from importlib.resources import files
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from tests.grammar_walk import Walker
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.server.openai import bodies, forms
from vllm_lite.server.openai.bodies import ChatBody, CompletionBody
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.grammars import GrammarBuilder, HeldParams, StrictLevel
from vllm_lite.structured.compile import compile_grammar

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "g", "parameters": SCHEMA, "strict": True}}
TOKENIZER = Tokenizer.load(str(files("vllm_lite") / "demo_model"))
WALKER = Walker()
FORMATS = Formats.of("", TOKENIZER, ("hermes", None), None, ())


def chat(**fields: Any) -> ChatBody:
    return bodies.read(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields}), ChatBody)[0]


def wanted(**fields: Any) -> StructuredOutputsParams | None:
    form = forms.form_of(chat(**fields))
    return None if form is None else form.params


async def error_of(**fields: Any) -> ApiError:
    """Return the error that refuses a chat with these fields."""
    with pytest.raises(ApiError) as caught:
        await held(**fields)
    return caught.value


async def held(formats: Formats | None = FORMATS, level: StrictLevel = "auto", **fields: Any) -> str | None:
    """The grammar that constrains the answer to such a chat."""
    return (await held_with_notes(formats, level, **fields)).params.grammar


async def held_with_notes(formats: Formats | None = FORMATS, level: StrictLevel = "auto", **fields: Any) -> HeldParams:
    """The sampling params with that grammar, and the parts of the schemas that it does not enforce."""

    body = chat(**fields)
    request = Request({"type": "http", "method": "POST", "headers": []}, asyncio.Event().wait)  # type: ignore[arg-type]
    form, tools = forms.form_of(body), forms.tools_of(body)
    return await GrammarBuilder(formats, level).held(SamplingParams(), form, tools, request)


# ---- one form under many names


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": None}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, {"json": {"type": "array"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"json_schema": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"grammar": 'root ::= "yes" | "no"'}, {"grammar": 'root ::= "yes" | "no"'}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, {"json": SCHEMA}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "object"}', "guided_whitespace_pattern": " ?"}, {"json": '{"type": "object"}'}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
async def test_every_name_asks_for_the_same(fields: dict[str, Any], params: dict[str, Any]) -> None:
    found = wanted(**fields)
    assert found is not None
    for name, value in params.items():
        assert getattr(found, name) == value
    assert found.whitespace_pattern == fields.get("guided_whitespace_pattern")
    assert found.disable_any_whitespace is ("structured_outputs" in fields and "json" in fields["structured_outputs"])
    assert await held(**fields) == compile_grammar(found)


@pytest.mark.parametrize(
    ("fields", "are_closed"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, True),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, True),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, True),
        ({"json_schema": SCHEMA}, True),
        ({"guided_json": SCHEMA}, True),
        ({"structured_outputs": {"json": SCHEMA}}, False),
        ({"guided_json": SCHEMA | {"additionalProperties": True}}, False),
    ],
)
async def test_objects_have_only_the_schemas_properties_by_default(fields: dict[str, Any], are_closed: bool) -> None:
    """Schemas that frameworks make of a class do not mention other properties. `structured_outputs` has a switch of its
    own."""
    grammar = await held(**fields)
    assert grammar is not None
    assert WALKER.takes(grammar, '{"a": 1}')
    assert WALKER.takes(grammar, '{"a": 1, "b": 2}') is not are_closed


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
async def test_an_answer_needs_no_form(fields: dict[str, Any]) -> None:
    assert await held(**fields) is None


async def test_a_structural_tag_is_passed_on_whole() -> None:
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
        "triggers": ["<a"],
    }
    found = wanted(response_format=tag)
    assert found is not None
    assert found.structural_tag == tag
    assert await held(response_format=tag) == compile_grammar(found)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        (
            {"response_format": {"type": "json_object", "schema": [1]}},
            "response_format",
            "schema must be a JSON schema",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format", "must be text, json_object, json_schema or struct"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format",
            "must be a JSON schema",
        ),
        ({"response_format": {"type": "json_schema", "schema": [1]}}, "response_format", "must be a JSON schema"),
        ({"json_schema": "{oops"}, "json_schema", "not JSON"),
        ({"grammar": "root ::= ("}, "grammar", "the GBNF grammar is not valid"),
        ({"json_schema": SCHEMA, "guided_regex": "a"}, "json_schema", "an answer has one form"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "unknown field `regexp`"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "Expected `str | null`, got `int` - at `regex`"),
        ({"guided_regex": "(a"}, "guided_regex", "regex is not valid"),
        ({"guided_choice": [""]}, "guided_choice", "not empty"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice ask for 2"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "an answer has one form",
        ),
    ],
)
async def test_a_bad_form_names_its_field(fields: dict[str, Any], param: str, text: str) -> None:
    error = await error_of(**fields)
    assert (error.status, error.param) == (400, param)
    assert text in error.message


async def test_a_bad_schema_names_the_place() -> None:
    schema = {"type": "object", "properties": {"a": {"properties": {"b": {"type": "objekt"}}}}}
    error = await error_of(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert (error.status, error.param) == (400, "response_format")
    assert "/properties/a/properties/b" in error.message


async def test_a_model_without_a_tokenizer_holds_nothing() -> None:
    with pytest.raises(ApiError, match="needs a tokenizer") as caught:
        await held(None, guided_regex="a")
    assert caught.value.param == "guided_regex"
    with pytest.raises(ApiError, match="needs a tokenizer") as caught:
        await held(None, tools=[TOOL], tool_choice="required")
    assert await held(None, tools=[TOOL]) is None


@pytest.mark.parametrize("name", ["thinking_token_budget", "max_thinking_tokens"])
def test_a_budget_of_thinking_has_two_names(name: str) -> None:
    assert forms.thinking_budget(chat(**{name: 0})) == 0
    assert forms.thinking_budget(chat(**{name: -1})) is None
    for value in (-2, 2**31):
        with pytest.raises(ApiError, match=f"^{name} must be between"):
            forms.thinking_budget(chat(**{name: value}))


# ---- tools


@pytest.mark.parametrize(
    ("fields", "mode", "parallel"),
    [
        ({}, "auto", True),
        ({"tool_choice": "auto"}, "auto", True),
        ({"tool_choice": "required"}, "required", True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "required", False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "named", False),
        ({"tool_choice": {"function": {"name": "f"}}}, "named", False),
    ],
)
def test_which_tools_may_be_called(fields: dict[str, Any], mode: str, parallel: bool) -> None:
    found = forms.tools_of(chat(tools=[TOOL, STRICT], **fields))
    assert found is not None
    assert (found.mode, found.parallel, found.given) == (mode, parallel, [TOOL, STRICT])
    assert [tool.function.name for tool in found.allowed] == (["f"] if mode == "named" else ["f", "g"])


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_allowed(mode: str) -> None:
    for inner in ({"type": "function", "function": {"name": "g"}}, {"type": "function", "name": "g"}):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [inner]}}
        found = forms.tools_of(chat(tools=[TOOL, STRICT], tool_choice=choice))
        assert found is not None
        assert (found.mode, len(found.given), found.allowed[0].function.name) == (mode, 2, "g")


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tool_choice": "auto"}, {"tools": [TOOL], "tool_choice": "none"}]
)
def test_no_tool_may_be_called(fields: dict[str, Any]) -> None:
    assert forms.tools_of(chat(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"tools": [{}]}, "tools", "tools[0]: Object missing required field `function`"),
        (
            {"tools": [TOOL, {"function": {}}]},
            "tools",
            "tools[1]: Object missing required field `name` - at `function`",
        ),
        (
            {"tools": [{**TOOL, "type": "web_search"}]},
            "tools",
            "tools[0]: must be function, got 'web_search' - at `type`",
        ),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions named 'f'"),
        ({"tools": [TOOL] * 129}, "tools", "length <= 128"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "must be none, auto, required, "),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "got the type 'mcp'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "it names no function"),
        ({"tools": [TOOL], "tool_choice": {}}, "tool_choice", "it names no function"),
        ({"tool_choice": {}}, "tool_choice", "there are no tools"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "h"}}}, "tool_choice", "'h'; the tools are f"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "takes a mode"),
        (
            {
                "tools": [{"function": {"name": "f", "strict": True, "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "tools",
            "tool 'f'",
        ),
        ({"tools": [{"function": {"name": "a b", "strict": True}}]}, "tools", "'a b'"),
    ],
)
async def test_bad_tools_name_what_is_wrong(fields: dict[str, Any], param: str, text: str) -> None:
    error = await error_of(**fields)
    assert (error.status, error.param) == (400, param)
    assert text in error.message


async def test_tools_that_are_nested_too_deeply_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"properties": deep}
    error = await error_of(tools=[{"function": {"name": "f", "parameters": deep}}])
    assert error.message == "tools[0] is nested more than 64 deep"


def odd_tool(**more: Any) -> dict[str, Any]:
    parameters = {"properties": {"p": {"type": "any", "pattern": "("}}, "required": None}
    return {"type": "function", "function": {"name": "odd", "parameters": parameters, **more}}


async def test_an_odd_tool_beside_good_ones_is_named_in_a_note() -> None:
    params, notes = await held_with_notes(tools=[TOOL, odd_tool()], tool_choice="required")
    assert notes == ("tools odd #/properties/p: 'type'", "tools odd #/properties/p: 'pattern'")
    assert params.grammar is not None
    assert (await held_with_notes(tools=[TOOL, odd_tool()])).notes == ()
    assert (
        "tool 'odd': the JSON schema at #/properties/p: type is 'any'"
        in (await error_of(tools=[odd_tool(strict=True)])).message
    )


async def test_ignored_parts_of_a_schema_are_named_in_a_note() -> None:
    schema = {"type": "string", "format": "uuid", "pattern": r"(.)(?!\1)"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    params, notes = await held_with_notes(response_format=form)
    assert notes == ("response_format #: 'pattern'",)
    assert params.grammar is not None
    headers = bodies.warned({"Warning": '299 vllm-lite "ignored: x"'}, "not held", [*notes, 'a"\r\n' + "y" * 200])
    assert headers["Warning"] == (
        '299 vllm-lite "ignored: x", 299 vllm-lite "not held: response_format #: \'pattern\', a???' + "y" * 116 + '"'
    )


async def test_only_demanded_or_strict_calls_have_a_grammar() -> None:
    assert await held(tools=[TOOL]) is None
    assert await held(tools=[TOOL, STRICT]) is not None
    function, parameter = await held(level="function", tools=[TOOL]), await held(level="parameter", tools=[TOOL])
    assert function is not None
    assert parameter == await held(tools=[{"type": "function", "function": {**TOOL["function"], "strict": True}}])
    assert function != parameter
    required = await held(tools=[TOOL], tool_choice="required")
    assert required is not None
    named = await held(tools=[TOOL, STRICT], tool_choice={"function": {"name": "f"}})
    assert named is not None
    assert '"g' not in named


async def test_calls_that_are_demanded_leave_no_room_for_a_form() -> None:
    form: dict[str, Any] = {"response_format": {"type": "json_object"}}
    assert await held(tools=[TOOL], tool_choice="required", **form) == await held(tools=[TOOL], tool_choice="required")


def accepts(grammar: str, text: str) -> bool:
    """Whether a grammar lets the whole text through."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    return matcher.validate_tokens(list(text.encode())) >= len(text.encode()) and not matcher.is_error()


@pytest.mark.parametrize("tool", [TOOL, STRICT])
async def test_an_answer_has_its_form_or_is_calls(tool: dict[str, Any]) -> None:
    """As with OpenAI: `response_format` constrains the content, and the model may call tools instead."""
    schema = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    grammar = await held(tools=[tool], response_format=form)
    assert grammar is not None
    name = tool["function"]["name"]
    assert accepts(grammar, '{"b": true}')
    assert accepts(grammar, f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 5}}}}\n</tool_call>')
    assert not accepts(grammar, '{"a": 5}')
    assert not accepts(grammar, "words")


def test_a_completion_has_a_form_too() -> None:
    body = bodies.read(msgspec.json.encode({"prompt": "x", "guided_regex": "a"}), CompletionBody)[0]
    form = forms.form_of(body)
    assert form is not None
    assert (form.field, form.params.regex) == ("guided_regex", "a")
