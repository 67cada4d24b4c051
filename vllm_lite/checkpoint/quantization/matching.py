"""Which of many patterns fits the name of a matrix. Checkpoints list thousands of names, one for each expert's."""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from vllm_lite.checkpoint.tensor_names import canonical

REGEX, PART = "re:", "part:"
"""What a pattern begins with that is a regular expression, or a part of names, and no name."""


def first_fit(patterns: tuple[str, ...], name: str) -> int | None:
    """The index of the first pattern that fits `name`: a name fits those that it is, or is the first or the last part
    of, between dots."""
    return _matcher(patterns).first(name) if patterns else None


class _Matcher:
    """Names are looked up, and expressions compiled once: `re` forgets them from 512 on."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.named: dict[str, int] = {}
        self.others: list[tuple[int, Callable[[str], bool]]] = []
        for index, pattern in enumerate(patterns):
            if pattern.startswith(REGEX):
                self.others.append((index, _expression(pattern.removeprefix(REGEX))))
            elif pattern.startswith(PART):
                self.others.append((index, _part(pattern.removeprefix(PART))))
            else:
                self.named.setdefault(canonical(f"{pattern}.").removesuffix("."), index)

    def first(self, name: str) -> int | None:
        found = min((self.named[part] for part in _ends(name) if part in self.named), default=None)
        for index, fits in self.others:
            if found is not None and index > found:
                break
            if fits(name):
                return index
        return found


_matcher = lru_cache(maxsize=8)(_Matcher)


def _expression(text: str) -> Callable[[str], bool]:
    compiled = re.compile(text)
    return lambda name: compiled.match(name) is not None


def _part(text: str) -> Callable[[str], bool]:
    return lambda name: text in name


def _ends(name: str) -> Iterator[str]:
    """The first parts of the name, all of it, and its last parts."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
        yield ".".join(parts[-count:])
