"""The shape of a format's tool calls: the data of which a grammar of calls is made. Imports nothing of llguidance."""

from typing import Any, Literal

import msgspec

Arguments = Literal["json", "tagged", "python", "gemma"]
Choice = Literal["auto", "required", "named"]

INDEX = "{index}"
"""Placeholder in a literal for the number of the call."""
ID = "{id}"
"""Placeholder in a literal for an id that the model gives the call."""
TYPE = "{type}"
"""Placeholder in a literal for the type of a JSON value."""


class CallShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The syntax of a format's calls, as the literals around their parts:

        begin  call_begin NAME name_end ARGUMENTS call_end  between  call_begin ... call_end  end

    In a literal, `{index}`, `{id}` and `{type}` are placeholders for data that some formats write beside a name. A
    literal may contain texts of added tokens, which only these tokens match.
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
    """Syntax of arguments:

    json    a JSON object
    tagged  for each: key_begin KEY key_end VALUE value_end; values that may be strings are free text, others JSON
    python  KEY=VALUE, KEY=VALUE with literals of Python
    gemma   {KEY:VALUE,KEY:VALUE}, with strings between two `quote`s
    """
    key_begin: str = ""
    key_end: str = ""
    json_key_end: str = ""
    """Replaces `key_end` before a JSON value, if it is not empty."""
    value_end: str = ""
    quote: str = ""


class Tool(msgspec.Struct, frozen=True):
    """A tool that may be called. `parameters` is the JSON schema of its arguments object; None: no arguments."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False
