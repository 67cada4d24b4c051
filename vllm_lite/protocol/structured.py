"""Constraints on an output's form: StructuredOutputsParams for users; a grammar and Thinking on the wire.

The client compiles the user's constraint to a grammar (structured/compile.py), so that engine and wire know only one
form: the text of a grammar in the format of llguidance, which the workers follow token by token.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.protocol import Message

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 4096
MAX_MARK_TOKENS = 16
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form that an output must have, in one of six ways; names are vLLM's.

    json            a JSON schema, as a dict or as text
    regex           a regular expression that the whole output matches
    choice          one of these texts
    grammar         a context-free grammar in the syntax of Lark or GBNF
    json_object     any JSON object
    structural_tag  free text in which a trigger begins a constrained part: OpenAI's {"type": "structural_tag", ...}

    JSON has no white space except one space after `:` and `,`, unless `whitespace_pattern` allows other;
    `disable_any_whitespace` allows none. `disable_additional_properties` closes objects whose schema is silent on that.

    Raises ValueError or TypeError unless exactly one form is given.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in KINDS}
        given = [name for name, value in values.items() if value is not None and (value is not False or name == "json")]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(KINDS)}; got {got}")


class Thinking(Message):
    """Token ids that begin and end the thinking of an output.

    `is_open`: the prompt ends inside the thinking. A grammar applies after the end of the thinking, or at once if the
    output does not begin with it. After `budget` tokens of thinking its end is forced.
    """

    end: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_MARK_TOKENS)]
    begin: Annotated[tuple[int, ...], Meta(max_length=MAX_MARK_TOKENS)] = ()
    is_open: bool = False
    budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
