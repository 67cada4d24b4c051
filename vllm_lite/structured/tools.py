"""The grammar of tool calls, as a format writes them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Arguments = Literal["json", "tagged", "python", "gemma"]
Choice = Literal["auto", "required", "named"]


class CallShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a format writes calls, as the literals around their parts:

        begin  call_begin NAME name_end ARGUMENTS call_end  between  call_begin ... call_end  end

    In a literal `{index}` stands for the number of the call, which some formats write. A literal may contain texts of
    added tokens of the vocabulary, which are then written with these tokens only.
    """

    call_begin: str
    name_end: str
    call_end: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    is_parallel: bool = True
    """Whether the format can write more than one call."""
    arguments: Arguments = "json"
    """How arguments are written:

    json    a JSON object
    tagged  for each: key_begin KEY key_end VALUE value_end; a string is free text, what else is JSON
    python  KEY=VALUE, KEY=VALUE with literals of Python
    gemma   {KEY:VALUE,KEY:VALUE}, where `quote` stands on both sides of strings
    """
    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    quote: str = ""


class Tool(msgspec.Struct, frozen=True):
    """A tool that may be called. `parameters` is the JSON schema of its arguments, an object."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False


def tool_grammar(
    shape: CallShape,
    tools: Sequence[Tool],
    choice: Choice,
    *,
    parallel: bool = True,
    added_tokens: Mapping[str, int] | None = None,
) -> str | None:
    """Make the grammar, as it travels, of an output that calls `tools`.

    With `choice` "required" the output is one or more calls and nothing else; "named" is the same for the only tool of
    `tools`, and exactly one call. With "auto" it is text in which calls may stand; None if no tool is strict, so that
    nothing has to be held. Arguments of a strict tool follow its schema, and so do those of others unless `choice` is
    "auto": but for them keywords that cannot be held are ignored. Without `parallel` there is at most one call.
    `added_tokens` are texts and ids of the vocabulary that literals may contain.

    Raises RequestError for a name or a schema that cannot be held.
    """
    raise NotImplementedError
