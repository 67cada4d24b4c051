"""Decodes untrusted JSON into declared types, with one-sentence errors."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.choices import NotChosen, not_chosen
from vllm_lite.client.text.surrogates import without_halves
from vllm_lite.server.openai.errors import ApiError

MAX_FIELDS = 256
SHOWN_CHARS = 160
"""Number of characters shown of each end of a long error."""
Fields = Annotated[dict[str, msgspec.Raw], Meta(max_length=MAX_FIELDS)]
_IN_UTF8 = "application/json; charset=utf-8"


class _MalformedError(ApiError):
    """The body is not JSON."""


def top_level(data: bytes) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """Return a body and its undecoded fields. Unpaired halves of surrogate pairs are removed from both.

    Raises ApiError.
    """
    try:
        return data, decode(data, Fields)
    except _MalformedError:
        mended = without_halves(data)
        if mended == data:
            raise
        return mended, decode(mended, Fields)


def decode(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Decode JSON. Numbers and flags may be spelled as other servers accept them: 16.0, "16", "true", 1. Raises
    ApiError."""
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.ValidationError as error:
        chosen = not_chosen(error, kind)
        message = str(error) if chosen is None else _chosen(chosen)
        if len(message) > 2 * SHOWN_CHARS:  # it has the client's value, of any length; the path is at its end
            message = f"{message[:SHOWN_CHARS]} [...] {message[-SHOWN_CHARS:]}"
        place = re.search(r"`\$\.?((\w+)[^`]*)`", message)
        raise ApiError(400, message.replace("`$.", "`"), place.group(2) if place else None) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _check_unicode(data)
        raise _MalformedError(400, f"the body is not valid JSON: {error}") from error


def _chosen(error: NotChosen) -> str:
    """The sentence about a value that is none of a fixed set, which begins with the field."""
    field = error.place.removeprefix(" - at ")
    return f"{field or 'the body'} {error.wanted}, got {error.got}"


def _check_unicode(data: bytes | msgspec.Raw) -> None:
    """Raise ApiError for bytes that are not UTF-8, naming the first; msgspec's releases word this differently."""
    try:
        str(memoryview(data), "utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} of a text"
        text = f"{byte} is not UTF-8 (PowerShell needs -ContentType {_IN_UTF8!r})"
        raise ApiError(400, f"the body is not valid JSON: {text}") from error
