"""LarkWriter: writes grammars in llguidance's syntax: rules, texts, added tokens of the vocabulary and JSON schemas.

A format's literal may contain added tokens, such as `<tool_call>`. In a grammar they are tokens, not text: the same
characters in other tokens do not match.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

ANY_TEXT = "TEXT"


def quoted(text: str) -> str:
    """Quote `text` as a Lark string, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """Write a regular expression between slashes. `\\w` and `\\d` are restricted to ASCII, as in JSON schemas: their
    other characters depend on the engine."""
    escaped = re.sub(r"\\.|/|\n|\\$", _escaped, pattern, flags=re.DOTALL)
    return f"/{escaped}/" if pattern else '""'


_WRITTEN = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", r"\w": "[0-9A-Za-z_]", r"\d": "[0-9]"}


def _escaped(found: re.Match[str]) -> str:
    return _WRITTEN.get(found[0], found[0])


class LarkWriter:
    """Collects the rules of one grammar. `added_tokens` maps texts that literals may contain to token ids."""

    def __init__(
        self, added_tokens: Mapping[str, int] | None = None, written_as: Mapping[str, str] | None = None
    ) -> None:
        """`written_as` maps placeholders in literals to the expressions that replace them."""
        self._tokens = {text: f"<[{token_id}]>" for text, token_id in (added_tokens or {}).items() if text}
        self._parts = {**self._tokens, **(written_as or {})}
        longest_first = sorted(self._parts, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: list[str] = []
        self._num_reserved = 0
        self._has_text = False
        self._texts_until: dict[str, str] = {}

    def mark(self) -> tuple[int, dict[str, str]]:
        """Return a mark for go_back()."""
        return len(self._rules), dict(self._texts_until)

    def go_back(self, place: tuple[int, dict[str, str]]) -> None:
        """Drop the rules that were written after a mark."""
        del self._rules[place[0] :]
        self._texts_until = place[1]

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def reserve(self) -> str:
        """Return a name for a rule that define() adds later, so that its body can refer to itself."""
        self._num_reserved += 1
        return f"s{self._num_reserved}"

    def define(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def terminal(self, body: str) -> str:
        """Add a terminal, which is matched as one regular expression, and return its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Return the expression of `text`, with its added tokens as tokens; "" for an empty text."""
        parts, at = [], 0
        for found in self._split.finditer(text):
            parts += [quoted(text[at : found.start()])] if found.start() > at else []
            parts.append(self._parts[found[0]])
            at = found.end()
        parts += [quoted(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def is_token(self, text: str) -> bool:
        """Whether `text` is one added token."""
        return text in self._tokens

    def trigger(self, begin: str) -> str:
        """Return the prefix of `begin` for text_until(): up to and including its first added token, or up to a
        placeholder, or all."""
        found = self._split.search(begin)
        if found is None:
            return begin
        return begin[: found.end() if found[0] in self._tokens or not found.start() else found.start()]

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON that follows a schema, which includes its options."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def text(self) -> str:
        """Return the terminal for any text without added tokens."""
        self._has_text = True
        return ANY_TEXT

    def text_until(self, end: str) -> str:
        """Return a rule for any text up to the first occurrence of `end`, and `end`, which may have an added token only
        at its end."""
        if end not in self._texts_until:
            found = self._split.search(end)
            before = end if found is None else end[: found.start()]
            if found is None:
                body = f"{self.text()} {quoted(end)}"
            elif not before:
                body = f"{self.text()} {self._parts[end]}"
            else:  # text and `before` are one terminal, as a terminal for any text would match `before` as well
                terminal = self.terminal(rf"/(.|\n)*{regex(re.escape(before))[1:]}")
                body = f"{terminal} {self._parts[found[0]]}"
            self._texts_until[end] = self.rule(body, "[lazy]" if found is None else "")
        return self._texts_until[end]

    def grammar(self, start: str) -> str:
        """Return the whole grammar with the start rule `start`."""
        text = [rf"{ANY_TEXT}: /(.|\n)*/"] if self._has_text else []
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, *text, ""])
