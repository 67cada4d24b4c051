"""The dialect of JSON Schema that outputs can be held to, and a schema made ready for llguidance.

What cannot be held is refused by name and place, as an output that ignores it would be called valid and is not. Known
keywords that say nothing about the form (`title`, `default`, ...) pass, and so do unknown ones.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import unquote

from vllm_lite.errors import RequestError
from vllm_lite.protocol.structured import MAX_GRAMMAR_CHARS
from vllm_lite.structured.limits import (
    MAX_MULTIPLE,
    MAX_OPTIONAL,
    MAX_REPEATS,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_PARTS,
)
from vllm_lite.structured.patterns import too_many_repeats

Schema = dict[str, Any]

OPTIONS = "x-guidance"
"""Where llguidance reads its options; users do not set them."""
UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
)
IDLE: Mapping[str, Any] = {
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "propertyNames"), True),
    "uniqueItems": False,
}
"""Values with which these keywords demand nothing, so that they are dropped."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""The values of `format` that are held. Others are taken as a remark, as JSON Schema says."""

_DATE = (
    r"(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
EXACT = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats that are held by a pattern of ours: without it there are a 29th of February in every year, a year 0 and a
second 60, which readers refuse."""

_ONE = ("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames")
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def refusal(pointer: str, problem: str) -> RequestError:
    """Make the error for the place `pointer` of a schema; the root is ""."""
    return RequestError(f"the JSON schema at #{pointer}: {problem}")


def options(*, compact: bool = False, whitespace_pattern: str | None = None, lenient: bool = False) -> Schema:
    """Make what llguidance is to know beside a schema. JSON has one space behind `:` and `,` by default, as in what
    most models were trained on, and is bounded by that; with a pattern it has what the pattern matches."""
    found: Schema = {"whitespace_flexible": False}
    if whitespace_pattern is not None:
        found = {"whitespace_pattern": whitespace_pattern}
    elif not compact:
        found |= {"key_separator": ": ", "item_separator": ", "}
    return found | {"lenient": True} if lenient else found


def read(given: str | Mapping[str, Any] | bool) -> Schema:
    """Read a schema. Raises RequestError with line and column for a text that is no JSON."""
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
        except ValueError as error:  # an integer of too many digits
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
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise RequestError(f"the JSON schema has the key {twice!r} twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"the JSON schema has {name}, which is not JSON")


def prepared(schema: Schema, with_options: Schema, *, max_optional: int = MAX_OPTIONAL) -> Schema:
    """Copy a schema, check its keywords, and put the options in.

    A lenient one ignores what cannot be held. Raises RequestError, which names the place.
    """
    check_depth(schema)
    is_lenient = bool(with_options.get("lenient"))
    num_parts = 0

    def visit(pointer: str, part: Schema) -> Schema:
        nonlocal num_parts
        num_parts += 1
        if num_parts > MAX_SCHEMA_PARTS:
            raise refusal(pointer, f"the schema has more than {MAX_SCHEMA_PARTS} parts")
        if not is_lenient:
            _check_keywords(pointer, part)
        _check_bounds(pointer, part, max_optional)
        held = isinstance(part.get("format"), str) and part["format"] in FORMATS
        dropped = {OPTIONS} if held else {OPTIONS, "format"}
        kept = {key: value for key, value in part.items() if key not in dropped and not _is_idle(key, value)}
        if (pattern := EXACT.get(str(kept.get("format")))) is not None:
            del kept["format"]
            others = kept.get("allOf", [])
            kept["allOf"] = [*others, {"pattern": pattern}] if isinstance(others, list) else others
        return kept

    return {OPTIONS: with_options, **mapped(schema, visit)}


def mapped(schema: Schema, visit: Callable[[str, Schema], Schema], pointer: str = "") -> Schema:
    """Copy a schema with `visit` of each of its subschemas in its place; visit() makes the copies, outer ones first."""
    found = visit(pointer, schema)
    for key, value in found.items():
        at = f"{pointer}/{escaped(key)}"
        if key in _ONE and isinstance(value, dict):
            found[key] = mapped(value, visit, at)
        elif key in _LIST and isinstance(value, list):
            parts = enumerate(value)
            found[key] = [mapped(part, visit, f"{at}/{i}") if isinstance(part, dict) else part for i, part in parts]
        elif key in _NAMED and isinstance(value, dict):
            named = ((name, part, f"{at}/{escaped(name)}") for name, part in value.items())
            found[key] = {name: mapped(part, visit, to) if isinstance(part, dict) else part for name, part, to in named}
    return found


def schema_text(schema: Schema) -> str:
    """Write a schema as JSON. Raises RequestError for values that are not JSON."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the JSON schema has half a surrogate pair: {error.object[error.start]!r}") from error
    except (TypeError, ValueError) as error:
        raise RequestError(f"the JSON schema cannot be written as JSON: {error}") from error
    return text


