"""Rewrites regular expressions: removes look-around, and joins several into one. Also detects excessive repetition,
since llguidance writes out forced repetitions."""

import re
from collections.abc import Sequence

from vllm_lite.structured.limits import MAX_REPEATS
from vllm_lite.structured.regexes.lookaround import automaton_of
from vllm_lite.structured.regexes.regex_tree import ALL, Ahead, Alt, Chars, Edge, Node, Repeat, Seq, read_tree, written

MAX_TRANSLATED_CHARS = 4096
"""Maximum length of a pattern that is rewritten."""

_STEP = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d{1,9})(?:,(\d{0,9}))?\}|.", re.DOTALL)
_START = Edge("^")
_ANY = Repeat(Chars(ALL), 0, None)


def too_many_repeats(pattern: str) -> int | None:
    """Column of the first count that repeats a part more than MAX_REPEATS times, enclosing counts multiplied; None if
    there is none. Unreliable for an invalid pattern."""
    most_in = [1]  # for each open group, the largest repetition in it
    last = 1
    for found in _STEP.finditer(pattern):
        step = found[0]
        if step == "(":
            most_in.append(1)
            last = 1
        elif step == ")" and len(most_in) > 1:
            last = most_in.pop()
            most_in[-1] = max(most_in[-1], last)
        elif found[1] is not None:
            last *= max(int(found[1]), int(found[2] or 0), 1)
            most_in[-1] = max(most_in[-1], last)
            if last > MAX_REPEATS:
                return found.start() + 1
        elif step not in "?*+":
            last = 1
    return None


def equivalents(pattern: str) -> list[str]:
    """Return patterns without look-around; a text matches all of them if and only if it matches `pattern`.

    Look-ahead at the start becomes a pattern of its own, so that its length does not multiply with the rest. Raises
    NotHeldError.
    """
    parts = _parts(read_tree(pattern))
    found = []
    while parts and parts[0] == _START and len(parts) > 1 and isinstance(look := parts[1], Ahead):
        ahead = Seq((_START, *_parts(look.body)))
        found += [automaton_of(ahead, is_negative=True).pattern()] if look.is_negative else [_written(ahead)]
        del parts[1]
    if not found or parts != [_START]:
        found.append(_written(Seq(tuple(parts))))
    return found


def all_of(patterns: Sequence[str], none_of: Sequence[str] = ()) -> str:
    """Return one pattern for texts that match all of `patterns` and none of `none_of`. Raises NotHeldError."""
    looks = [Ahead(Seq((_ANY, read_tree(pattern))), is_negative=False) for pattern in patterns]
    looks += [Ahead(Seq((_ANY, read_tree(pattern))), is_negative=True) for pattern in none_of]
    return automaton_of(Seq((_START, *looks))).pattern()


def _written(tree: Node) -> str:
    return written(tree) if _is_plain(tree) else automaton_of(tree).pattern()


def _is_plain(tree: Node) -> bool:
    """Whether there are anchors only at the ends, and no look-around."""
    if isinstance(tree, Alt):
        return all(map(_is_plain, tree.parts))
    parts = _parts(tree)
    if parts and parts[0] == _START:
        del parts[0]
    if parts and parts[-1] == Edge("$"):
        del parts[-1]
    return all(map(_is_within, parts))


def _parts(tree: Node) -> list[Node]:
    return list(tree.parts) if isinstance(tree, Seq) else [tree]


def _is_within(node: Node) -> bool:
    match node:
        case Seq(parts) | Alt(parts):
            return all(map(_is_within, parts))
        case Repeat(part):
            return _is_within(part)
    return isinstance(node, Chars)
