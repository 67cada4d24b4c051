"""Every keyword and value that a grammar cannot have: refused where a schema is to be held as a whole, left out of the
schemas of tools that need not be strict, or written as something that says the same."""

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grammar_walk import Walker
from vllm_lite.errors import RequestError
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.structured.compile import compile_form, compile_grammar
from vllm_lite.structured.findings import Findings
from vllm_lite.structured.limits import MAX_OPTIONAL_IN_PART, MAX_SCHEMA_PARTS
from vllm_lite.structured.preparing import UNSUPPORTED, prepared
from vllm_lite.structured.tools import CallGrammar, CallShape, Tool, tool_grammar

WALKER = Walker()
JSON_SHAPE = CallShape(
    call_begin='<tool_call>\n{"name": "', name_end='", "arguments": ', call_end="}\n</tool_call>", between="\n"
)
SHAPES = {
    "json": JSON_SHAPE,
    "python": CallShape(
        begin="[", call_begin="", name_end="(", call_end=")", between=", ", end="]", arguments="python"
    ),
    "tagged": CallShape(
        call_begin="<call=",
        name_end=">",
        call_end="</call>",
        arguments="tagged",
        key_begin="<",
        key_end=">",
        value_end="\n</v>\n",
    ),
    "gemma": CallShape(call_begin="<c>", name_end=":", call_end="</c>", arguments="gemma", quote='<|"|>'),
}
GOOD = Tool("good", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]})


def grammar_of(schema: Any) -> str:
    return compile_grammar(StructuredOutputsParams(json=schema))


def taken(schema: Any, *values: Any) -> list[Any]:
    """The values that the grammar of a schema lets through."""
    grammar = grammar_of(schema)
    return [value for value in values if WALKER.takes(grammar, json.dumps(value, ensure_ascii=False))]


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def calls_of(parameters: Any, *, strict: bool = False, shape: str = "json") -> CallGrammar:
    return tool_grammar(SHAPES[shape], [GOOD, Tool("odd", parameters, strict=strict)], "required")


# ---- tools that need not be strict

