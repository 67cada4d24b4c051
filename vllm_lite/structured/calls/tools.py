"""tool_grammar(): the grammar of tool calls in a model's format."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from vllm_lite.errors import RequestError
from vllm_lite.structured.calls.arguments import arguments_rule
from vllm_lite.structured.calls.call_shape import ID, INDEX, TYPE, CallShape, Choice, Tool
from vllm_lite.structured.check import check_lark
from vllm_lite.structured.findings import Allowance, Findings
from vllm_lite.structured.lark import LarkWriter
from vllm_lite.structured.limits import MAX_OPTIONAL_IN_PART
from vllm_lite.structured.schemas import schema as schemas
from vllm_lite.structured.schemas.keywords import type_name
from vllm_lite.structured.schemas.preparing import prepared
from vllm_lite.structured.schemas.schema import Schema

__all__ = ["CallGrammar", "CallShape", "Choice", "Tool", "tool_grammar"]

MAX_CALLS = 64
MIN_TRIGGER_CHARS = 4
"""A shorter text, such as `[`, is too common to trigger a call; then the name of a tool must follow it."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WRITTEN_AS = {INDEX: "/[0-9]{1,3}/", ID: "/[A-Za-z0-9_.-]{1,64}/", TYPE: "/array|boolean|null|number|object/"}
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


class CallGrammar(NamedTuple):
    """The text of a grammar, None if nothing is constrained, and the constraints dropped from the schemas of tools that
    are not strict: `f #/properties/a: 'not'`, or `f #` for a whole schema."""

    text: str | None
    notes: tuple[str, ...] = ()


def tool_grammar(
    shape: CallShape,
    tools: Sequence[Tool],
    choice: Choice,
    *,
    parallel: bool = True,
    is_held: bool = False,
    added_tokens: Mapping[str, int] | None = None,
) -> CallGrammar:
    """Make the grammar of an output that calls `tools`.

    With `choice` "required" the output is one or more calls and nothing else; "named" means exactly one call of the
    only tool. With "auto" the output is text that may contain calls; there is no grammar if no tool is strict, unless
    `is_held` requires valid names and syntax. Arguments of a strict tool follow its schema; so do those of other tools
    unless `choice` is "auto", without the keywords that cannot be enforced. Objects with named properties have no
    others, unless their schema allows them. Without `parallel` there is at most one call.

    `added_tokens` maps texts of added tokens, which literals may contain, to ids.

    Raises RequestError for a name, or the schema of a strict tool, that cannot be expressed.
    """
    if not tools or (choice == "named" and len(tools) != 1):
        raise RequestError(f"a call needs at least one tool, and a named call exactly one; got {len(tools)}")
    if choice == "auto" and not is_held and not any(tool.strict for tool in tools):
        return CallGrammar(None)
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise RequestError(f"a tool's name has 1 to 64 of A-Z, a-z, 0-9, '_', '-' and '.', got {tool.name[:100]!r}")

    def written(held: Collection[str]) -> CallGrammar:
        most = MAX_CALLS if parallel and shape.is_parallel and choice != "named" else 1
        writer = _CallWriter(shape, added_tokens, most)
        bodies = {tool.name: writer.body(tool, is_held=tool.name in held) for tool in tools}
        start = writer.text_with_calls(bodies) if choice == "auto" else writer.calls(bodies)
        return CallGrammar(check_lark(writer.lark.grammar(start), "the grammar of the tools"), tuple(writer.notes))

    strict = {tool.name for tool in tools if tool.strict}
    loose = {tool.name for tool in tools} - strict if choice != "auto" else set()
    try:
        return written(strict | loose)
    except RequestError:
        if not loose:
            raise
        text, notes = written(strict)  # all schemas together are too large: enforce only strict ones
        return CallGrammar(text, (*(f"{name} #" for name in sorted(loose)), *notes))


class _CallWriter:
    """Writes the rules of at most `most` calls. A body is the part of a call after its name and `name_end`."""

    def __init__(self, shape: CallShape, added_tokens: Mapping[str, int] | None, most: int) -> None:
        self.lark = LarkWriter(added_tokens, _WRITTEN_AS)
        self.notes: list[str] = []
        self._allowance = Allowance()
        self._shape = shape
        self._most = most

    def body(self, tool: Tool, *, is_held: bool) -> str:
        """Return the body of a call of `tool`, with arguments by its schema if `is_held`."""
        findings = Findings(is_lenient=not tool.strict, allowance=self._allowance)
        place = self.lark.mark()
        try:
            parameters = _parameters(tool if is_held else Tool(tool.name, {}), findings)
            arguments = arguments_rule(self.lark, self._shape, parameters, findings)
        except RequestError as error:
            if tool.strict or not is_held:
                raise RequestError(f"tool {tool.name!r}: {error}") from error
            self.lark.go_back(place)
            self.notes.append(f"{tool.name} #")
            return self.body(tool, is_held=False)
        self.notes += (f"{tool.name} {note}" for note in findings.notes)
        return self.lark.rule(f"{arguments} {self.lark.literal(self._shape.call_end)}")

    def calls(self, bodies: Mapping[str, str]) -> str:
        """Return the rule of one or more calls, with the literals before, between and after them."""
        named = self._named(bodies)
        begin = self.lark.literal(self._shape.begin + self._shape.call_begin)
        return self.lark.rule(f"{begin} {named} {self._rest(named)}")

    def text_with_calls(self, bodies: Mapping[str, str]) -> str:
        """Return the rule of text that may contain calls: after the beginning of a call, a whole call must follow."""
        named = self._named(bodies)
        begin = self._shape.begin + self._shape.call_begin
        trigger = self.lark.trigger(begin)
        if self.lark.is_token(trigger) or len(trigger.strip()) >= MIN_TRIGGER_CHARS:
            starts = {begin: named}
        else:
            starts = {f"{begin}{name}{self._shape.name_end}": body for name, body in bodies.items()}
        parts = []
        for start, behind in starts.items():
            trigger = self.lark.trigger(start)
            parts.append(f"{self.lark.text_until(trigger)} {self.lark.literal(start[len(trigger) :])} {behind}")
        first = self.lark.rule(" | ".join(parts))
        return self.lark.rule(f"({first} {self._rest(named)}){{0,{self._most}}} {self.lark.text()}")

    def _named(self, bodies: Mapping[str, str]) -> str:
        """The rule of a call from its name on."""
        end = self._shape.name_end
        return self.lark.rule(" | ".join(f"{self.lark.literal(name + end)} {body}" for name, body in bodies.items()))

    def _rest(self, named: str) -> str:
        """The grammar after the first call: further calls, and the end."""
        end = self.lark.literal(self._shape.end)
        if self._most == 1:
            return end
        between = self.lark.literal(self._shape.between + self._shape.call_begin)
        return f"({between} {named}){{0,{self._most - 1}}} {end}"


def _parameters(tool: Tool, findings: Findings) -> Schema:
    """The prepared schema of a tool's arguments. Raises RequestError if it is not an object's."""
    given = _NO_ARGUMENTS if tool.parameters is None else schemas.read(tool.parameters)
    kind = given.get("type")
    kind = type_name(kind) if findings.is_lenient else kind
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        findings.cannot("", "type", f"the arguments of a tool are an object, got the type {kind!r}")
        given = {}
    options = schemas.options(lenient=not tool.strict)
    given = {**given, "type": "object"}
    return prepared(given, options, findings, max_optional=MAX_OPTIONAL_IN_PART, is_closed=True)
