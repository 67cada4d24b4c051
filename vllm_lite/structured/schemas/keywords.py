"""well_formed(): checks and normalizes the values of a schema's keywords. Clients send null for "none", or types of
another language. Code after this module can rely on the types of values."""

from collections.abc import Callable
from typing import Any

from vllm_lite.structured.findings import Findings
from vllm_lite.structured.schemas.schema import NAMED, ONE, SEVERAL, Schema, escaped

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_OTHER_NAMES = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("list", "tuple"), "array"),
    **dict.fromkeys(("dict", "map", "hashmap"), "object"),
    "bool": "boolean",
    "none": "null",
}
"""Names of types in other languages, and in data sets of tool calls, and their names in JSON Schema."""
COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_MAY_BE_NULL = frozenset({"const", "default", "examples", "example"})
_SHOWN_CHARS = 60

Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_type(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(kind, str) and kind in TYPES for kind in value)
    return isinstance(value, str) and value in TYPES


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds)


_WANTED: dict[str, tuple[Check, str]] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of these"),
    "enum": (_is_full_list, "a list of at least one value"),
    "required": (_are_texts, "a list of names"),
    "pattern": (_is(str), "a text"),
    "$ref": (_is(str), "a text"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("allOf", "prefixItems"), (_is(list), "a list of schemas")),
    **dict.fromkeys(("anyOf", "oneOf"), (_is_full_list, "a list of at least one schema")),
    **dict.fromkeys(COUNTS, (_is_count, "a whole number from 0 on")),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "a number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number, or true beside a bound")),
    **dict.fromkeys(NAMED, (_is(dict), "an object of schemas")),
    **dict.fromkeys(ONE, (_is(dict, bool), "a schema: an object, true or false")),
    "items": (_is(dict, bool, list), "a schema, or a list of schemas"),
}


def well_formed(pointer: str, given: Schema, findings: Findings) -> Schema:
    """Copy one part of a schema with valid values.

    null counts as absent; numbers and types in other spellings are normalized. Raises RequestError for any other
    invalid value, unless the findings are lenient: then the keyword is dropped.
    """
    part = {key: value for key, value in given.items() if value is not None or key in _MAY_BE_NULL}
    _draft4_bounds(part)
    for key, (is_right, wanted) in _WANTED.items():
        if key not in part:
            continue
        part[key] = _read(key, part[key], is_lenient=findings.is_lenient)
        if not is_right(part[key]):
            findings.cannot(pointer, key, f"{key} is {_shown(part[key])}; it must be {wanted}")
            del part[key]
        else:
            part[key] = _schemas(f"{pointer}/{escaped(key)}", key, part[key], findings)
    return part


def _draft4_bounds(part: Schema) -> None:
    """Rewrite the bounds of draft 4 and OpenAPI 3.0, which mark a bound as exclusive by a flag."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = part.get(exclusive)
        if isinstance(flag, bool):
            del part[exclusive]
            if flag and bound in part:
                part[exclusive] = part.pop(bound)


def _read(key: str, value: Any, *, is_lenient: bool) -> Any:
    if key in COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if key == "type" and is_lenient:
        return type_name(value)
    if key in NAMED and value == []:  # PHP's empty object
        return {}
    return value


def type_name(kind: Any) -> Any:
    """Return JSON Schema's name of a type, or of each of several."""
    if isinstance(kind, list):
        return [type_name(each) if isinstance(each, str) else each for each in kind]
    return _OTHER_NAMES.get(kind.lower(), kind.lower()) if isinstance(kind, str) else kind


def _schemas(pointer: str, key: str, value: Any, findings: Findings) -> Any:
    """Replace invalid schemas in a list or an object of schemas by true, which matches everything."""
    if key in SEVERAL and isinstance(value, list):
        return [_schema(f"{pointer}/{place}", each, findings) for place, each in enumerate(value)]
    if key in NAMED:
        return {name: _schema(f"{pointer}/{escaped(name)}", each, findings) for name, each in value.items()}
    return value


def _schema(pointer: str, value: Any, findings: Findings) -> Schema | bool:
    if isinstance(value, dict | bool):
        return value
    findings.cannot(pointer, "", f"a schema is an object, true or false, got {_shown(value)}")
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