STRING: dict[str, Any] = {"type": "string"}
ODD: dict[str, tuple[Any, str]] = {
    **{key: ({"type": "string", key: {"type": "null"}}, repr(key)) for key in ("not", "contains")},
    **{key: ({"type": "object", key: {"a": ["b"]}}, repr(key)) for key in ("dependencies", "dependentRequired")},
    "dependentSchemas": ({"dependentSchemas": {"a": {"required": ["b"]}}}, "'dependentSchemas'"),
    "if": ({"type": "string", "if": {"minLength": 1}, "then": {"maxLength": 3}}, "'if'"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    "propertyNames": ({"propertyNames": {"not": {}}, "properties": {"x": {}}}, "'propertyNames'"),
    "unevaluatedItems": ({"anyOf": [{}], "unevaluatedItems": False}, "'unevaluatedItems'"),
    "unevaluatedProperties": ({"anyOf": [{}], "unevaluatedProperties": False}, "'unevaluatedProperties'"),
    "$dynamicRef": ({"$dynamicRef": "#x"}, "'$dynamicRef'"),
    "$recursiveRef": ({"$recursiveRef": "#"}, "'$recursiveRef'"),
    "look-around": ({"type": "string", "pattern": r"(\w)(?!\1)"}, "'pattern'"),
    "back reference": ({"type": "string", "pattern": r"(\w)\1"}, "'pattern'"),
    "no pattern": ({"type": "string", "pattern": "("}, "'pattern'"),
    "pattern, counts": ({"type": "string", "pattern": "(a{200}){200}"}, "'pattern'"),
    "pattern, type": ({"type": "string", "pattern": 5}, "'pattern'"),
    "pattern of names": ({"patternProperties": {"(": {}}}, "'pattern'"),
    "patterns that overlap": ({"patternProperties": {"^a": {}, "b$": {}}}, "'patternProperties'"),
    "minimum of 19 digits": ({"type": "integer", "minimum": 2**62}, "'minimum'"),
    "bounds that exclude": ({"type": "integer", "minimum": 3, "maximum": 2}, "'minimum'"),
    "minimum, text": ({"type": "integer", "minimum": "1"}, "'minimum'"),
    "multipleOf": ({"type": "integer", "multipleOf": 1000003}, "'multipleOf'"),
    "multipleOf 0": ({"type": "integer", "multipleOf": 0}, "'multipleOf'"),
    "external $ref": ({"$ref": "https://a.invalid/s.json"}, "'$ref'"),
    "dangling $ref": ({"$ref": "#/$defs/nothing"}, "'$ref'"),
    "$ref, type": ({"$ref": 5}, "'$ref'"),
    "$ref to itself": ({"$ref": "#/properties/p"}, ""),
    "type any": ({"type": "any"}, "'type'"),
    "type, list": ({"type": ["string", "any"]}, "'type'"),
    "type, empty": ({"type": []}, "'type'"),
    "type, object": ({"type": {}}, "'type'"),
    "enum, empty": ({"type": "string", "enum": []}, "'enum'"),
    "enum, text": ({"enum": "a"}, "'enum'"),
    "enum of another type": ({"type": "string", "enum": [1]}, "'enum'"),
    "anyOf, empty": ({"anyOf": []}, "'anyOf'"),
    "anyOf, names": ({"anyOf": ["string", "null"]}, "/anyOf/0"),
    "anyOf, object": ({"anyOf": {"type": "string"}}, "'anyOf'"),
    "required, true": ({"type": "string", "required": True}, "'required'"),
    "required, names": ({"type": "object", "required": ["a", 1]}, "'required'"),
    "properties, list": ({"type": "object", "properties": [1]}, "'properties'"),
    "properties, names": ({"type": "object", "properties": {"x": "string"}}, "/properties/x"),
    "items, name": ({"type": "array", "items": "string"}, "'items'"),
    "prefixItems, object": ({"type": "array", "prefixItems": {}}, "'prefixItems'"),
    "additionalProperties, name": ({"additionalProperties": "x"}, "'additionalProperties'"),
    "counts": ({"type": "string", "minLength": -1}, "'minLength'"),
    "counts that exclude": ({"type": "string", "minLength": 5, "maxLength": 3}, "'minLength'"),
    "minProperties": (
        {"type": "object", "minProperties": 3, "properties": {"x": {}}, "additionalProperties": False},
        "",
    ),
    "too many properties": ({"properties": {f"p{i}": {} for i in range(MAX_OPTIONAL_IN_PART + 1)}}, "'properties'"),
    "half a pair": ({"const": "\ud800"}, ""),
    "two at once": ({"type": "any", "pattern": "("}, "'pattern'"),
}


def test_the_table_has_every_keyword_that_is_refused() -> None:
    named = {key for key in UNSUPPORTED if any(key in schema for schema, _ in ODD.values())}
    assert named | {"then", "else", "minContains", "maxContains"} >= set(UNSUPPORTED)


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_held_is_left_out_with_a_note(name: str) -> None:
    odd, noted = ODD[name]
    parameters = {"type": "object", "properties": {"p": odd, "q": {"enum": ["x"]}}, "required": ["p", "q"]}
    text, notes = calls_of(parameters)
    assert text is not None
    assert WALKER.takes(text, call("good", {"n": 2}))
    assert not WALKER.takes(text, call("good", {"n": 3}))
    assert WALKER.takes(text, call("odd", {"p": _any_of(text), "q": "x"}))
    assert any(note.startswith("odd #") and note.endswith(noted) for note in notes), notes
    if name != "half a pair":  # what is left is held
        assert not WALKER.takes(text, call("odd", {"p": _any_of(text), "q": "y"}))
    with pytest.raises(RequestError, match=r"^tool 'odd': the JSON schema "):
        calls_of(parameters, strict=True)


def _any_of(grammar: str) -> Any:
    """A value that may be argument `p` of the odd tool."""
    values: tuple[Any, ...] = ("a", 1, 5, None, {}, [], [1], {"x": 1, "y": 2, "z": 3})
    return next(value for value in values if WALKER.takes(grammar, call("odd", {"p": value, "q": "x"})))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ODD)
def test_every_format_of_calls_leaves_it_out(shape: str, name: str) -> None:
    parameters = {"type": "object", "properties": {"p": ODD[name][0]}, "required": ["p"]}
    text, _ = calls_of(parameters, shape=shape)
    assert text is not None


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array", "items": {}},
        {"type": "any"},
        {"type": "object", "required": None, "properties": None},
        {"type": "object", "properties": []},
        {"type": ["object", "null"]},
        {"type": "object", "properties": {f"p{i}": {"type": "any"} for i in range(30)}},
        {"type": "object", "anyOf": [{"type": "null"}] * (MAX_SCHEMA_PARTS + 1)},
        {"type": "object", "$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}},
        {"type": "object", "$ref": "#"},
        {"$ref": "https://a.invalid/s.json", "$schema": "https://a.invalid/dialect", "$id": 5},
        {"not": {}},
    ],
)
def test_whole_schemas_that_are_odd(parameters: Any) -> None:
    text, _ = calls_of(parameters)
    assert text is not None
    assert WALKER.takes(text, call("odd", {}))
    assert WALKER.takes(text, call("good", {"n": 1}))
    assert not WALKER.takes(text, call("good", {}))
    assert not WALKER.takes(text, call("odd", []))


