"""prepared(): checks a JSON schema, and rewrites it for llguidance.

Keywords without a grammar in llguidance are rewritten if an equivalent form exists. A keyword that cannot be enforced
is refused by name and place, as outputs that ignore it would be called valid; in a lenient schema, of a tool that is
not strict, it is dropped. Keywords without constraints (`title`, `default`, ...) and unknown keywords are accepted.
"""

from collections.abc import Container, Mapping
from decimal import Decimal
from typing import Any

from vllm_lite.structured.findings import Findings, refusal
from vllm_lite.structured.limits import MAX_MULTIPLE, MAX_OPTIONAL, MAX_SCHEMA_PARTS
from vllm_lite.structured.schemas.bounds import hold_bounds
from vllm_lite.structured.schemas.keywords import well_formed
from vllm_lite.structured.schemas.names import hold_names
from vllm_lite.structured.schemas.schema import OPTIONS, Schema, check_depth, mapped, subschemas, target_of
from vllm_lite.structured.schemas.texts import EXACT, FORMATS, hold_pattern_properties, hold_texts

UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
)
_IDLE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "propertyNames"), (True, {})),
    **dict.fromkeys(("uniqueItems", "not"), (False,)),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
"""Values with which these keywords have no effect, so that they are dropped."""
MAX_REFERENCES = 64
"""Maximum length of a chain of `$ref`s without other keywords."""
_ANCHORS = ("$dynamicAnchor", "$recursiveAnchor")
"""Keywords without constraints that llguidance rejects."""
_DIALECTS = ("json-schema.org/draft-0", "json-schema.org/draft/20")
_OF_ARRAYS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems")
_BESIDE = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
"""Keywords whose schemas apply to the same value."""


def prepared(
    given: Schema,
    with_options: Schema,
    findings: Findings,
    *,
    max_optional: int = MAX_OPTIONAL,
    is_closed: bool = False,
) -> Schema:
    """Copy a schema, check its keywords, and add the options. If it `is_closed`, its objects have no other properties
    than the named ones.

    Keywords that cannot be enforced are dropped if the findings are lenient. Otherwise raises RequestError, which names
    the place.
    """
    check_depth(given)
    schema = mapped(given, lambda pointer, part: well_formed(pointer, part, findings))
    if is_closed:
        schema = closed(schema)
    schema = mapped(schema, _Preparation(schema, findings, max_optional).part)
    # llguidance removes its options by moving the last key into their place, so they come last to keep the order of
    # keys
    return {**schema, OPTIONS: with_options}


class _Preparation:
    """Prepares the parts of `root`, one after the other."""

    def __init__(self, root: Schema, findings: Findings, max_optional: int) -> None:
        self._root = root
        self._findings = findings
        self._max_optional = max_optional
        self._num_parts = 0

    def part(self, pointer: str, given: Schema) -> Schema:
        """Prepare a copy of one part, without its subschemas."""
        self._num_parts += 1
        if self._num_parts > MAX_SCHEMA_PARTS:
            raise refusal(pointer, f"the schema has more than {MAX_SCHEMA_PARTS} parts")
        part = {key: value for key, value in given.items() if key not in (OPTIONS, *_ANCHORS)}
        _drop_idle(part)
        _hold_unevaluated(part)
        hold_names(pointer, part, self._findings)
        self._follow_choices(part)
        self._check_keywords(pointer, part)
        hold_bounds(pointer, part, self._findings)
        self._check_sizes(pointer, part)
        hold_texts(pointer, part, self._findings)
        hold_pattern_properties(pointer, part, self._findings)
        _write_format(part)
        return _in_order(part)

    def _follow_choices(self, part: Schema) -> None:
        """Inline the targets of `$ref`s in `oneOf`: only then llguidance sees that the choices are disjoint."""
        choices = part.get("oneOf")
        if not isinstance(choices, list) or "discriminator" in part:
            return
        found = []
        for choice in choices:
            is_reference = isinstance(choice, dict) and choice.keys() == {"$ref"}
            target = target_of(self._root, choice["$ref"]) if is_reference else None
            has_choices = isinstance(target, dict) and ("oneOf" in target or "$ref" in target)
            found.append(target if isinstance(target, dict) and not has_choices else choice)
        part["oneOf"] = found

    def _check_keywords(self, pointer: str, part: Schema) -> None:
        for key in UNSUPPORTED:
            if key in part:
                self._findings.cannot(pointer, key, f"the keyword {key!r} is not supported")
                del part[key]
        where = part.get("$ref")
        if where is not None and not where.startswith("#"):
            text = f"$ref leads to {where[:100]!r}; it may lead to places of the same schema only, '#/...'"
            self._findings.cannot(pointer, "$ref", text)
            del part["$ref"]
        elif where is not None and _is_circular(self._root, where, [], set()):
            self._findings.cannot(pointer, "$ref", f"$ref leads to {where[:100]!r}, and from there to itself")
            del part["$ref"]

    def _check_sizes(self, pointer: str, part: Schema) -> None:
        """Report parts whose automaton would be too large."""
        named = part.get("properties", {})
        num_optional = len(named.keys() - set(part.get("required", ()))) if len(named) > self._max_optional else 0
        if num_optional > self._max_optional:
            text = f"{num_optional} properties may be missing; at most {self._max_optional} may in one object"
            self._findings.cannot(pointer, "properties", text)
            for key in ("properties", "required", "additionalProperties"):
                part.pop(key, None)
        step = part.get("multipleOf")
        if step is not None:
            number = Decimal(str(step)).normalize()
            units = int(number.scaleb(max(0, -int(number.as_tuple().exponent)))) if number.is_finite() else 0
            if units > MAX_MULTIPLE or not number.is_finite():
                text = f"multipleOf {step} is more than {MAX_MULTIPLE} units of its last decimal"
                self._findings.cannot(pointer, "multipleOf", text)
                del part["multipleOf"]


