"""Objects that name their properties are closed, where that contradicts nothing."""

from typing import Any

import pytest

from vllm_lite.structured.schemas.preparing import closed

INTEGER = {"type": "integer"}


def test_objects_are_closed_at_every_depth() -> None:
    inner = {"type": "object", "properties": {"a": INTEGER}}
    schema = {"$defs": {"d": inner}, "properties": {"x": inner, "y": {"$ref": "#/$defs/d"}, "z": {"items": inner}}}
    shut = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "$defs": {"d": shut},
        "properties": {"x": shut, "y": {"$ref": "#/$defs/d"}, "z": {"items": shut}},
        "additionalProperties": False,
    }
    assert "additionalProperties" not in inner


def test_parts_that_describe_an_object_alone_are_closed_too() -> None:
    """Pydantic writes a field with a description as an allOf of one."""
    inner = {"properties": {"a": INTEGER}}
    schema = {"$defs": {"d": inner}, "items": {"allOf": [{"$ref": "#/$defs/d"}], "description": "x"}}
    assert closed(schema) == {**schema, "$defs": {"d": {**inner, "additionalProperties": False}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": INTEGER}, "required": ["a", "b"]},
        {"properties": {"a": INTEGER}, "minProperties": 2},
        {"allOf": [{"$ref": "#/$defs/d"}], "anyOf": [INTEGER], "$defs": {"d": {"properties": {"a": INTEGER}}}},
        {"properties": {"a": INTEGER}, "additionalProperties": INTEGER},
        {"properties": {"a": INTEGER}, "patternProperties": {"^x": INTEGER}},
        {"properties": {"a": INTEGER}, "anyOf": [{"required": ["b"]}, {"properties": {"c": INTEGER}}]},
        {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]},
        {"$defs": {"d": {"properties": {"a": INTEGER}}}, "$ref": "#/$defs/d", "properties": {"b": INTEGER}},
    ],
)
def test_schemas_with_other_keywords_are_not_changed(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