@pytest.mark.parametrize(
    ("kind", "value"), [("STRING", "a"), ("dict", {}), ("float", 1.5), ("Integer", 3), ("list", [1])]
)
def test_types_of_other_languages_are_read(kind: str, value: Any) -> None:
    text, notes = calls_of({"type": "dict", "properties": {"p": {"type": kind}}, "required": ["p"]})
    assert text is not None
    assert notes == ()
    assert WALKER.takes(text, call("odd", {"p": value}))
    assert not WALKER.takes(text, call("odd", {"p": None}))


def test_schemas_that_are_too_large_together_leave_the_names() -> None:
    large = {"type": "object", "properties": {f"p{i}": {"enum": ["x" * 300]} for i in range(90)}, "required": ["p0"]}
    tools = [Tool("good", GOOD.parameters, strict=True)]
    tools += [Tool(f"t{i}", large) for i in range(20)]
    text, notes = tool_grammar(JSON_SHAPE, tools, "required")
    assert text is not None
    assert "t7 #" in notes
    assert WALKER.takes(text, call("t7", {"anything": 1}))
    assert not WALKER.takes(text, call("good", {"n": 3}))


def test_what_was_written_of_a_schema_that_fails_is_dropped() -> None:
    """The rule of `self` names that of `p`, which is never written: the reader of the format gives up at `far`."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(30)} | {"d30": {"type": "string"}}
    inner = {"type": "object", "properties": {"self": {"$ref": "#/properties/p"}}}
    p = {"type": "object", "properties": {"a": inner, "far": {"$ref": "#/$defs/d0"}}}
    text, notes = calls_of({"type": "object", "properties": {"p": p}, "$defs": chain}, shape="python")
    assert notes == ("odd #",)
    assert text is not None
    assert WALKER.takes(text, "[odd(p=1), good(n=1)]")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text("a(#/\ud800é", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "a", "$ref", "items"]), inner, max_size=3)
    ),
    max_leaves=4,
)
KEYWORDS = (
    *("type", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "properties", "required", "additionalProperties"),
    *("patternProperties", "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems"),
    *(
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "multipleOf",
    ),
    *("$defs", "definitions", "$schema", "$id", "$anchor", "$dynamicAnchor", "x-guidance", "discriminator", "nullable"),
    *UNSUPPORTED,
)
PARTS = st.dictionaries(st.sampled_from(KEYWORDS), JUNK | st.sampled_from(["a", 1]), max_size=4)


@settings(max_examples=150, deadline=None)
@given(PARTS, PARTS, st.sampled_from(sorted(SHAPES)))
def test_no_schema_of_a_loose_tool_is_refused(root: Any, inner: Any, shape: str) -> None:
    parameters = {**root, "properties": {"p": inner}}
    text, _ = calls_of(parameters, shape=shape)
    assert text is not None
    WALKER.matcher(text)
    for strict in (False, True):
        try:
            calls_of(root, strict=strict, shape=shape)
        except RequestError:
            if not strict:
                raise


# ---- what is written in another way


@pytest.mark.parametrize("target", ["draft-2020-12", "draft-7"])
@pytest.mark.parametrize("order", range(6))
def test_the_order_of_keywords_changes_nothing(order: int, target: str) -> None:
    """A list of items inside allOf, beside additionalItems: the JSON Schema test suite's "items defined in allOf are
    not examined"."""
    keywords: dict[str, Any] = {
        "allOf": [{"items": [{"type": "integer"}, {"type": "string"}]}],
        "items": [{"type": "integer"}],
        "additionalItems": {"type": "boolean"},
    }
    names = list(itertools.permutations(keywords))[order]
    schema = {name: keywords[name] for name in names}
    values: list[Any] = [[1, "hello"], [1, None], [1], [1, "x", True], []]
    judge = jsonschema.Draft7Validator(schema)
    assert taken(schema, *values) == [value for value in values if judge.is_valid(value)] == [[1], []]


@pytest.mark.parametrize("is_first", [False, True])
def test_properties_come_in_the_order_of_the_schema(is_first: bool) -> None:
    own, inner = ({"properties": {name: {"type": "integer"}}} for name in "ba")
    parts: list[dict[str, Any]] = [{"allOf": [inner]}, own] if is_first else [own, {"allOf": [inner]}]
    schema = {"type": "object", "required": ["a", "b"], **parts[0], **parts[1]}
    grammar = grammar_of(schema)
    assert WALKER.takes(grammar, '{"a": 1, "b": 2}') is is_first
    assert WALKER.takes(grammar, '{"b": 1, "a": 2}') is not is_first


