"""Reads the complete arguments of a call."""

from typing import Any

import msgspec

from vllm_lite.client.text.surrogates import without_halves


def arguments_of(text: str) -> dict[str, Any] | None:
    """Read the arguments of a call; None if `text` is not a JSON object, for example because the call was truncated.

    The escape of half a surrogate pair, which no other JSON may contain, is read as U+FFFD.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return None
    given = _object(data)
    return _object(without_halves(data)) if given is None else given


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
