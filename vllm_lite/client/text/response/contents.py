"""Kinds of content: they read the complete text between two literals, and turn it into a call.

The kinds are those of transformers' response templates. json_calls.py and tagged_calls.py read the common kinds while
the text arrives.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

PATTERN_SECONDS = 0.1
"""Time limit of one search with a pattern that comes with a checkpoint."""
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
Arguments = Mapping[str, Any]


def parse(kind: str, text: str, arguments: Arguments) -> Any:
    """Parse a complete text to a value. Raises ValueError (which includes json's errors), KeyError or TimeoutError."""
    return KINDS[kind](text, arguments)


def stripped(text: str, arguments: Arguments) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _bool(text: str, arguments: Arguments) -> bool:
    return stripped(text, arguments).lower() in ("true", "1")


def _json(text: str, arguments: Arguments) -> Any:
    try:
        return json.loads(_plain_json(text, arguments))
    except (ValueError, RecursionError):
        if arguments.get("allow_non_json"):
            return stripped(text, arguments)
        raise ValueError("this is not JSON") from None


def _plain_json(text: str, arguments: Arguments) -> str:
    """Convert strings between other delimiters, and keys without quotes, to JSON."""
    strings: list[str] = []

    def keep(found: Any) -> str:
        strings.append(json.dumps(found[1], ensure_ascii=False))
        return f"\x01{len(strings) - 1}\x02"

    delimiters = arguments.get("string_delims", [])
    if delimiters and ("\x01" in text or "\x02" in text):
        raise ValueError("control characters outside of JSON's strings")
    for opening, closing in delimiters:
        text = re.sub(f"{re.escape(opening)}(.*?){re.escape(closing)}", keep, text, flags=re.DOTALL)
    if arguments.get("unquoted_keys"):
        text = re.sub(r"(?<=[{,])(\w+):", r'"\1":', text)
    return re.sub("\x01(\\d+)\x02", lambda found: strings[int(found[1])], text) if strings else text


def _inner(text: str, value_parser: Arguments | None) -> Any:
    if value_parser is None:
        return text
    return parse(value_parser.get("name", "text"), text, value_parser.get("args", {}))


def _xml_inline(text: str, arguments: Arguments) -> dict[str, Any]:
    values: dict[str, Any] = {}
    pattern = regex.compile(arguments["tag_pattern"], regex.DOTALL)
    for found in pattern.finditer(text, timeout=PATTERN_SECONDS):
        key, value = found["key"], _inner(found["value"] or "", arguments.get("value_parser"))
        if key in values and arguments.get("merge_duplicates"):
            earlier = values[key]
            values[key] = [*earlier, value] if isinstance(earlier, list) else [earlier, value]
        else:
            values[key] = value
    return values


def _kv_lines(text: str, arguments: Arguments) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, found, value = stripped(line, arguments).partition(arguments.get("kv_sep", ":"))
        if found:
            values[stripped(key, arguments)] = _inner(stripped(value, arguments), arguments.get("value_parser"))
    return values


KINDS: dict[str, Callable[[str, Arguments], Any]] = {
    "text": stripped,
    "int": lambda text, arguments: int(stripped(text, arguments)),
    "float": lambda text, arguments: float(stripped(text, arguments)),
    "bool": _bool,
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}


# ---- values of fields


def is_placeholder(text: str) -> bool:
    return _PLACEHOLDER.fullmatch(text) is not None


def has_placeholder(text: str) -> bool:
    return _PLACEHOLDER.search(text) is not None


def transformed(transform: Any, scope: Arguments) -> Any:
    """Fill the placeholders of a transform: {name} is an entry of the scope, {name.key} an entry of that. Raises
    KeyError for a missing one."""
    if isinstance(transform, dict):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for key in found[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise KeyError(found[0])
        value = value[key]
    return value


def field_value(text: str, field: Any, captures: Mapping[str, str]) -> Any:
    """Compute the value of a complete field (template.py). Raises what `parse` and `transformed` raise."""
    value = parse(field.kind, text, field.arguments)
    if field.transform is None:
        return value
    if not field.transform_each:
        return transformed(field.transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("transform_each takes a list of objects")
    return [transformed(field.transform, {**captures, **item}) for item in value]


# ---- values of arguments that are written as text


def schema_types(schema: Any) -> tuple[str, ...]:
    """List the types in a JSON schema, in their order; () if it has none."""
    if not isinstance(schema, Mapping):
        return ()
    named = schema.get("type")
    types = [named] if isinstance(named, str) else [item for item in named or () if isinstance(item, str)]
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types += schema_types(choice)
    if schema.get("nullable") and "null" not in types:
        types.append("null")
    return tuple(types)


def coerced(text: str, types: Sequence[str]) -> Any:
    """Convert `text` to the first of these types that fits; else return the text."""
    for name in types:
        if name in _READERS:
            try:
                return _READERS[name](text)
            except (ValueError, RecursionError, OverflowError):
                continue
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _number(text: str) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number) if number.is_integer() and "." not in text else number


def _one_of(**words: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(text)
        return words[word]

    return read


def _container(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = _finite_json(text)
        except ValueError:
            value = python_literal(text)
        if not isinstance(value, kind):
            raise ValueError(text)  # noqa: TRY004 - the text is wrong, not the program
        return value

    return read


def _finite_json(text: str) -> Any:
    """Read JSON with finite numbers only, because JSON cannot write others. Raises ValueError, also for 1e999 and
    NaN."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def python_literal(text: str) -> Any:
    """Read a value in Python's notation, which some chat templates print. Raises ValueError or RecursionError."""
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (TypeError, SyntaxError, MemoryError) as error:
        raise ValueError("this is not a literal") from error
    return value


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _one_of(**{"true": True, "1": True, "false": False, "0": False}),
    "null": _one_of(null=None, none=None),
    "object": _container(dict),
    "array": _container(list),
}


def loose_value(text: str, types: Sequence[str]) -> Any:
    """Read a value that is written as text: by its types, or, if the schema has none, as JSON if possible."""
    if types:
        return coerced(text, types)
    try:
        return _finite_json(text)
    except (ValueError, RecursionError):
        return text