E15, INT64 = 10**15, 2**63


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (
            {"type": "integer", "minimum": -INT64, "maximum": INT64 - 1},
            [0, -5 * 10**18, INT64 - 1, -INT64 + 1024, INT64],
        ),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, -1, 7 * 10**18]),
        ({"type": "integer", "minimum": 2**53 + 1}, [2**53, 2**53 + 1, 2**53 + 2]),
        ({"type": "integer", "maximum": -(2**53) - 1}, [-(2**53), -(2**53) - 2]),
        ({"type": "number", "minimum": 1e-9, "maximum": 1e308}, [1e-4, 0, -1, 5 * E15, 0.5]),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [-0.5, 7 * E15, 0]),
        ({"type": "number", "minimum": -(10**400), "maximum": 10**400}, [-0.5, 7 * E15]),
        ({"type": "number", "exclusiveMinimum": 5e-324}, [0.0001, 0, 1]),
        ({"type": "number", "exclusiveMaximum": -5e-324}, [-0.0001, 0, -1]),
        ({"type": "number", "exclusiveMinimum": -1e-300, "maximum": 1e-300}, [0, 1, -1]),
        ({"type": ["integer", "string"], "maximum": 10**19}, [5, "a", 9 * 10**18]),
        ({"minimum": 2, "exclusiveMinimum": -1e-200}, [1, 2, "a"]),
    ],
)
def test_bounds_are_moved_inwards(schema: Any, values: list[Any]) -> None:
    found = taken(schema, *values)
    judge = jsonschema.Draft202012Validator(schema)
    wanted = [value for value in values if judge.is_valid(value)]
    assert found == [value for value in wanted if value != 2**53 + 1]  # float64 has no such number


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    st.integers(-(2**66), 2**66) | st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["integer", "number"]),
    st.lists(st.integers(-(2**66), 2**66) | st.integers(-3, 3), min_size=3, max_size=6),
)
def test_no_bound_lets_more_through(key: str, bound: float, kind: str, values: list[int]) -> None:
    schema = {"type": kind, key: bound}
    near = [] if abs(bound) > 1e300 else [int(bound) + step for step in (-2, -1, 0, 1, 2)]
    try:
        found = taken(schema, *values, *near)
    except RequestError:
        if abs(bound) < 8e17:
            raise
        return
    judge = jsonschema.Draft202012Validator(schema)
    assert all(judge.is_valid(value) for value in found)


