"""hold_texts(): rewrites the patterns of strings and of property names for llguidance."""

import re
from functools import lru_cache

from llguidance import LLMatcher

from vllm_lite.structured.check import fault_of, passed
from vllm_lite.structured.findings import Findings
from vllm_lite.structured.limits import MAX_REPEATS
from vllm_lite.structured.regexes.patterns import MAX_TRANSLATED_CHARS, all_of, equivalents, too_many_repeats
from vllm_lite.structured.regexes.regex_tree import NotHeldError
from vllm_lite.structured.schemas.schema import Schema, escaped, schema_text

# ---- Values of `format` that are enforced. Others are annotations, as in JSON Schema


FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

_DATE = (
    r"(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
EXACT = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats that are enforced by a pattern here: llguidance would allow February 29 in every year, year 0 and second 60,
which parsers reject."""


_LOOKS = re.compile(r"\(\?<?[=!]")


def hold_texts(pointer: str, part: Schema, findings: Findings) -> None:
    """Rewrite the `pattern` of `part` for llguidance.

    A pattern that cannot be enforced is dropped if there is an enforced `format`. If pattern and format contradict each
    other, the format is dropped. Raises RequestError for other patterns, unless the findings are lenient.
    """
    pattern = part.get("pattern")
    if pattern is None:
        return
    others = _held(pointer, pattern, findings, has_format=part.get("format") in FORMATS)
    if others is None:
        del part["pattern"]
        return
    if others != (pattern,):
        del part["pattern"]
        if len(others) == 1:
            part["pattern"] = others[0]
        else:
            part["allOf"] = [*part.get("allOf", ()), *({"pattern": other} for other in others)]
    name = part.get("format")
    if name in FORMATS and _excludes(name, others):
        findings.note(pointer, "format")
        del part["format"]


def hold_pattern_properties(pointer: str, part: Schema, findings: Findings) -> None:
    """Rewrite the keys of `patternProperties` for llguidance, like hold_texts()."""
    named = part.get("patternProperties")
    if not named:
        return
    found = {}
    for pattern, inner in named.items():
        others = _held(f"{pointer}/patternProperties/{escaped(pattern)}", pattern, findings, is_name=True)
        if others is not None:
            found[others[0]] = inner
    part["patternProperties"] = found


def _held(
    pointer: str, pattern: str, findings: Findings, *, has_format: bool = False, is_name: bool = False
) -> tuple[str, ...] | None:
    """Return patterns that llguidance accepts and that are together equivalent, a single one for a name; None for a
    pattern that is dropped."""
    if too_many_repeats(pattern) is not None:
        findings.cannot(pointer, "pattern", f"the pattern repeats a part more than {MAX_REPEATS} times")
        return None
    if _takes({"type": "string", "pattern": pattern}):
        return (pattern,)
    others: tuple[str, ...] | None = None
    problem = "it is too long"
    if len(pattern) <= MAX_TRANSLATED_CHARS:
        try:
            others, problem = findings.translated(lambda: _translated(pattern, is_name))
        except NotHeldError as error:
            problem = str(error)
    if others is not None:
        return others
    if has_format:
        findings.note(pointer, "pattern")
    elif findings.is_lenient or problem:
        findings.cannot(pointer, "pattern", f"the pattern cannot be held: {problem}")
    else:
        return (pattern,)  # llguidance reports the error and its position
    return None


def _excludes(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether no text both has the format and matches the patterns."""
    text: Schema = {"pattern": EXACT[name]} if name in EXACT else {"format": name}
    return not _takes({"type": "string", "allOf": [text, *({"pattern": each} for each in patterns)]})


def _takes(schema: Schema) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(schema_text(schema))
    if passed.has(grammar):
        return True
    if fault_of(grammar) is not None:
        return False
    passed.add(grammar)
    return True


@lru_cache(256)
def _translated(pattern: str, is_name: bool) -> tuple[tuple[str, ...] | None, str]:
    """Return equivalent patterns, or None and the reason why there are none; "" if llguidance's error is better."""
    try:
        return (all_of([pattern]),) if is_name else tuple(equivalents(pattern)), ""
    except NotHeldError as error:
        return None, str(error) if error.is_understood or _LOOKS.search(pattern) else ""