def _is_circular(root: Schema, where: str, path: list[str], followed: set[str]) -> bool:
    """Whether a `$ref` leads back to itself without describing any part of a value between, so that following it never
    ends."""
    if where in path or len(path) > MAX_REFERENCES:
        return True
    target = target_of(root, where)
    if where in followed or not isinstance(target, dict):
        return False
    path.append(where)
    parts = [target, *(each for each in target.get("allOf", ()) if isinstance(each, dict))]
    places = [inner for part in parts if isinstance(inner := part.get("$ref"), str)]
    found = any(_is_circular(root, inner, path, followed) for inner in places)
    path.pop()
    followed.add(where)
    return found


def _drop_idle(part: Schema) -> None:
    """Drop keywords that have no effect with their value."""
    dialect = part.get("$schema")
    if dialect is not None and not (isinstance(dialect, str) and any(each in dialect for each in _DIALECTS)):
        del part["$schema"]
    for key, values in _IDLE.items():
        if key in part and any(part[key] is value or (value == {} and part[key] == {}) for value in values):
            del part[key]
    if not ("if" in part and ("then" in part or "else" in part)):
        _drop(part, "if", "then", "else")
    if "contains" not in part:
        _drop(part, "minContains", "maxContains")
    elif part.get("minContains") == 0 and "maxContains" not in part:
        _drop(part, "contains", "minContains")
    if part.get("maxItems", 2) < 2:
        _drop(part, "uniqueItems")
    needed = part.get("dependentRequired")
    if isinstance(needed, dict):
        required = set(part.get("required", ()))  # a set, as a client's schema may list 100,000
        if all(_are_in(names, required) for names in needed.values()):
            _drop(part, "dependentRequired")
    if "additionalItems" in part and not isinstance(part.get("items"), list):
        _drop(part, "additionalItems")


def _drop(part: Schema, *keys: str) -> None:
    for key in keys:
        part.pop(key, None)


def _are_in(names: Any, required: Container[str]) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) and name in required for name in names)


def _hold_unevaluated(part: Schema) -> None:
    """Rewrite `unevaluated...` as `additional...`, which is equivalent if nothing else describes the value."""
    if any(key in part for key in _BESIDE):
        return
    if "unevaluatedProperties" in part:
        part.setdefault("additionalProperties", part.pop("unevaluatedProperties"))
    if "unevaluatedItems" in part and "contains" not in part:
        value = part.pop("unevaluatedItems")
        part.setdefault("additionalItems" if isinstance(part.get("items"), list) else "items", value)


def _write_format(part: Schema) -> None:
    """Drop unsupported formats, and replace those that have a pattern here."""
    name = part.get("format")
    if not (isinstance(name, str) and name in FORMATS):
        part.pop("format", None)
    elif name in EXACT:
        del part["format"]
        if "pattern" in part:
            part["allOf"] = [*part.get("allOf", ()), {"pattern": EXACT[name]}]
        else:
            part["pattern"] = EXACT[name]


def _in_order(part: Schema) -> Schema:
    """Put the keywords of arrays first: llguidance reads those after an `allOf` separately, so that `additionalItems`
    would not know the list of `items`."""
    return {**{key: part[key] for key in _OF_ARRAYS if key in part}, **part}


# ---- closed(): closes the objects of a schema that names properties and does not mention others. JSON Schema allows
# other properties. A function accepts only its named arguments, and a small model that may add properties often does
# not stop: LangChain's and LiteLLM's calls of the demo model were all truncated.


_DESCRIPTIONS = ("properties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
"""Two of these keywords describe one object together, so closing one of them would forbid the properties of the
other."""


def closed(schema: Schema) -> Schema:
    """Return a copy whose objects have no other properties than the named ones.

    The schema is unchanged if several parts describe one object together, since closing each would make them contradict
    each other. Raises RequestError for a schema that is nested too deeply.
    """
    check_depth(schema)
    if not _is_one_by_one(schema):
        return schema

    def visit(_: str, part: Schema) -> Schema:
        return {**part, "additionalProperties": False} if _names_all(part) else dict(part)

    return mapped(schema, visit)


def _names_all(part: Schema) -> bool:
    """Whether an object with only its named properties can be valid, and other properties are not mentioned."""
    named, required = part.get("properties"), part.get("required", ())
    if not isinstance(named, dict) or "additionalProperties" in part or not isinstance(required, list | tuple):
        return False
    least = part.get("minProperties", 0)
    return all(name in named for name in required) and isinstance(least, int) and least <= len(named)


def _is_one_by_one(schema: Schema) -> bool:
    """Whether each object is described in one place."""
    left = [schema]
    while left:
        part = left.pop()
        parts = part.get("allOf", ())
        if sum(key in part for key in _DESCRIPTIONS) > 1 or not isinstance(parts, list | tuple) or len(parts) > 1:
            return False
        left += [inner for _, inner in subschemas(part)]
    return True
