"""The position of a grammar's error, which llguidance does not report for schemas."""

import re
import time
from collections.abc import Callable

from vllm_lite.structured.schemas.schema import OPTIONS, Schema, escaped, subschemas, target_of

SEARCH_S = 0.02
"""Maximum seconds of the search; it then returns the place that it has reached."""
MAX_SHOWN_CHARS = 300

_REGEX_FAULT = re.compile(r"regex parse error:\n {4}[^\n]*\n {4}( *)\^+\nerror: ([^\n]*)")
_LARK_FAULT = re.compile(r"(?:at )?(\d+)\((\d+)\): ([^\n]*)")
_DEFINITIONS = ("$defs", "definitions")


def place_in_schema(schema: Schema, message: str, fault_of: Callable[[Schema], str | None]) -> str:
    """Find the deepest subschema with the error `message`, and return its JSON pointer.

    `fault_of` returns the error of a schema by itself. From the root, the search descends into the first part with the
    same error, or follows a `$ref`.
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
    """Return the direct parts of `part`, which is at `pointer` of `schema`, and the target of its `$ref`, each with its
    JSON pointer. Definitions count as parts only of the schemas that refer to them."""
    found = [(pointer + "".join(f"/{escaped(step)}" for step in steps), inner) for steps, inner in subschemas(part)]
    found = [(at, inner) for at, inner in found if at.split("/")[1] not in _DEFINITIONS or pointer]
    where = part.get("$ref")
    if isinstance(where, str) and where.startswith("#/"):
        target = target_of(schema, where)
        found += [(where[1:], target)] if isinstance(target, dict) else []
    return found


def plain(message: str) -> str:
    """Condense llguidance's message to one line: the error, and its position in a regular expression."""
    if found := _REGEX_FAULT.search(message):
        return f"the regular expression is wrong at column {len(found[1]) + 1}: {found[2]}"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "it is not valid")
    text = text.removeprefix("error: ").replace("Unimplemented keys", "keywords that are not supported")
    if "coerce_one_of" in text:
        text = "the parts of oneOf must exclude each other visibly, as by a const; otherwise write anyOf"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def place_in_lark(message: str) -> str:
    """Prefix the error of a Lark grammar with its position."""
    found = _LARK_FAULT.match(message)
    if found is None:
        return plain(message)
    inner = message[found.start(3) :]
    return f"line {found[1]}, column {found[2]}: {plain(inner)}"