def subschemas(schema: Schema) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """The objects directly in `schema` that are schemas themselves, each with the keys that lead to it."""
    for key, value in list(schema.items()):
        if key in _ONE and isinstance(value, dict):
            yield (key,), value
        elif key in _LIST and isinstance(value, list):
            yield from (((key, str(place)), part) for place, part in enumerate(value) if isinstance(part, dict))
        elif key in _NAMED and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items() if isinstance(part, dict))


def escaped(step: str) -> str:
    """Write a key as JSON pointers do."""
    return step.replace("~", "~0").replace("/", "~1")


def unescaped(step: str) -> str:
    """Read a key of a JSON pointer in a `$ref`, which is a part of a URI."""
    return unquote(step).replace("~1", "/").replace("~0", "~")


def _is_idle(key: str, value: Any) -> bool:
    return key in IDLE and (value is IDLE[key] or (IDLE[key] is True and value == {}))


def _check_keywords(pointer: str, part: Schema) -> None:
    for key in UNSUPPORTED:
        if key in part and not _is_idle(key, part[key]):
            raise refusal(pointer, f"the keyword {key!r} is not supported")
    where = part.get("$ref")
    if isinstance(where, str) and not where.startswith("#"):
        raise refusal(pointer, f"$ref leads to {where[:100]!r}; it may lead to places of the same schema only, '#/...'")


def _check_bounds(pointer: str, part: Schema, max_optional: int) -> None:
    """Refuse what becomes too large an automaton."""
    named, required = part.get("properties"), part.get("required")
    if isinstance(named, dict) and len(named) > max_optional:
        required = required if isinstance(required, list) else []
        num_optional = len(named.keys() - {name for name in required if isinstance(name, str)})
        if num_optional > max_optional:
            raise refusal(
                pointer, f"{num_optional} properties may be missing; at most {max_optional} may in one object"
            )
    for pattern in (part.get("pattern"), *_keys(part.get("patternProperties"))):
        if isinstance(pattern, str) and too_many_repeats(pattern) is not None:
            raise refusal(pointer, f"the pattern repeats a part more than {MAX_REPEATS} times")
    step = part.get("multipleOf")
    if isinstance(step, (int, float)) and not isinstance(step, bool):
        number = Decimal(str(step)).normalize()
        units = int(number.scaleb(max(0, -int(number.as_tuple().exponent)))) if number.is_finite() else 0
        if abs(units) > MAX_MULTIPLE:
            raise refusal(pointer, f"multipleOf {step} is more than {MAX_MULTIPLE} units of its last decimal")


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def check_depth(schema: Schema) -> None:
    """Refuse what is nested too deeply, also in values, and what contains itself."""
    waiting: list[tuple[str, int, Any]] = [("", 1, schema)]
    seen = 0
    while waiting:
        pointer, depth, value = waiting.pop()
        seen += 1
        if seen > MAX_GRAMMAR_CHARS:  # parts that are used in many places, in a dict of Python
            raise refusal("", f"it has more than {MAX_GRAMMAR_CHARS} parts")
        if depth > MAX_SCHEMA_DEPTH:
            raise refusal(pointer, f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep; recursive $refs may be")
        if isinstance(value, dict):
            if wrong := next((key for key in value if not isinstance(key, str)), None):
                raise refusal(pointer, f"keys must be texts, got {wrong!r}")
            waiting += [(f"{pointer}/{escaped(key)}", depth + 1, item) for key, item in value.items() if _nests(item)]
        elif isinstance(value, (list, tuple)):
            waiting += [(f"{pointer}/{place}", depth + 1, item) for place, item in enumerate(value) if _nests(item)]


def _nests(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))
