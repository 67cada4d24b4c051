"""Keywords that a grammar cannot have, and for which it has others that say the same."""

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.loose_tools import STRING, WALKER, call, calls_of, grammar_of, taken
from vllm_lite.errors import RequestError
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.structured.compile import compile_form
from vllm_lite.structured.findings import Findings
from vllm_lite.structured.schemas.preparing import prepared

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


@settings(max_examples=examples(200))
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
    """Comparing each name with all others took 6 s for 20,000, and would take hours for the largest body."""
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
def test_rewritten_schemas_accept_the_same_values(schema: Any, good: list[Any], bad: list[Any]) -> None:
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
