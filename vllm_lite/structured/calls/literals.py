"""Grammars of values as literals of a language other than JSON: Python's, and that of Gemma's calls."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_lite.structured.findings import Findings, refusal
from vllm_lite.structured.lark import LarkWriter, quoted
from vllm_lite.structured.schemas.schema import OPTIONS, Schema, escaped, target_of

REMARKS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})
"""Keywords without constraints."""
KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
DEFINITIONS = ("$defs", "definitions")

_HELD = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "boolean": set[str](),
    "null": set[str](),
}


@dataclass(frozen=True, slots=True)
class KeyNotation:
    """Syntax of keys: `write` for a known key, `any` for any key as a grammar, `behind` between a key and its value."""

    write: Callable[[str], str]
    any: str
    behind: str


@dataclass(frozen=True, slots=True)
class Notation:
    """Syntax of values. `string` takes the schema of a string, or None for any string."""

    true: str
    false: str
    null: str
    keys: KeyNotation
    between: str
    string: Callable[[Schema | None], str]
    held_of_strings: frozenset[str]
    """Keywords of strings that `string` enforces."""


class Resolver:
    """Resolves the `$ref`s of one schema, and reports keywords that a format cannot enforce."""

    def __init__(self, root: Schema, findings: Findings) -> None:
        self.root = root
        self._findings = findings

    def resolved(self, part: Any, pointer: str) -> tuple[Schema, str]:
        """The schema that `part` refers to, and its JSON pointer. Raises RequestError for a `$ref` without a target."""
        for _ in range(16):
            where = part.get("$ref") if isinstance(part, dict) else None
            if not isinstance(where, str):
                return (part if isinstance(part, dict) else {}), pointer
            part, pointer = target_of(self.root, where), where.lstrip("#")
        raise refusal(pointer, "$ref leads to itself")

    def only(self, part: Schema, pointer: str, held: Iterable[str]) -> None:
        """Report keywords that are not `held`. Raises RequestError for one of a strict schema."""
        for key in part:
            if key not in REMARKS and key not in held and key not in (OPTIONS, *DEFINITIONS):
                text = f"the format of the model's calls cannot hold the keyword {key!r}"
                self._findings.cannot(pointer, key, text)

    def alone(self, part: Schema) -> Schema:
        """Make a separate schema from `part`, with the options and definitions of the root."""
        shared = {key: self.root[key] for key in (OPTIONS, *DEFINITIONS) if key in self.root}
        return {**shared, **part}


class LiteralWriter:
    """Writes the rules of values that follow a schema."""

    def __init__(self, lark: LarkWriter, notation: Notation, resolver: Resolver) -> None:
        self._lark = lark
        self._notation = notation
        self._resolver = resolver
        self._by_place: dict[str, str] = {}
        self._any: str | None = None

    def value(self, given: Any, pointer: str) -> str:
        """Return the name of a value's rule. Raises RequestError, which names the place."""
        part, pointer = self._resolver.resolved(given, pointer)
        if pointer not in self._by_place:
            self._by_place[pointer] = name = self._lark.reserve()  # reserved first, as a schema may contain itself
            self._lark.define(name, self._body(part, pointer))
        return self._by_place[pointer]

    def pairs(self, part: Schema, pointer: str, keys: KeyNotation) -> str:
        """Return the expression of an object's keys and values, in the order of the schema, without braces."""
        between = quoted(self._notation.between)
        self._resolver.only(part, pointer, _HELD["object"] | {"type"})
        required = part.get("required", ())
        items = []
        for name, inner in part.get("properties", {}).items():
            value = self.value(inner, f"{pointer}/properties/{escaped(name)}")
            items.append((f"{quoted(keys.write(name) + keys.behind)} {value}", name in required))
        if items or part.get("additionalProperties") is False:
            return sequence_of(self._lark, items, between)
        pair = f"{keys.any} {quoted(keys.behind)} {self.any_value()}"
        return self._lark.rule(f"({pair} ({between} {pair})*)?")

    def any_value(self) -> str:
        """Return the name of the rule for any value."""
        if self._any is None:
            notation, self._any = self._notation, self._lark.reserve()
            keys, between = notation.keys, quoted(notation.between)
            number = self._lark.schema(self._resolver.alone({"type": "number"}))
            words = " | ".join(map(quoted, (notation.true, notation.false, notation.null)))
            items = f'"[" ({self._any} ({between} {self._any})*)? "]"'
            pair = f"{keys.any} {quoted(keys.behind)} {self._any}"
            pairs = f'"{{" ({pair} ({between} {pair})*)? "}}"'
            self._lark.define(self._any, f"{notation.string(None)} | {number} | {words} | {items} | {pairs}")
        return self._any

    def _body(self, part: Schema, pointer: str) -> str:
        values = part.get("enum", [part["const"]] if "const" in part else None)
        if values:
            self._resolver.only(part, pointer, ("enum", "const", "type"))
            return " | ".join(self._constant(value) for value in values)
        for key in ("anyOf", "oneOf"):
            if key in part:
                self._resolver.only(part, pointer, (key,))
                return " | ".join(self.value(inner, f"{pointer}/{key}/{i}") for i, inner in enumerate(part[key]))
        kinds = part.get("type")
        if isinstance(kinds, list):
            return " | ".join(self._typed(kind, part, pointer) for kind in kinds)
        if kinds is None:
            self._resolver.only(part, pointer, ())
            return self.any_value()
        return self._typed(kinds, part, pointer)

    def _typed(self, kind: str, part: Schema, pointer: str) -> str:
        notation = self._notation
        if kind in ("integer", "number"):
            return self._lark.schema(self._resolver.alone({**part, "type": kind}))
        if kind == "string":
            self._resolver.only(part, pointer, notation.held_of_strings | {"type"})
            return notation.string(self._resolver.alone({**part, "type": kind}))
        if kind == "object":
            return f'"{{" {self.pairs(part, pointer, notation.keys)} "}}"'
        self._resolver.only(part, pointer, _HELD[kind] | {"type"})
        if kind == "array":
            return self._array(part, pointer)
        return notation_words(notation, kind)

    def _array(self, part: Schema, pointer: str) -> str:
        inner = part.get("items", {})
        item = self.value(inner, f"{pointer}/items") if inner != {} else self.any_value()
        least, most = part.get("minItems", 0), part.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ({quoted(self._notation.between)} {item}){more}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, bool) or value is None:
            return quoted({True: self._notation.true, False: self._notation.false, None: self._notation.null}[value])
        if isinstance(value, str):
            return self._notation.string(self._resolver.alone({"const": value}))
        return quoted(json.dumps(value, ensure_ascii=False))


def notation_words(notation: Notation, kind: str) -> str:
    """Return the values of the type "boolean" or "null"."""
    return quoted(notation.null) if kind == "null" else f"({quoted(notation.true)} | {quoted(notation.false)})"


def sequence_of(lark: LarkWriter, items: Sequence[tuple[str, bool]], between: str) -> str:
    """Return a rule for items in order, with `between` them, where items that are not required may be missing.

    Each position has two rules: one after an earlier item, and one without.
    """
    first = behind = '""'
    for item, is_required in reversed(items):
        here_first, here_behind = f"{item} {behind}", f"{between} {item} {behind}"
        if not is_required:
            here_first, here_behind = f"{here_first} | {first}", f"{here_behind} | {behind}"
        first, behind = lark.rule(here_first), lark.rule(here_behind)
    return first
