"""hold_names(): rewrites `propertyNames`, which llguidance does not support, as properties."""

from typing import Any

from vllm_lite.structured.calls.literals import REMARKS
from vllm_lite.structured.findings import Findings
from vllm_lite.structured.regexes.patterns import all_of
from vllm_lite.structured.regexes.regex_tree import NotHeldError
from vllm_lite.structured.schemas.schema import Schema
from vllm_lite.structured.schemas.texts import EXACT, FORMATS

_HEX = "[0-9a-fA-F]"
_PATTERNS = {**EXACT, "uuid": f"^{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}$"}
_IDLE = ({"type": "string"}, {"type": ["string"]})


def hold_names(pointer: str, part: Schema, findings: Findings) -> None:
    """Rewrite the `propertyNames` of `part` as `properties` if they are listed, as `patternProperties` if they have a
    pattern or format, and close the object. Otherwise they are kept."""
    names = part.get("propertyNames")
    if not isinstance(names, dict):
        return
    names = {key: value for key, value in names.items() if key not in REMARKS}
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if names in ({}, *_IDLE):
        del part["propertyNames"]
    elif listed is not None and names.keys() <= {"enum", "const", "type"} and "patternProperties" not in part:
        _list_names(part, [name for name in listed if isinstance(name, str)])
    elif not part.get("properties"):
        try:
            findings.translated(lambda: _match_names(part, names))
        except NotHeldError as error:
            findings.cannot(pointer, "propertyNames", f"propertyNames cannot be held: {error}")
            del part["propertyNames"]


def _list_names(part: Schema, listed: list[str]) -> None:
    others = part.get("additionalProperties", True)
    own = part.get("properties", {})
    allowed = set(listed)
    part["properties"] = {name: own.get(name, others) for name in [*own, *listed] if name in allowed}
    part["additionalProperties"] = False
    del part["propertyNames"]


def _match_names(part: Schema, names: Schema) -> None:
    """Rewrite names with patterns. Raises NotHeldError if a joined pattern becomes too large."""
    patterns = _patterns(names)
    if patterns is None:
        return
    named: dict[str, Any] = part.get("patternProperties", {})
    others = part.get("additionalProperties", True)
    found = {all_of([pattern, *patterns]): inner for pattern, inner in named.items()}
    if others is not False:
        found[all_of(patterns, list(named)) if named or len(patterns) > 1 else patterns[0]] = others
    part["patternProperties"] = found
    part["additionalProperties"] = False
    del part["propertyNames"]


def _patterns(names: Schema) -> list[str] | None:
    """The patterns that a name must match; None if there are other constraints."""
    found = []
    for key, value in names.items():
        if key == "pattern":
            found.append(value)
        elif key == "format" and value in _PATTERNS:
            found.append(_PATTERNS[value])
        elif key == "format" and (value not in FORMATS or "pattern" in names):
            continue  # the given pattern takes the place of the format's
        elif key in ("minLength", "maxLength"):
            continue
        elif key == "allOf" and all(isinstance(each, dict) and each.keys() == {"pattern"} for each in value):
            found += [each["pattern"] for each in value]
        elif key != "type" or value not in ("string", ["string"]):
            return None
    if "minLength" in names or "maxLength" in names:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        found.append(rf"^[\s\S]{{{least},{most}}}$")
    return found or None
