"""A format as data: the fields of an output, and the literals and patterns that delimit them.

The data is transformers' `response_template` (a checkpoint may bring its own in tokenizer_config.json), with three more
keys in the formats of this package: `at_start` for a field that can only be the beginning of the content, "tags" and
"envelope" in content_args for calls that are read while they arrive.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from vllm_lite.client.text.response import contents
from vllm_lite.client.text.response.contents import PATTERN_SECONDS
from vllm_lite.client.text.response.marks import Marks
from vllm_lite.errors import ModelError

ROLES = {
    "content": "content",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "tool_calls": "calls",
}
"""Name of a field -> part of the message for its text; the text of other fields is content."""
KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional"),
    *("transform", "transform_each", "at_start"),
}
KINDS = {*contents.KINDS, "pythonic", "elements"}
MAX_FIELDS = 32
MAX_LITERAL_CHARS = 256
MAX_PATTERN_CHARS = 4096
MAX_HELD_CHARS = 1024
"""Maximum characters that are held back because they may be the beginning of a match; a longer beginning is sent as
text."""


@dataclass(frozen=True, slots=True)
class Delimiter:
    """A mark that opens or closes a field: one of several literals, or a pattern."""

    pattern: Any
    literals: tuple[str, ...] | None = None
    can_extend: bool = False
    """A literal begins with another one, so a match at the end of the text may still become a longer one."""
    is_text: bool = False
    """A literal that spells no token, so the text of an argument may contain it."""
    seconds: float | None = None
    """Time limit of one search, or None. Only patterns of checkpoints have one, because enforcing a limit takes
    time."""

    def search(self, text: str, place: int, *, is_last: bool) -> Any:
        """Find the first match from `place` on, or its beginning at the end of the text. Raises TimeoutError."""
        return self.pattern.search(text, place, partial=not is_last, timeout=self.seconds)

    def match(self, text: str, place: int, *, is_last: bool) -> Any:
        return self.pattern.match(text, place, partial=not is_last, timeout=self.seconds)

    def is_pending(self, found: Any, length: int) -> bool:
        """Whether more text may change a match in a text of `length`."""
        if found.partial:
            return True
        if found.end() < length:
            return False
        return found.start() == found.end() or self.literals is None or self.can_extend


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One field of a format."""

    name: str
    role: str
    open: Delimiter | None = None
    close: Delimiter | None = None
    kind: str = "text"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    join: str | None = None
    transform: Any = None
    transform_each: bool = False
    at_start: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """A format for one tokenizer. It is immutable, so all parsers share it."""

    name: str
    fields: tuple[Field, ...]
    marks: Marks
    anchor: Delimiter | None = None
    starts_in: Field | None = None
    """The field in which an output begins without an opening literal."""
    thinking: tuple[str, str] | None = None
    """The literals that open and close the reasoning."""
    shape: Mapping[str, Any] | None = None
    """The form of calls, for a grammar: the fields of CallShape in structured/calls/tools.py."""

    @property
    def content(self) -> Field:
        """The field for text outside of all other fields."""
        return next((item for item in self.fields if item.open is None), _NOTHING)

    @property
    def has_calls(self) -> bool:
        return any(item.role == "calls" for item in self.fields)

    @property
    def has_reasoning(self) -> bool:
        return any(item.role == "reasoning" for item in self.fields)


_NOTHING = Field("", "content")


def delimiter(spec: Mapping[str, Any], key: str, marks: Marks, name: str, *, is_own: bool = False) -> Delimiter | None:
    """Read `key` (a literal or several) or `key`_pattern of a spec. `is_own`: the spec is a checkpoint's. Raises
    ModelError."""
    literals, pattern = spec.get(key), spec.get(f"{key}_pattern")
    if literals is not None and pattern is not None:
        raise ModelError(f"{name}: has both {key!r} and '{key}_pattern'; give one of them")
    if pattern is not None:
        return _pattern(pattern, marks, f"{name}: {key}_pattern", PATTERN_SECONDS if is_own else None)
    if literals is None:
        return None
    texts = [literals] if isinstance(literals, str) else literals
    if not isinstance(texts, list) or not texts or not all(_is_literal(text) for text in texts):
        raise ModelError(f"{name}: {key!r} must be a text of 1 to {MAX_LITERAL_CHARS} characters, or a list of such")
    encoded = tuple(sorted({marks.literal(text) for text in texts}, key=len, reverse=True))
    return Delimiter(
        pattern=regex.compile("|".join(map(regex.escape, encoded))),
        literals=encoded,
        can_extend=any(a != b and a.startswith(b) for a in encoded for b in encoded),
        is_text=all(marks.is_text(text) for text in encoded),
    )


