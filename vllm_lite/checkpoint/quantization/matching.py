"""first_fit(): finds the pattern that matches a matrix's name. Checkpoints list thousands of names, one per expert
matrix."""

import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeVar

import regex

from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.errors import ModelError

T = TypeVar("T")

REGEX, PART = "re:", "part:"
"""Prefixes of patterns that are regular expressions, or substrings, instead of names."""
MAX_EXPRESSIONS = 4096
MATCHING_S, MATCHING_A_NAME_S = 1.0, 50e-6
"""CPU time of a file's untrusted expressions, for all names, and more for each name."""

Fits = Callable[[str, float], bool]
"""Tests a name; stops when the thread's CPU time, in seconds, reaches the second argument."""


def first_fit(patterns: tuple[str, ...], name: str) -> int | None:
    """Index of the first pattern that matches `name`. A name pattern matches a name whose first or last dotted parts
    are equal to it. Raises ModelError for too many expressions, or if they exceed their time."""
    return _matcher(patterns).first(name) if patterns else None


class _Matcher:
    """Looks names up in a dict, and keeps expressions compiled: `regex` caches only some hundred."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.named: dict[str, int] = {}
        self.others: list[tuple[int, Fits]] = []
        self._left_s = MATCHING_S
        self._timed(lambda until_s: self._read(patterns, until_s))

    def first(self, name: str) -> int | None:
        found = min((self.named[part] for part in _ends(name) if part in self.named), default=None)
        if not self.others:
            return found
        self._left_s += MATCHING_A_NAME_S
        return self._timed(lambda until_s: self._first_of_others(name, found, until_s))

    def _read(self, patterns: tuple[str, ...], until_s: float) -> None:
        for index, pattern in enumerate(patterns):
            if pattern.startswith(REGEX):
                self.others.append((index, _expression(pattern.removeprefix(REGEX))))
                if len(self.others) > MAX_EXPRESSIONS or time.thread_time() > until_s:
                    raise TimeoutError
            elif pattern.startswith(PART):
                self.others.append((index, _part(pattern.removeprefix(PART))))
            else:
                self.named.setdefault(canonical(f"{pattern}.").removesuffix("."), index)

    def _first_of_others(self, name: str, found: int | None, until_s: float) -> int | None:
        for index, fits in self.others:
            if found is not None and index > found:
                break
            if fits(name, until_s):
                return index
        return found

    def _timed(self, work: Callable[[float], T]) -> T:
        begin_s = time.thread_time()
        try:
            return work(begin_s + self._left_s)
        except TimeoutError:
            raise ModelError(
                f"quantization_config: the expressions for the names of layers are more than {MAX_EXPRESSIONS}, or "
                f"take over {MATCHING_S:g} s to compile and match"
            ) from None
        finally:
            self._left_s -= time.thread_time() - begin_s


_matcher = lru_cache(maxsize=8)(_Matcher)


def _expression(text: str) -> Fits:
    compiled = regex.compile(text)

    def fits(name: str, until_s: float) -> bool:
        return compiled.match(name, timeout=max(1e-3, until_s - time.thread_time())) is not None

    return fits


def _part(text: str) -> Fits:
    return lambda name, _: text in name


def _ends(name: str) -> Iterator[str]:
    """Yield all prefixes and suffixes of the name's dotted parts."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
        yield ".".join(parts[-count:])


# ---- Patterns of a quantization_config for names of layers. The file is untrusted


MAX_EXPRESSION = 400
"""Maximum characters of an expression. The time for all of a file's expressions is bounded during matching."""
_NAME = re.compile(r"[\w.-]+")


def is_name(text: str) -> bool:
    """Whether `text` is a name, not an expression."""
    return _NAME.fullmatch(text) is not None


def module_pattern(key: str, name: str) -> str:
    """The pattern for the module `name` and all below it, for QuantizationSpec.dense: "gate" matches "mlp.gate" but not
    "gate_proj". Raises ModelError if it is not a name; `key` is its key in quantization_config."""
    if not is_name(name):
        raise ModelError(f"quantization_config {key}: {name!r} is not the name of a module")
    return name


def check_expression(key: str, expression: str) -> None:
    """Raise ModelError for an invalid or too long expression. `key` is its key in quantization_config."""
    if len(expression) > MAX_EXPRESSION:
        raise ModelError(
            f"quantization_config.{key}: {expression[:MAX_EXPRESSION]!r}... has {len(expression)} characters; at most "
            f"{MAX_EXPRESSION} are supported in an expression"
        )
    try:
        regex.compile(expression)
    except regex.error as error:
        raise ModelError(f"quantization_config.{key}: {expression!r} is not a regular expression ({error})") from error
