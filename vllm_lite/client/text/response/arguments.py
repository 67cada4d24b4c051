"""The arguments of a call, once they are complete."""

import re
from typing import Any

import msgspec

_ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def arguments_of(text: str) -> dict[str, Any] | None:
    """Read the object that a call was given; None if `text` is no JSON object, as that of a call that was cut.

    The escape of half a surrogate pair, which no other JSON may contain, is read as U+FFFD.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        whole = _ESCAPES.sub(lambda found: r"\ufffd" if found[1] else found[0], text)
    if whole == text:
        return None
    try:
        return msgspec.json.decode(whole, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
