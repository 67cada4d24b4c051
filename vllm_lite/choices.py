"""Fixed sets of values: finds the possible ones for an error of msgspec, which names the wrong one alone."""

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec


class NotChosen(NamedTuple):
    """A value that is none of a fixed set, from an error of msgspec, which does not name the set.

    wanted  the demand: "must be one of left, right"
    got     the value as the error shows it
    place   the rest of the error, " - at `$.path`", or ""
    """

    wanted: str
    got: str
    place: str


_NOT_CHOSEN = re.compile(r"Invalid (?:enum )?value (.*?)( - at (`key` in )?`\$([^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\w+|\.\.\.)\]")


def not_chosen(error: msgspec.ValidationError, kind: Any) -> NotChosen | None:
    """Find the fixed set for an `error` about a value that had to be a `kind`; None for any other error."""
    match = _NOT_CHOSEN.fullmatch(str(error))
    if match is None:
        return None
    got, at, is_key, path = match.groups()
    steps = [name or "[]" for name, _ in _STEP.findall(path or "")] + (["key"] if is_key else [])
    choices = list(dict.fromkeys(_choices(kind, steps)))
    if not choices:
        return None
    wanted = f"must be one of {', '.join(choices)}" if len(choices) > 1 else f"must be {choices[0]}"
    return NotChosen(f"keys {wanted}" if is_key else wanted, got, f" - at `${path}`" if at else "")


def with_choices(error: msgspec.ValidationError, kind: Any) -> str:
    """The text of `error` about a value that had to be a `kind`, with the possible values if they are a fixed set."""
    found = not_chosen(error, kind)
    return str(error) if found is None else f"{found.wanted}, got {found.got}{found.place}"


def _choices(kind: Any, steps: list[str]) -> Iterator[str]:
    """The values of the fixed set at the path `steps` of a `kind`, in the order of their declaration."""
    kinds = [kind]
    for place, step in enumerate(steps):
        inner: list[Any] = []
        for each in _alternatives(kinds):
            if isinstance(each, type) and issubclass(each, msgspec.Struct):
                inner += [field.type for field in msgspec.structs.fields(each) if field.encode_name == step]
                if place == len(steps) - 1 and each.__struct_config__.tag_field == step:
                    yield str(each.__struct_config__.tag)
            elif (args := get_args(each)) and get_origin(each) is not Literal:
                is_value = step != "key" and issubclass(get_origin(each), Mapping)
                inner.append(args[1] if is_value else args[0])
        kinds = inner
    for each in _alternatives(kinds):
        if get_origin(each) is Literal:
            yield from (msgspec.json.encode(value).decode().strip('"') for value in get_args(each))
        elif isinstance(each, type) and issubclass(each, Enum):
            yield from (str(member.value) for member in each)


def _alternatives(kinds: Iterable[Any]) -> Iterator[Any]:
    """All types of unions, without annotations."""
    for kind in kinds:
        if get_origin(kind) is Annotated:
            yield from _alternatives(get_args(kind)[:1])
        elif get_origin(kind) in (Union, UnionType):
            yield from _alternatives(get_args(kind))
        else:
            yield kind
