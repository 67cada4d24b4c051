"""The position of a grammar's fault. llguidance says what it is, and for a schema not where."""

import re
import time
from collections.abc import Callable

from vllm_lite.structured.schemas.schema import OPTIONS, Schema, escaped, subschemas, target_of

SEARCH_S = 0.02
"""How long the search may take; it then names the place that it has come to."""
MAX_SHOWN_CHARS = 300

_REGEX_FAULT = re.compile(r"regex parse error:\n {4}[^\n]*\n {4}( *)\^+\nerror: ([^\n]*)")
_LARK_FAULT = re.compile(r"(?:at )?(\d+)\((\d+)\): ([^\n]*)")
_DEFINITIONS = ("$defs", "definitions")


def place_in_schema(schema: Schema, message: str, fault_of: Callable[[Schema], str | None]) -> str:
    """Find the deepest subschema with the fault `message`, and return its JSON pointer.

    `fault_of` says what is wrong with a schema by itself. From the root the search goes into the first part that has
    the same fault, or to where a `$ref` leads.
    """
    deadline = time.monotonic() + SEARCH_S
    shared = {key: schema[key] for key in (OPTIONS, *_DEFINITIONS) if key in schema}
    pointer, part, visited = "", schema, {""}
    while True:
        for at, inner in parts_of(schema, pointer, part):
            if time.monotonic() > deadline:
                return pointer
            if at not in visited and fault_of({**shared, **inner}) == message:
                visited.add(at)
                pointer, part = at, inner
                break
        else:
            return pointer


def parts_of(schema: Schema, pointer: str, part: Schema) -> list[tuple[str, Schema]]:
    """Return the parts directly in `part`, which is at `pointer` of `schema`, and where its `$ref` leads; each with its
    JSON pointer. Definitions are parts of what refers to them only."""
    found = [(pointer + "".join(f"/{escaped(step)}" for step in steps), inner) for steps, inner in subschemas(part)]
    found = [(at, inner) for at, inner in found if at.split("/")[1] not in _DEFINITIONS or pointer]
    where = part.get("$ref")
    if isinstance(where, str) and where.startswith("#/"):
        target = target_of(schema, where)
        found += [(where[1:], target)] if isinstance(target, dict) else []
    return found


def plain(message: str) -> str:
    """Say in one line what llguidance says in several: the fault, and where it is in a regular expression."""
    if found := _REGEX_FAULT.search(message):
        return f"the regular expression is wrong at column {len(found[1]) + 1}: {found[2]}"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "it is not valid")
    text = text.removeprefix("error: ").replace("Unimplemented keys", "keywords that are not supported")
    if "coerce_one_of" in text:
        text = "the parts of oneOf must exclude each other visibly, as by a const; otherwise write anyOf"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def place_in_lark(message: str) -> str:
    """Say where the fault of a Lark grammar is."""
    found = _LARK_FAULT.match(message)
    if found is None:
        return plain(message)
    inner = message[found.start(3) :]
    return f"line {found[1]}, column {found[2]}: {plain(inner)}"