class Counted(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("of", ["dependentRequired", "propertyNames"])
def test_thousands_of_names_are_looked_up(of: str) -> None:
    """Comparing each with all took 6 s of 20,000, and hours of what one body may hold."""
    names = [[Counted(f"name {number}") for number in range(1000)] for _ in range(2)]
    schema: dict[str, Any] = {"type": "object", of: {"a": names[0]}, "required": names[1]}
    if of == "propertyNames":
        schema = {"type": "object", of: {"enum": names[0]}, "properties": dict.fromkeys(names[1], True)}
        schema["required"] = names[1]
    Counted.num_comparisons = 0
    prepared(schema, {}, Findings(is_lenient=False))
    assert Counted.num_comparisons < 20 * len(names[0])


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"minimum": 1, "exclusiveMinimum": True, "type": "integer"}, [2], [1]),
        ({"maximum": 1, "exclusiveMaximum": True, "type": "integer"}, [0], [1]),
        ({"minimum": 1, "exclusiveMinimum": False, "type": "integer"}, [1], [0]),
        ({"type": "array", "minItems": 2.0, "maxItems": 2.0}, [[1, 2]], [[1]]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
        ({"type": "object", "required": None, "properties": {"a": STRING}, "enum": None}, [{}, {"a": "x"}], [{"a": 1}]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"items": [STRING], "unevaluatedItems": False, "type": "array"}, [["a"]], [["a", 1], [1]]),
        ({"prefixItems": [STRING], "unevaluatedItems": False, "type": "array"}, [["a"]], [["a", 1], [1]]),
        ({"type": "array", "contains": {}, "minContains": 0}, [[], [1]], ["a"]),
        ({"type": "array", "minContains": 3, "maxContains": 4}, [[]], ["a"]),
        ({"type": "string", "if": {"maxLength": 1}}, ["ab"], [1]),
        ({"type": "string", "then": False, "else": False}, ["ab"], [1]),
        ({"type": "string", "not": False}, ["ab"], [1]),
        ({"type": "object", "dependentRequired": {"a": ["b"]}, "required": ["b"]}, [{"b": 1}], [{}]),
        ({"type": "object", "dependencies": {}, "dependentSchemas": {}, "$dynamicAnchor": "x"}, [{}], ["a"]),
        ({"type": "string", "$schema": "https://a.invalid/dialect"}, ["a"], [1]),
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": STRING},
            [{"a": "b"}],
            [{"a": 1}],
        ),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}, "type": "object"},
            [{}, {"a": 1}, {"a": 1, "b": 2}],
            [{"c": 1}, {"a": "x"}],
        ),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": STRING, "c": {}}, "type": "object"},
            [{}, {"a": "x"}, {"b": 2}],
            [{"c": 1}, {"a": 1}],
        ),
        (
            {"propertyNames": {"format": "date"}, "additionalProperties": {"type": "integer"}, "type": "object"},
            [{"2024-02-29": 1}],
            [{"2023-02-29": 1}, {"a": 1}, {"2024-02-29": "x"}],
        ),
        (
            {"propertyNames": {"pattern": "^x", "minLength": 2, "maxLength": 3}, "type": "object"},
            [{}, {"xa": 1}, {"xab": None}],
            [{"x": 1}, {"xabc": 1}, {"ab": 1}],
        ),
        (
            {
                "propertyNames": {"maxLength": 2},
                "patternProperties": {"^[a-z]+$": {"type": "integer"}},
                "type": "object",
            },
            [{"ab": 1}, {"A": "x"}],
            [{"abc": 1}, {"ab": "x"}, {"ABC": 1}],
        ),
        (
            {"propertyNames": {"pattern": "^(?!_)"}, "additionalProperties": STRING, "type": "object"},
            [{"a": "b"}],
            [{"_": "b"}],
        ),
        (
            {"patternProperties": {"^(?!_)": STRING}, "additionalProperties": False, "type": "object"},
            [{"a": "b"}],
            [{"_": "b"}],
        ),
    ],
)
def test_what_has_no_grammar_is_written_as_what_has_one(schema: Any, good: list[Any], bad: list[Any]) -> None:
    judge = (
        jsonschema.Draft4Validator
        if isinstance(schema.get("exclusiveMinimum", schema.get("exclusiveMaximum")), bool)
        else None
    )
    assert taken(schema, *good, *bad) == good
    if judge is not None:
        assert [value for value in [*good, *bad] if judge(schema).is_valid(value)] == good


def test_choices_behind_references_exclude_each_other() -> None:
    one, other = ({"type": "object", "properties": {"t": {"const": t}}, "required": ["t"]} for t in "ab")
    refs = [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}]
    schema = {"type": "array", "items": {"oneOf": refs}, "$defs": {"one": one, "other": other}}
    assert taken(schema, [{"t": "a"}], [{"t": "b"}], [{"t": "c"}]) == [[{"t": "a"}], [{"t": "b"}]]


def test_a_tool_that_is_strict_has_its_patterns_held() -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": r"^(?!\.)[a.]+$"}}, "required": ["p"]}
    text, notes = calls_of(schema, strict=True)
    assert text is not None
    assert notes == ()
    assert WALKER.takes(text, call("odd", {"p": "a.a"}))
    assert not WALKER.takes(text, call("odd", {"p": ".a"}))
    python, _ = calls_of(schema, strict=True, shape="python")
    assert python is not None
    assert WALKER.takes(python, '[odd(p="a.a")]')
    assert not WALKER.takes(python, '[odd(p=".a")]')


def test_notes_of_a_form_name_the_place() -> None:
    schema = {"type": "object", "properties": {"a/b": {"format": "uuid", "pattern": r"(.)\1(?=x)"}}}
    assert compile_form(StructuredOutputsParams(json=schema)).notes == ("#/properties/a~1b: 'pattern'",)


def test_walks_under_rewritten_schemas_are_valid() -> None:
    schema = {
        "type": "object",
        "properties": {
            "amount": {
                "type": "string",
                "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)$",
            },
            "keys": {
                "propertyNames": {"enum": ["a", "b"]},
                "additionalProperties": {"type": "boolean"},
                "type": "object",
            },
            "n": {"type": "integer", "minimum": -INT64, "maximum": 3},
        },
        "required": ["amount", "keys", "n"],
        "additionalProperties": False,
    }
    grammar, ended = grammar_of(schema), 0
    for seed in range(10):
        text, is_whole = WALKER.walk(grammar, random.Random(seed))
        if is_whole:
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    assert ended >= 3