def _is_literal(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= MAX_LITERAL_CHARS


def _pattern(source: Any, marks: Marks, name: str, seconds: float | None = None) -> Delimiter:
    if not isinstance(source, str) or not 0 < len(source) <= MAX_PATTERN_CHARS:
        raise ModelError(f"{name} must be a regular expression of at most {MAX_PATTERN_CHARS} characters")
    try:
        return Delimiter(regex.compile(marks.pattern(source), regex.DOTALL), seconds=seconds)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ModelError(f"{name} is not a regular expression: {error}") from error


def field_of(name: str, spec: Any, marks: Marks, role: str | None = None) -> Field:
    """Read one field. Without a `role`, it is a checkpoint's field, whose role follows from its name. Raises ModelError
    with the name."""
    place = f"response_template field {name!r}"
    if not isinstance(spec, Mapping):
        raise ModelError(f"{place} must be an object, got {type(spec).__name__}")
    if unknown := sorted(spec.keys() - FIELD_KEYS):
        raise ModelError(f"{place} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(FIELD_KEYS))}")
    kind, arguments = spec.get("content", "text"), spec.get("content_args", {})
    if kind not in KINDS:
        raise ModelError(f"{place}: content is {kind!r}; it must be one of {', '.join(sorted(KINDS))}")
    if not isinstance(arguments, Mapping):
        raise ModelError(f"{place}: content_args must be an object, got {type(arguments).__name__}")
    if kind == "xml-inline" and "tags" not in arguments:
        _check_tags(arguments, place)
    transform = spec.get("transform")
    if any(contents.has_placeholder(text) and not contents.is_placeholder(text) for text in texts_in(transform)):
        raise ModelError(f"{place}: a text of its transform mixes a placeholder with other text")
    return Field(
        name=name,
        role=role or ROLES.get(name, "content"),
        open=delimiter(spec, "open", marks, place, is_own=role is None),
        close=delimiter(spec, "close", marks, place, is_own=role is None),
        kind=kind,
        arguments=arguments,
        join=spec.get("join") if isinstance(spec.get("join"), str) else None,
        transform=transform,
        transform_each=bool(spec.get("transform_each", False)),
        at_start=bool(spec.get("at_start", False)),
    )


def _check_tags(arguments: Mapping[str, Any], place: str) -> None:
    found = _pattern(arguments.get("tag_pattern"), Marks(()), f"{place}: tag_pattern")
    if not {"key", "value"} <= found.pattern.groupindex.keys():
        raise ModelError(f"{place}: tag_pattern must have the named groups 'key' and 'value'")


def texts_in(transform: Any) -> list[str]:
    """All strings in a nested value."""
    if isinstance(transform, Mapping):
        return [text for value in transform.values() for text in texts_in(value)]
    if isinstance(transform, list):
        return [text for value in transform for text in texts_in(value)]
    return [transform] if isinstance(transform, str) else []


def read_template(spec: Any, added_tokens: Mapping[str, int], special_ids: Any = ()) -> Format:
    """Read a checkpoint's own `response_template`. Raises ModelError that says which part of it is wrong."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("fields"), Mapping) or not spec["fields"]:
        raise ModelError("response_template must be an object with a non-empty object `fields`")
    if spec.get("version", 1) != 1:
        raise ModelError(f"response_template has version {spec['version']!r}; version 1 is known")
    if unknown := sorted(spec.keys() - KEYS):
        raise ModelError(f"response_template has the unknown key {unknown[0]!r}; known are {', '.join(sorted(KEYS))}")
    if len(spec["fields"]) > MAX_FIELDS:
        raise ModelError(f"response_template has {len(spec['fields'])} fields; at most {MAX_FIELDS} are read")
    marks = Marks(texts_in(dict(spec)), added_tokens, special_ids)
    fields = tuple(field_of(str(key), value, marks) for key, value in spec["fields"].items())
    implicit = [item.name for item in fields if item.open is None]
    if len(implicit) > 1:
        raise ModelError(f"response_template: only one field may have no 'open', got {', '.join(implicit)}")
    return Format(
        name="own",
        fields=fields,
        marks=marks,
        anchor=delimiter(spec, "start_anchor", marks, "response_template", is_own=True),
        thinking=thinking_literals(spec["fields"]),
    )


def thinking_literals(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the literals of the reasoning; None if there is no reasoning, or patterns delimit it."""
    for name, spec in fields.items():
        if ROLES.get(name) == "reasoning":
            pair = [spec.get(key) for key in ("open", "close")]
            first = [value[0] if isinstance(value, list) else value for value in pair]
            if isinstance(first[1], str):
                return str(first[0] or ""), first[1]
    return None
