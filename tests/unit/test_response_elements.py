"""Calls whose arguments are nested elements, as MiniMax M3 writes them."""

from typing import Any

import pytest

from vllm_lite.client.text.response.element_calls import MAX_DEPTH, elements, typed


def xml(text: str) -> str:
    """`text` with the character that precedes each tag."""
    return text.replace("<", "#<")


def value(text: str, schema: Any = None) -> Any:
    return typed(elements(xml(text), "#"), schema)


def test_lists_are_items_and_objects_anything_else() -> None:
    text = "<a><item>1</item><item><b>x</b></item></a><c>true</c><d>é <i> & \n</d>".replace("<i>", "~")
    assert value(text) == {"a": [1, {"b": "x"}], "c": True, "d": "é ~ & \n"}
    assert value("<item>x</item>", {"type": "object"}) == {"item": "x"}
    assert value("<item>x</item>", {"type": "array"}) == ["x"]


def test_texts_have_the_types_of_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "list": {"type": "array", "items": {"type": "string"}},
            "deep": {"type": "object", "properties": {"size": {"type": "number"}, "none": {"type": "object"}}},
            "empty": {"type": "array"},
        },
    }
    text = "<text>12</text><list><item>1</item></list><deep><size>0.5</size><none></none></deep><empty></empty>"
    assert value(text, schema) == {"text": "12", "list": ["1"], "deep": {"size": 0.5, "none": {}}, "empty": []}
    assert value("<x></x>", {"properties": {"x": {"type": "string"}}}) == {"x": ""}
    assert value("<x></x>") == {"x": ""}


def test_tags_without_their_prefix_are_text() -> None:
    assert typed(elements("#<a><b>1</b>#</a>", "#"), None) == {"a": "<b>1</b>"}


@pytest.mark.parametrize(
    "text",
    [
        "<a>1",
        "<a>1</b>",
        "</a>",
        "<a>1</a></a>",
        "x<a>1</a>",
        "<a>1</a>x",
        "<a>x<b>1</b></a>",
        "<a><b>1</b>x</a>",
        "<a>" * (MAX_DEPTH + 1) + "</a>" * (MAX_DEPTH + 1),
    ],
)
def test_malformed_elements_are_no_call(text: str) -> None:
    with pytest.raises(ValueError, match=r"element|close"):
        elements(xml(text), "#")


def test_the_deepest_tree_is_read() -> None:
    assert elements(xml("<a>" * MAX_DEPTH + "1" + "</a>" * MAX_DEPTH), "#")
