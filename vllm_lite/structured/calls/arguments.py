"""The grammar of a tool call's arguments: JSON, values between tags, or literals of a language."""

import json
from typing import Any

from vllm_lite.structured.calls.call_shape import CallShape
from vllm_lite.structured.calls.literals import KEY, KeyNotation, LiteralWriter, Notation, Resolver
from vllm_lite.structured.calls.loosening import loosened
from vllm_lite.structured.check import check_schema
from vllm_lite.structured.findings import Findings
from vllm_lite.structured.lark import LarkWriter, quoted
from vllm_lite.structured.schemas.schema import Schema, escaped

_STRING = frozenset({"enum", "const", "minLength", "maxLength", "pattern", "format", "allOf"})


def arguments_rule(lark: LarkWriter, shape: CallShape, parameters: Schema, findings: Findings) -> str:
    """Write the rules of a tool's arguments, and return the expression for them.

    A strict tool is refused if the format cannot express its schema; for other tools, keywords that cannot be enforced
    are dropped. Raises RequestError, which names the place.
    """
    if findings.is_lenient:
        parameters = loosened(parameters, findings)
    check_schema(parameters)
    resolver = Resolver(parameters, findings)
    match shape.arguments:
        case "json":
            return lark.schema(parameters)
        case "tagged":
            return _Tagged(lark, shape, resolver).write()
        case "python":
            return LiteralWriter(lark, _python(lark, resolver), resolver).pairs(
                parameters, "", KeyNotation(str, KEY, "=")
            )
        case "gemma":
            pairs = LiteralWriter(lark, _gemma(lark, shape), resolver).pairs(parameters, "", KeyNotation(str, KEY, ":"))
            return f'"{{" {pairs} "}}"'


class _Tagged:
    """Writes values between tags: free text if the value may be a string, else JSON."""

    def __init__(self, lark: LarkWriter, shape: CallShape, resolver: Resolver) -> None:
        self._lark = lark
        self._shape = shape
        self._resolver = resolver

    def write(self) -> str:
        shape, root = self._shape, self._resolver.root
        begin, behind = self._lark.literal(shape.key_begin), self._lark.literal(shape.key_end)
        named = root.get("properties")
        if not named:
            value = self._text()
            return '""' if root.get("additionalProperties") is False else f"({begin} {KEY} {behind} {value})*"
        parts = []
        for name, part in named.items():
            value = self._value(part, f"/properties/{escaped(name)}")
            pair = self._lark.rule(f"{begin} {quoted(name)} {value}")
            parts.append(pair if name in root.get("required", ()) else f"{pair}?")
        return self._lark.rule(" ".join(parts))

    def _value(self, given: Any, pointer: str) -> str:
        """Return the rule after a key: the end of its tag, a value and the closing tag."""
        end, behind = self._lark.literal(self._shape.value_end), self._lark.literal(self._shape.key_end)
        part, pointer = self._resolver.resolved(given, pointer)
        choices = part.get("enum", [part["const"]] if "const" in part else None)
        if choices and all(isinstance(choice, str) for choice in choices):
            return f"{behind} ({' | '.join(map(quoted, choices))}) {end}"
        if not self._may_be_text(part, pointer):
            behind = self._lark.literal(self._shape.json_key_end or self._shape.key_end)
            return f"{behind} {self._lark.schema(self._resolver.alone(part))} {end}"
        self._resolver.only(part, pointer, ("type", "anyOf"))
        return f"{behind} {self._text()}"

    def _text(self) -> str:
        """Free text up to the closing tag, with or without a line break before it, as parsers search for the tag
        alone."""
        end = self._shape.value_end.lstrip()
        trigger = self._lark.trigger(end)
        return f"{self._lark.text_until(trigger)} {self._lark.literal(end[len(trigger) :])}"

    def _may_be_text(self, part: Schema, pointer: str) -> bool:
        """Whether a value may be a string, and is then written verbatim."""
        for key in ("anyOf", "oneOf"):
            if key in part:
                inner = (self._resolver.resolved(one, f"{pointer}/{key}/{i}") for i, one in enumerate(part[key]))
                return any(self._may_be_text(*one) for one in inner)
        kinds = part.get("type")
        has_value = "enum" in part or "const" in part
        return (kinds is None and not has_value) or kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _python(lark: LarkWriter, resolver: Resolver) -> Notation:
    """Notation of Python literals. A string is a JSON string, which Python reads as the same text, or in single quotes,
    as models like to write. A string with a pattern or a length is always a JSON string."""
    any_string = lark.schema(resolver.alone({"type": "string"}))
    single = lark.terminal(r"/'([^'\\\x00-\x1f\x7f]|\\['\"\\nrt])*'/")

    def string(schema: Schema | None) -> str:
        if schema is not None and isinstance(schema.get("const"), str):
            text = schema["const"]
            inner = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'")
            return f"""({quoted(json.dumps(text, ensure_ascii=False))} | {quoted(f"'{inner}'")})"""
        if schema is not None and _STRING & schema.keys():
            return lark.schema(schema)
        return f"({any_string} | {single})"

    keys = KeyNotation(json.dumps, f"({any_string} | {single})", ": ")
    return Notation("True", "False", "None", keys, ", ", string, _STRING)


def _gemma(lark: LarkWriter, shape: CallShape) -> Notation:
    """Notation of Gemma's calls. A string is free text between two quotes, which are one added token."""
    quote = lark.literal(shape.quote)

    def string(schema: Schema | None) -> str:
        schema = schema or {}
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices is None:
            return f"{quote} {lark.text_until(shape.quote)}"
        return f"{quote} ({' | '.join(quoted(choice) for choice in choices if isinstance(choice, str))}) {quote}"

    return Notation("true", "false", "null", KeyNotation(str, KEY, ":"), ",", string, frozenset({"enum", "const"}))
