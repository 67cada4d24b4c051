"""Loosens schemas that llguidance rejects until it accepts them, for tools that are not strict."""

import time
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher

from vllm_lite.structured.calls.literals import DEFINITIONS, REMARKS
from vllm_lite.structured.check import fault_of, passed
from vllm_lite.structured.findings import Findings
from vllm_lite.structured.place import parts_of
from vllm_lite.structured.schemas.schema import OPTIONS, Schema, escaped, schema_text, unescaped

MAX_ROUNDS = 32
MAX_CHECKS = 400
SEARCH_S = 0.3
"""Maximum seconds for one schema; parts that are still rejected then become any object."""
_LAST = ("type", "properties", "$ref")
"""The most important keywords are removed last."""


def loosened(schema: Schema, findings: Findings) -> Schema:
    """Return a prepared schema that llguidance accepts: `schema` without the keywords that it rejects.

    The findings name each removed keyword. In the worst case any object is left.
    """
    search = _Search(schema, min(SEARCH_S, findings.allowance.left_s))
    if not search.is_wrong(schema):
        return schema
    with findings.allowance.spent(), suppress(TimeoutError):
        for _ in range(MAX_ROUNDS):
            search.loosen(findings)
            if not search.is_wrong(search.root):
                return search.root
    findings.note("", "")
    return {"type": "object", OPTIONS: schema[OPTIONS]}


class _Search:
    """Searches for the rejected parts of one schema. `root` is the schema so far."""

    def __init__(self, root: Schema, seconds: float) -> None:
        self.root = root
        self._num_checks = 0
        self._deadline = time.monotonic() + seconds

    def is_wrong(self, part: Schema) -> bool:
        """Whether llguidance rejects `part` by itself. Raises TimeoutError after too many checks."""
        shared = {key: self.root[key] for key in DEFINITIONS if key in self.root}
        whole = {**shared, **part, OPTIONS: self.root[OPTIONS]}
        grammar = LLMatcher.grammar_from_json_schema(schema_text(whole))
        if passed.has(grammar):
            return False
        self._num_checks += 1
        if self._num_checks > 1 and (self._num_checks > MAX_CHECKS or time.monotonic() > self._deadline):
            raise TimeoutError
        if fault_of(grammar) is not None:
            return True
        passed.add(grammar)
        return False

    def loosen(self, findings: Findings) -> None:
        """Remove one keyword from the deepest rejected part, or all of them if one is not enough."""
        pointer, part = self._deepest()
        kept = (OPTIONS, *DEFINITIONS, *(("type",) if not pointer else ()))
        keys = [key for key in part if key not in REMARKS and key not in kept]
        for key in sorted(keys, key=lambda key: _LAST.index(key) if key in _LAST else -1):
            if not self.is_wrong({name: value for name, value in part.items() if name != key}):
                self._drop(pointer, [key])
                findings.note(pointer, key)
                return
        self._drop(pointer, keys)
        findings.note(pointer, "")

    def _deepest(self) -> tuple[str, Schema]:
        pointer, part, visited = "", self.root, {""}
        while True:
            for at, inner in parts_of(self.root, pointer, part):
                if at not in visited and self.is_wrong(inner):
                    visited.add(at)
                    pointer, part = at, inner
                    break
            else:
                return pointer, part

    def _drop(self, pointer: str, keys: list[str]) -> None:
        self.root = _without(self.root, pointer.split("/")[1:], keys)


def _without(value: Any, steps: list[str], keys: list[str]) -> Any:
    """Copy `value` without `keys` of the object at the path `steps`."""
    if not steps:
        return {key: inner for key, inner in value.items() if key not in keys}
    if isinstance(value, list):
        place = int(steps[0])
        return [*value[:place], _without(value[place], steps[1:], keys), *value[place + 1 :]]
    key = next(key for key in value if steps[0] in (escaped(key), key) or unescaped(steps[0]) == key)
    return {**value, key: _without(value[key], steps[1:], keys)}
