"""Structural tags: text with constrained parts, in the two formats that requests use.

    {"type": "structural_tag", "format": {"type": "triggered_tags", ...}}
    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}

The second, older one is equivalent to triggered tags. docs/structured-outputs.md lists the types of formats.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vllm_lite.choices import with_choices
from vllm_lite.errors import RequestError
from vllm_lite.structured.check import check_lark, check_regex, check_schema, check_text
from vllm_lite.structured.lark import LarkWriter, quoted, regex
from vllm_lite.structured.schemas.schema import Schema

Prepare = Callable[[Any], Schema]
"""Reads and prepares a schema. Raises RequestError."""

MAX_PARTS = 512
MAX_DEPTH = 32


class _Part(msgspec.Struct, frozen=True, tag_field="type"):
    """One format of a tag, as in the request. Unknown fields are refused."""


class _ConstString(_Part, tag="const_string", frozen=True, forbid_unknown_fields=True):
    value: str


class _JsonSchema(_Part, tag="json_schema", frozen=True, forbid_unknown_fields=True):
    json_schema: dict[str, Any] | bool


class _Regex(_Part, tag="regex", frozen=True, forbid_unknown_fields=True):
    pattern: str


class _AnyText(_Part, tag="any_text", frozen=True, forbid_unknown_fields=True):
    pass


class _Sequence(_Part, tag="sequence", frozen=True, forbid_unknown_fields=True):
    elements: list["_Format"]


class _Or(_Part, tag="or", frozen=True, forbid_unknown_fields=True):
    elements: list["_Format"]


class _Tag(_Part, tag="tag", frozen=True, forbid_unknown_fields=True):
    begin: str
    content: "_Format"
    end: str


class _TriggeredTags(_Part, tag="triggered_tags", frozen=True, forbid_unknown_fields=True):
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class _TagsWithSeparator(_Part, tag="tags_with_separator", frozen=True, forbid_unknown_fields=True):
    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


_Format = _ConstString | _JsonSchema | _Regex | _AnyText | _Sequence | _Or | _Tag | _TriggeredTags | _TagsWithSeparator


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class _Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: _Format | None = None
    structures: list[_Structure] | None = None
    triggers: list[str] | None = None
    type: str = "structural_tag"


def tag_grammar(given: str | Mapping[str, Any], prepare: Prepare) -> str:
    """Make the grammar of a structural tag. Raises RequestError, which names the place."""
    wanted = _read(given)
    if wanted.format is not None and wanted.structures is None and wanted.triggers is None:
        form: _Format = wanted.format
    elif wanted.format is None and wanted.structures and wanted.triggers:
        tags = [_Tag(one.begin, _JsonSchema(one.schema), one.end) for one in wanted.structures]
        form = _TriggeredTags(wanted.triggers, tags)
    else:
        raise RequestError("structural_tag takes either format, or structures and triggers that are not empty")
    tags_writer = _TagWriter(prepare)
    return check_lark(tags_writer.lark.grammar(tags_writer.write(form, "format", 1)), "structural_tag")


def _read(given: str | Mapping[str, Any]) -> _Wanted:
    try:
        if isinstance(given, str):
            check_text(given, "structural_tag")
            given = json.loads(given)
        return msgspec.convert(given, _Wanted)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise RequestError(f"structural_tag is not JSON at {place}: {error.msg}") from error
    except msgspec.ValidationError as error:
        raise RequestError(f"structural_tag: {with_choices(error, _Wanted)}") from error
    except (RecursionError, ValueError) as error:
        raise RequestError(f"structural_tag: {error}") from error


class _TagWriter:
    """Writes the rules of formats. `place` is the path of a format, for errors."""

    def __init__(self, prepare: Prepare) -> None:
        self.lark = LarkWriter()
        self._prepare = prepare
        self._num_parts = 0

    def write(self, form: _Format, place: str, depth: int) -> str:
        """Return the expression for `form` in a rule."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS or depth > MAX_DEPTH:
            raise RequestError(f"structural_tag: at most {MAX_PARTS} formats, {MAX_DEPTH} deep, got more at {place}")
        match form:
            case _ConstString():
                return self._text(form.value, f"{place}.value") or '""'
            case _JsonSchema():
                return self._schema(form.json_schema, place)
            case _Regex():
                check_regex(form.pattern, f"structural_tag: {place}.pattern")
                return self.lark.terminal(regex(form.pattern))
            case _AnyText():
                return self.lark.text()
            case _Sequence() | _Or():
                return self._elements(form, place, depth)
            case _Tag():
                return self._tag(form, place, depth)
            case _TriggeredTags():
                return self._triggered(form, place, depth)
            case _TagsWithSeparator():
                return self._separated(form, place, depth)

    def _elements(self, form: "_Sequence | _Or", place: str, depth: int) -> str:
        if not form.elements:
            raise RequestError(f"structural_tag: {place}.elements is empty; it needs at least one format")
        parts = [self.write(part, f"{place}.elements[{i}]", depth + 1) for i, part in enumerate(form.elements)]
        return self.lark.rule((" " if isinstance(form, _Sequence) else " | ").join(parts))

    def _tag(self, tag: _Tag, place: str, depth: int, trigger: str = "") -> str:
        """The rule of a tag, after the part of its `begin` that is the trigger."""
        begin = self._text(tag.begin[len(trigger) :], f"{place}.begin")
        if isinstance(tag.content, _AnyText) and tag.end:  # ends at the first end
            return self.lark.rule(f"{begin} {self.lark.text_until(tag.end)}")
        content = self.write(tag.content, f"{place}.content", depth + 1)
        return self.lark.rule(f"{begin} {content} {self._text(tag.end, f'{place}.end')}")

    def _triggered(self, form: _TriggeredTags, place: str, depth: int) -> str:
        if not all(form.triggers) or not form.triggers or not form.tags:
            raise RequestError(f"structural_tag: {place} needs triggers that are not empty, and tags")
        behind: dict[str, list[str]] = {}
        for i, tag in enumerate(form.tags):
            trigger = next((text for text in form.triggers if tag.begin.startswith(text)), None)
            if trigger is None:
                raise RequestError(
                    f"structural_tag: {place}.tags[{i}].begin must start with one of the triggers, got {tag.begin!r}"
                )
            behind.setdefault(trigger, []).append(self._tag(tag, f"{place}.tags[{i}]", depth + 1, trigger))
        first = self._union(f"{quoted(trigger)} {self._union(tags)}" for trigger, tags in behind.items())
        later = self._union(f"{self.lark.text_until(trigger)} {self._union(tags)}" for trigger, tags in behind.items())
        if form.stop_after_first:
            return first if form.at_least_one else self.lark.rule(f"{later} | {self.lark.text()}")
        if form.at_least_one:
            return self.lark.rule(f"{first} {later}* {self.lark.text()}")
        return self.lark.rule(f"{later}* {self.lark.text()}")

    def _separated(self, form: _TagsWithSeparator, place: str, depth: int) -> str:
        if not form.tags:
            raise RequestError(f"structural_tag: {place}.tags is empty; it needs at least one")
        tag = self._union(self._tag(tag, f"{place}.tags[{i}]", depth + 1) for i, tag in enumerate(form.tags))
        more = "" if form.stop_after_first else f"({self._text(form.separator, f'{place}.separator')} {tag})*"
        some = self.lark.rule(f"{tag} {more}")
        return some if form.at_least_one else f"({some})?"

    def _union(self, parts: "Sequence[str] | Any") -> str:
        return self.lark.rule(" | ".join(parts))

    def _schema(self, schema: dict[str, Any] | bool, place: str) -> str:
        try:
            prepared = self._prepare(schema)
            check_schema(prepared)
        except RequestError as error:
            raise RequestError(f"structural_tag: {place}: {error}") from error
        return self.lark.schema(prepared)

    def _text(self, text: str, place: str) -> str:
        check_text(text, f"structural_tag: {place}")
        return self.lark.literal(text)
