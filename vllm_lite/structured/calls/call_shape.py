"""The shape of a format's tool calls: the data that a grammar of calls is made of. It imports nothing of llguidance."""

from typing import Any, Literal

import msgspec

Arguments = Literal["json", "tagged", "python", "gemma"]
Choice = Literal["auto", "required", "named"]

INDEX = "{index}"
"""Stands in a literal for the number of the call."""
ID = "{id}"
"""Stands in a literal for a name that the model gives the call."""
TYPE = "{type}"
"""Stands in a literal for the type of a value that is JSON."""


class CallShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A format's way to write calls, as the literals around their parts:

        begin  call_begin NAME name_end ARGUMENTS call_end  between  call_begin ... call_end  end

    In a literal `{index}`, `{id}` and `{type}` stand for what some formats write beside a name. A literal may contain
    texts of added tokens of the vocabulary, which are then written with these tokens only.
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
    tagged  for each: key_begin KEY key_end VALUE value_end; what may be a string is free text, what else is JSON
    python  KEY=VALUE, KEY=VALUE with literals of Python
    gemma   {KEY:VALUE,KEY:VALUE}, where `quote` stands on both sides of strings
    """
    key_begin: str = ""
    key_end: str = ""
    json_key_end: str = ""
    """Stands in the place of `key_end` before a value that is JSON, if that is another literal."""
    value_end: str = ""
    quote: str = ""


class Tool(msgspec.Struct, frozen=True):
    """A tool that may be called. `parameters` is the JSON schema of its arguments, an object; None: it takes none."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False
