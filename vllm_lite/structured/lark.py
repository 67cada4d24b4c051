"""Writes grammars in the syntax that llguidance takes: rules, texts, added tokens of the vocabulary and JSON schemas.

A literal of a format may contain added tokens, such as `<tool_call>`. In a grammar they are tokens, not text: a model
that spells them in letters has not written them.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

ANY_TEXT = "TEXT"


def quoted(text: str) -> str:
    """Write `text` as a string of Lark, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """Write a regular expression between slashes."""
    escaped = re.sub(r"\\.|/|\n|\\$", _escaped, pattern, flags=re.DOTALL)
    return f"/{escaped}/" if pattern else '""'


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "\\/": r"\/"}.get(found[0], found[0])


class LarkWriter:
    """Collects the rules of one grammar. `added_tokens` are texts and ids that literals may contain."""

    def __init__(self, added_tokens: Mapping[str, int] | None = None) -> None:
        self._added = dict(added_tokens or {})
        texts = sorted((text for text in self._added if text), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._rules: list[str] = []
        self._has_text = False
        self._triggers: dict[str, str] = {}

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, which is matched as one regular expression, and return its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Write `text`, its added tokens as tokens. Empty for an empty text."""
        parts, at = [], 0
        for found in self._split.finditer(text):
            parts += [quoted(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self._added[found[0]]}]>")
            at = found.end()
        parts += [quoted(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Write JSON that follows a schema, which has its options in it."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def text(self) -> str:
        """Write any text, without added tokens."""
        self._has_text = True
        return ANY_TEXT

    def text_until(self, end: str) -> str:
        """Write any text up to the first place of `end`, and `end`, which may begin or end with an added token."""
        if not end:
            return self.text()
        if end not in self._triggers:
            found = self._split.search(end)
            if found is None:
                lazy = self.rule(f"{self.text()} {quoted(end)}", "[lazy]")
                self._triggers[end] = lazy
            elif found.start() == 0:
                self._triggers[end] = self.rule(f"{self.text()} {self.literal(end)}")
            else:
                raise ValueError(f"{end!r} has an added token behind its beginning")
        return self._triggers[end]

    def grammar(self, start: str) -> str:
        """Return the grammar whose outputs are `start`."""
        text = [rf"{ANY_TEXT}: /(.|\n)*/"] if self._has_text else []
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, *text, ""])

    def trigger(self, begin: str) -> str:
        """Return the part of `begin` behind which a call has certainly begun: its first added token or all of it up to
        the first one."""
        found = self._split.search(begin)
        if found is None:
            return begin
        return found[0] if found.start() == 0 else begin[: found.start()]
