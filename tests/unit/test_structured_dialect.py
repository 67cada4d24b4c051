"""Every keyword and value that a grammar cannot have: refused where a schema is to be held as a whole, left out of the
schemas of tools that need not be strict."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.loose_tools import GOOD, JSON_SHAPE, SHAPES, WALKER, call, calls_of
from vllm_lite.errors import RequestError
from vllm_lite.structured.calls.tools import Tool, tool_grammar
from vllm_lite.structured.limits import MAX_OPTIONAL_IN_PART, MAX_SCHEMA_PARTS
from vllm_lite.structured.schemas.preparing import UNSUPPORTED

# ---- tools that need not be strict

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
def test_unsupported_schemas_are_ignored_with_a_note(name: str) -> None:
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


def test_rules_of_a_failed_schema_are_dropped() -> None:
    """The rule of `self` refers to that of `p`, which is never written, because writing `far` fails."""
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


@settings(max_examples=examples(150))
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
