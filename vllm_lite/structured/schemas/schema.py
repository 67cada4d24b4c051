"""JSON schemas as data: reading, writing, traversal, and JSON pointers."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

from vllm_lite.errors import RequestError
from vllm_lite.protocol.structured import MAX_GRAMMAR_CHARS
from vllm_lite.structured.findings import refusal
from vllm_lite.structured.limits import MAX_SCHEMA_DEPTH

Schema = dict[str, Any]

OPTIONS = "x-guidance"
"""Keyword with llguidance's options; users do not set it."""
ONE = (
    *("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords whose value is a schema."""
SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
"""Keywords whose value is a list of schemas."""
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""


def options(*, compact: bool = False, whitespace_pattern: str | None = None, lenient: bool = False) -> Schema:
    """Make llguidance's options. JSON has one space after `:` and `,` by default, as most models were trained, which
    also bounds whitespace; with a pattern, whitespace is what the pattern matches."""
    found: Schema = {"whitespace_flexible": False}
    if whitespace_pattern is not None:
        found = {"whitespace_pattern": whitespace_pattern}
    elif not compact:
        found |= {"key_separator": ": ", "item_separator": ", "}
    return found | {"lenient": True} if lenient else found


def read(given: str | Mapping[str, Any] | bool) -> Schema:
    """Read a schema. Raises RequestError with line and column for invalid JSON."""
    if isinstance(given, str):
        if len(given) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"the JSON schema has {len(given)} characters; at most {MAX_GRAMMAR_CHARS} are read")
        try:
            given = json.loads(given, object_pairs_hook=_object, parse_constant=_no_constant)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise RequestError(f"the JSON schema is not JSON at {place}: {error.msg}") from error
        except RecursionError as error:
            raise RequestError("the JSON schema is nested too deeply") from error
        except ValueError as error:  # an integer with too many digits
            raise RequestError(f"the JSON schema cannot be read: {error}") from error
    if given is True:
        return {}
    if given is False:
        raise RequestError("the JSON schema is false, which nothing matches")
    if not isinstance(given, dict):
        raise RequestError(f"a JSON schema is an object, true or false, got {type(given).__name__}")
    return given


def _object(pairs: list[tuple[str, Any]]) -> Schema:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise RequestError(f"the JSON schema has the key {twice!r} twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"the JSON schema has {name}, which is not JSON")


def mapped(schema: Schema, visit: Callable[[str, Schema], Schema], pointer: str = "") -> Schema:
    """Copy a schema with each subschema replaced by visit(pointer, subschema), which makes the copies; outer ones
    first."""
    found = visit(pointer, schema)
    for key, value in found.items():
        at = f"{pointer}/{escaped(key)}"
        if key in ONE and isinstance(value, dict):
            found[key] = mapped(value, visit, at)
        elif key in SEVERAL and isinstance(value, list):
            parts = enumerate(value)
            found[key] = [mapped(part, visit, f"{at}/{i}") if isinstance(part, dict) else part for i, part in parts]
        elif key in NAMED and isinstance(value, dict):
            named = ((name, part, f"{at}/{escaped(name)}") for name, part in value.items())
            found[key] = {name: mapped(part, visit, to) if isinstance(part, dict) else part for name, part, to in named}
    return found


def schema_text(schema: Schema) -> str:
    """Format a schema as JSON. Raises RequestError for values that are not JSON."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the JSON schema has half a surrogate pair: {error.object[error.start]!r}") from error
    except (TypeError, ValueError) as error:
        raise RequestError(f"the JSON schema cannot be written as JSON: {error}") from error
    return text


def subschemas(schema: Schema) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Yield the direct subschemas of `schema`, each with the keys that lead to it."""
    for key, value in list(schema.items()):
        if key in ONE and isinstance(value, dict):
            yield (key,), value
        elif key in SEVERAL and isinstance(value, list):
            yield from (((key, str(place)), part) for place, part in enumerate(value) if isinstance(part, dict))
        elif key in NAMED and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items() if isinstance(part, dict))


def escaped(step: str) -> str:
    """Escape a key for a JSON pointer."""
    return step.replace("~", "~0").replace("/", "~1")


def unescaped(step: str) -> str:
    """Decode a key of a JSON pointer in a `$ref`, which is URI-encoded."""
    return unquote(step).replace("~1", "/").replace("~0", "~")


def check_depth(schema: Schema) -> None:
    """Raise RequestError for a schema that is nested too deeply, including its values, or that contains itself."""
    waiting: list[tuple[str, int, Any]] = [("", 1, schema)]
    seen = 0
    while waiting:
        pointer, depth, value = waiting.pop()
        seen += 1
        if seen > MAX_GRAMMAR_CHARS:  # Python dicts may share parts in many places
            raise refusal("", f"it has more than {MAX_GRAMMAR_CHARS} parts")
        if depth > MAX_SCHEMA_DEPTH:
            raise refusal(pointer, f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep; recursive $refs may be")
        if isinstance(value, dict):
            if wrong := next((key for key in value if not isinstance(key, str)), None):
                raise refusal(pointer, f"keys must be texts, got {wrong!r}")
            waiting += [(f"{pointer}/{escaped(key)}", depth + 1, item) for key, item in value.items() if _nests(item)]
        elif isinstance(value, (list, tuple)):
            waiting += [(f"{pointer}/{place}", depth + 1, item) for place, item in enumerate(value) if _nests(item)]


def target_of(root: Any, where: str) -> Any:
    """Return the target of `$ref: where` within `root`; None if there is none, or it is external."""
    if where != "#" and not where.startswith("#/"):
        return None
    for step in where[1:].split("/")[1:]:
        key = unescaped(step)
        if isinstance(root, dict):
            root = root.get(key)
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def _nests(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))
