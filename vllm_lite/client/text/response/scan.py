"""Searches for delimiters in text that is still arriving."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from vllm_lite.client.text.response.template import MAX_HELD_CHARS, Delimiter, Field, Format


class WatchedMark(NamedTuple):
    """A delimiter that is looked for: it opens `field`, or closes it.

    at_start  it counts only where the text begins, but for white space
    yields    at one place any other delimiter is taken first, also a shorter one
    """

    field: Field
    delimiter: Delimiter
    opens: bool
    at_start: bool = False
    yields: bool = False


class Found(NamedTuple):
    """A delimiter between two places of the text."""

    start: int
    end: int
    opens: bool
    field: Field
    captures: dict[str, str]


class Scanner:
    """Searches for several delimiters. Immutable."""

    def __init__(self, watched: Sequence[WatchedMark]) -> None:
        self._watched = watched
        self._first = _first_of(watched)

    def scan(self, text: str, place: int, *, is_last: bool) -> tuple[Found | None, int, bool]:
        """Find the first delimiter from `place` on, the longest of those that begin there.

        Returns the delimiter or None; the end of the text before it, or without a delimiter the end of the text that
        cannot be part of one; and whether to search again from that end, because the text there is too long for a
        delimiter. With `is_last` nothing follows the text. Raises TimeoutError for a pattern that takes too long.
        """
        end, may_begin = len(text), place
        if self._first is not None:
            first = self._first.search(text, place)
            if first is None:
                return None, end, False
            may_begin = first.start()
        best: Any = None
        best_of: WatchedMark | None = None
        best_key: tuple[int, bool, int, bool, str] | None = None
        is_long = False
        for each in self._watched:
            found = _search(text, place if each.at_start else may_begin, each, is_last=is_last)
            if found is None:
                continue
            start, stop = found.span()
            if stop - start > MAX_HELD_CHARS:
                if start < end:
                    end, is_long = start + 1, True
                continue
            if not is_last and each.delimiter.is_pending(found, len(text)):
                if start < end:
                    end, is_long = start, False
                continue
            key = (start, each.yields, start - stop, not each.opens, each.field.name)
            if best_key is None or key < best_key:
                best, best_of, best_key = found, each, key
        if best_of is None or best.start() >= end:
            return None, end, is_long
        captures = {name: value for name, value in best.groupdict().items() if value is not None}
        return Found(best.start(), best.end(), best_of.opens, best_of.field, captures), best.start(), False


@lru_cache(256)
def scanner(*watched: WatchedMark) -> Scanner:
    """Return the scanner for these delimiters; all outputs of a format share it."""
    return Scanner(watched)


def _first_of(watched: Sequence[WatchedMark]) -> re.Pattern[str] | None:
    """Make a pattern of the characters with which the delimiters may begin: most text has none of them, and that is
    known at once. None where a checkpoint's own pattern is one of them, which may begin with anything."""
    found: set[str] = set()
    for each in watched:
        delimiter = each.delimiter
        if delimiter.literals is not None:
            found |= {literal[0] for literal in delimiter.literals}
        elif delimiter.seconds is None:
            letters = {*map(chr, range(128)), *delimiter.pattern.pattern}
            found |= {letter for letter in letters if delimiter.pattern.match(letter, partial=True)}
        else:
            return None
    return re.compile("[" + "".join(map(re.escape, sorted(found))) + "]") if found else None


def _search(text: str, place: int, each: WatchedMark, *, is_last: bool) -> Any:
    if not each.at_start:
        return each.delimiter.search(text, place, is_last=is_last)
    rest = text[place:]
    start = len(text) - len(rest.lstrip())
    return each.delimiter.match(text, start, is_last=is_last) if start < len(text) else None


# ---- The part of a prompt that already belongs to the message: thinking that a template opens, an answer to continue


MAX_PREFIX_CHARS = 65_536
"""Characters at the end of a prompt that are examined."""


def message_begun(response_format: Format, prefix: str) -> str:
    """Return the text of the prompt `prefix` after its last anchor, with marks for tokens. Without an anchor, return
    the literals of the reasoning that the prompt ends with: the opening one, or both if it ends with the closing
    one."""
    marks = response_format.marks
    text = marks.literal(prefix[-MAX_PREFIX_CHARS:])
    anchor = response_format.anchor
    if anchor is not None:
        try:
            ends = [found.end() for found in anchor.pattern.finditer(text, timeout=anchor.seconds)]
        except TimeoutError:
            ends = []
        if ends:
            return text[ends[-1] :]
    end = text.rstrip()
    opening, closing = map(marks.literal, response_format.thinking or ("", ""))
    if opening and end.endswith(opening):
        return text[len(end) - len(opening) :]
    if closing and end.endswith(closing):
        return opening + text[len(end) - len(closing) :]
    return ""
