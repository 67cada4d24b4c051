"""Reads calls whose arguments are nested elements: <city>Paris</city>, and <item>...</item> for each entry of a list.

Only the schema of a tool shows whether an element without children is a text, a number, or an empty object or list. So
a call is read when it is complete.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from vllm_lite.client.text.response.calls import CallSink, PropertiesOf, WholeReader
from vllm_lite.client.text.response.contents import loose_value, schema_types
from vllm_lite.client.text.response.marks import Marks

MAX_DEPTH = 64
ITEM = "item"
"""Name of elements that are the entries of a list."""
Element = tuple[str, Any]
"""A name, and a text or a list of elements."""


class ElementReader(WholeReader):
    """Reads one call. A truncated call is rejected, because missing elements could not be noticed."""

    def cut(self) -> str:
        return "".join(self._parts)


def element_reader(sink: CallSink, name: str, prefix: str, marks: Marks, properties_of: PropertiesOf) -> ElementReader:
    """Create the reader of a call of `name`. `prefix`: text before the name in each tag."""

    def calls_of(text: str) -> list[tuple[str, str]]:
        schemas = properties_of(name)
        arguments = {key: typed(value, schemas.get(key)) for key, value in elements(marks.spell(text), prefix)}
        return [(name, json.dumps(arguments, ensure_ascii=False))]

    return ElementReader(sink, calls_of)


def elements(text: str, prefix: str) -> list[Element]:
    """Parse a text to elements. Raises ValueError for tags that are not nested, and for text between elements."""
    tag = re.compile(re.escape(prefix) + r"<(/?)([^<>/\s]{1,256})>")
    root: list[Element] = []
    open_: list[tuple[str, list[Element], int]] = [("", root, 0)]
    """Open elements: name, the elements inside, and the place in `text` after the opening tag or after the last element
    inside."""
    for found in tag.finditer(text):
        name, inner, place = open_[-1]
        between = text[place : found.start()]
        if not found[1]:
            if between.strip():
                raise ValueError(f"text before an element: {between[:100]!r}")
            if len(open_) > MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} elements in one another")
            open_.append((found[2], [], found.end()))
            continue
        if name != found[2] or len(open_) == 1 or (inner and between.strip()):
            raise ValueError(f"</{found[2]}> does not close <{name}>")
        open_.pop()
        outer, siblings, _ = open_[-1]
        siblings.append((name, inner or between))
        open_[-1] = (outer, siblings, found.end())
    if len(open_) > 1 or text[open_[0][2] :].strip():
        raise ValueError("an element is not closed")
    return root


def typed(value: str | list[Element], schema: Any) -> Any:
    """Convert an element to the type in its schema, or to the type that it looks like."""
    types = schema_types(schema)
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, str):
        if not value and "string" not in types:
            return {} if "object" in types else [] if "array" in types else ""
        return loose_value(value, types)
    if all(name == ITEM for name, _ in value) and "object" not in types:
        return [typed(inner, schema.get("items")) for _, inner in value]
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    return {name: typed(inner, properties.get(name)) for name, inner in value}
