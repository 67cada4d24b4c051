"""Reads a checkpoint's JSON files into declared types. A ModelError names the file, the key and the value."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from vllm_lite.choices import not_chosen
from vllm_lite.errors import ModelError
from vllm_lite.runtime.untrusted_files import MAX_CONFIG_BYTES, read_bounded

T = TypeVar("T")

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0)]
TokenId = Annotated[int, Meta(ge=0)]
MAX_MESSAGE = 2000
"""Maximum characters of an error, which includes a value that may be as long as the file."""


def read_json(
    source: Path,
    parse: Callable[[Any], T],
    *,
    max_bytes: int = MAX_CONFIG_BYTES,
    owner: str = "a Hugging Face checkpoint folder",
) -> T:
    """Return `parse(json)` of the file `source`, of at most `max_bytes`. Raises ModelError, prefixing the errors of
    `parse` with the file's name. `owner`: the kind of folder that has the file."""
    try:
        data = read_bounded(source, max_bytes)
    except ValueError as error:
        raise ModelError(f"{str(source)!r} is not the name of a file ({error})") from None
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file; {owner} has one") from None
    except OSError as error:
        raise ModelError(f"{source}: cannot be read ({error.strerror})") from error
    try:
        return parse(_decode(data))
    except ModelError as error:
        raise ModelError(f"{source}: {_bounded(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{source}: not valid JSON ({error})") from error


def _decode(data: bytes) -> Any:
    """Decode JSON; Infinity, which Python writes, becomes {"__float__": "Infinity"}, as in transformers 5."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        if b"Infinity" not in data:
            raise
        try:
            return json.loads(data, parse_constant={"Infinity": {"__float__": "Infinity"}}.__getitem__)
        except (ValueError, KeyError):
            pass
        raise


def _bounded(message: str) -> str:
    """Cut the middle of a long message: the error is at its start, and often the expected value at its end."""
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]} [...] {message[-half:]}"


def convert(raw: Any, kind: type[T], within: str = "") -> T:
    """Convert `raw` to the declared type. Errors show the offending key and value, and `within`, the name of the
    enclosing value."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        if chosen := not_chosen(error, kind):
            problem, path = chosen.wanted, chosen.place.removeprefix(" - at `$")
        key = path.rstrip("`").removeprefix(".").partition("[")[0]
        where = ".".join(filter(None, (within, key)))
        given = f", but it is {raw[key]!r}" if isinstance(raw, dict) and key in raw else ""
        raise ModelError(f"{where}: {problem}{given}" if where else problem) from None
