"""Chooses the reader for the calls of a field."""

import json
import re
from collections.abc import Mapping
from typing import Any

from vllm_lite.client.text.response import contents
from vllm_lite.client.text.response.calls import CallReader, CallSink, WholeReader
from vllm_lite.client.text.response.element_calls import element_reader
from vllm_lite.client.text.response.json_calls import ArgumentsReader, Envelope, EnvelopeReader, NamedReader
from vllm_lite.client.text.response.json_value import JSON, Dialect
from vllm_lite.client.text.response.marks import Marks
from vllm_lite.client.text.response.pythonic_calls import PythonicReader
from vllm_lite.client.text.response.tagged_calls import TaggedReader, Tags
from vllm_lite.client.text.response.template import Field

Properties = Mapping[str, Mapping[str, Any]]
"""Tool name -> parameter name -> JSON schema."""
_ENTRY = re.compile(r"\{(?:content\.)?(\w+)\}")


def reader_of(
    field: Field, captures: Mapping[str, str], sink: CallSink, marks: Marks, properties: Properties
) -> CallReader:
    """Create the reader of one region of `field`. `captures`: the groups of its opening pattern."""
    name = captures.get("name") if _name_is_captured(field) else None

    def properties_of(called: str) -> Mapping[str, Any]:
        return properties.get(marks.spell(called).strip(), {})

    if field.kind == "pythonic":
        return PythonicReader(sink, properties_of)
    if field.kind == "elements" and name is not None:
        prefix = str(field.arguments.get("prefix", ""))
        return element_reader(sink, marks.spell(name).strip(), prefix, marks, properties_of)
    if field.kind == "xml-inline" and name is not None and "tags" in field.arguments:
        tags = Tags(**{key: marks.literal(text) for key, text in field.arguments["tags"].items()})
        return TaggedReader(sink, name, tags, properties_of)
    if field.kind == "json":
        dialect, envelope = _dialect(field.arguments, marks), _envelope(field)
        if name is not None and dialect is not None:
            return ArgumentsReader(sink, name, dialect)
        if field.arguments.get("name_is_key"):
            return NamedReader(sink)
        if dialect is JSON and envelope is not None:
            return EnvelopeReader(sink, envelope)

    def calls_of(text: str) -> list[tuple[str, str]]:
        return whole_calls(marks.spell(text), field, captures, properties)

    return WholeReader(sink, calls_of)


def _function(field: Field) -> Any:
    """Return the part of a transform for `function`, or the whole transform."""
    made = field.transform
    if isinstance(made, list) and len(made) == 1:
        made = made[0]
    return made.get("function", made) if isinstance(made, Mapping) else made


def _name_is_captured(field: Field) -> bool:
    made = _function(field)
    return isinstance(made, Mapping) and made.get("name") == "{name}" and made.get("arguments") == "{content}"


def _envelope(field: Field) -> Envelope | None:
    """Find the keys of a call's name and arguments; None if they are elsewhere."""
    if "envelope" in field.arguments:
        given = field.arguments["envelope"]
        others = given.get("others")
        return Envelope(given["name"], tuple(given["arguments"]), None if others is None else tuple(others))
    made = _function(field)
    if made is None or made == "{content}" or _name_is_captured(field):
        return Envelope()
    if not isinstance(made, Mapping):
        return None
    name, arguments = (_ENTRY.fullmatch(str(made.get(key))) for key in ("name", "arguments"))
    if name is None or arguments is None or "content" in (name[1], arguments[1]):
        return None
    return Envelope(name[1], (arguments[1],))


def _dialect(arguments: Mapping[str, Any], marks: Marks) -> Dialect | None:
    """Find the field's deviations from JSON; None if its text can only be read as a whole."""
    delimiters = [(marks.literal(a), marks.literal(b)) for a, b in arguments.get("string_delims", [])]
    bare = bool(arguments.get("unquoted_keys", False))
    if arguments.get("whole") or any(len(text) != 1 for pair in delimiters for text in pair):
        return None
    if not delimiters and not bare:
        return None if arguments.get("allow_non_json") else JSON
    return Dialect(bare_keys=bare, delimiters=tuple(delimiters), spelled=marks.spelled)


def whole_calls(text: str, field: Field, captures: Mapping[str, str], properties: Properties) -> list[tuple[str, str]]:
    """Read names and arguments from a complete text by the field's transform. Raises ValueError."""
    try:
        value = contents.field_value(text, field, captures)
    except (KeyError, TypeError, TimeoutError, RecursionError) as error:
        raise ValueError(f"not a call: {error}") from error
    return [_call(item, properties) for item in (value if isinstance(value, list) else [value])]


def _call(value: Any, properties: Properties) -> tuple[str, str]:
    made = value.get("function", value) if isinstance(value, dict) else None
    name = made.get("name") if isinstance(made, dict) else None
    if not isinstance(made, dict) or not isinstance(name, str):
        raise ValueError("a call has a name")  # noqa: TRY004 - the text is wrong, not the program
    arguments = made.get("arguments", made.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")  # noqa: TRY004 - as above
    schemas = properties.get(name, {})
    typed = {key: _typed(item, contents.schema_types(schemas.get(key))) for key, item in arguments.items()}
    return name, json.dumps(typed, ensure_ascii=False)


def _typed(value: Any, types: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return contents.coerced(value, types)
    if isinstance(value, list) and types and "array" not in types:
        return [contents.coerced(item, types) if isinstance(item, str) else item for item in value]
    return value
