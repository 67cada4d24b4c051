"""Checks grammars under the limits of the workers, and remembers texts that have passed."""

import re
import threading
from collections import OrderedDict
from functools import cache
from hashlib import blake2b

from llguidance import LLMatcher, LLTokenizer

from vllm_lite.errors import RequestError
from vllm_lite.protocol.structured import MAX_GRAMMAR_CHARS
from vllm_lite.structured.findings import refusal
from vllm_lite.structured.lark import regex
from vllm_lite.structured.limits import MAX_REPEATS, parser_limits
from vllm_lite.structured.place import place_in_lark, place_in_schema, plain
from vllm_lite.structured.regexes.patterns import too_many_repeats
from vllm_lite.structured.schemas.schema import Schema, schema_text

MAX_PROBED_CHARS = 32_768
"""Maximum size of a grammar that is also executed; making a matcher takes two to three times as long as a check."""


_REGEXES = re.compile(r"/((?:\\.|[^/\\\n])+)/")
_IN_REGEX = re.compile(r'^at \d+\(\d+\): invalid regex ".*" \(in regex\): ')


def fault_of(grammar: str) -> str | None:
    """The error of a grammar in llguidance's words; None if it is valid."""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=parser_limits(grammar))
    if is_wrong:
        return messages[0]
    if messages or len(grammar) > MAX_PROBED_CHARS:  # messages: it has tokens, which only workers know
        return None
    return _fault_at_start(grammar)


@cache
def _bytes_only() -> LLTokenizer:
    """A vocabulary of the 256 bytes, constructed in 6 ms."""
    return LLTokenizer("byte")


def _fault_at_start(grammar: str) -> str | None:
    """Compute the first mask: a rule such as `a: a` is valid and matches nothing."""
    matcher = LLMatcher(_bytes_only(), grammar, log_level=0, limits=parser_limits(grammar))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return None
    return "nothing matches it" if "NoExtension" in matcher.get_error() else matcher.get_error()


def check_schema(prepared: Schema) -> str:
    """Check a prepared schema, and return its grammar. Raises RequestError, which names the place."""
    text = schema_text(prepared)
    check_size(text)
    grammar = LLMatcher.grammar_from_json_schema(text)
    if not passed.has(grammar):
        message = fault_of(grammar)
        if message is not None:
            raise refusal(place_in_schema(prepared, message, _fault_of_schema), plain(message))
        passed.add(grammar)
    return grammar


def check_lark(grammar: str, what: str = "the grammar") -> str:
    """Check a Lark grammar and return it. Raises RequestError, which names line and column."""
    check_size(grammar)
    if not passed.has(grammar):
        _check_repeats(grammar, what)
        message = fault_of(grammar)
        if message is not None:
            raise RequestError(f"{what} is not valid: {place_in_lark(message)}")
        passed.add(grammar)
    return grammar


def check_regex(pattern: str, what: str) -> None:
    """Check a regular expression. Raises RequestError, which names the column."""
    check_text(pattern, what)
    if (column := too_many_repeats(pattern)) is not None:
        raise RequestError(f"{what} repeats a part more than {MAX_REPEATS} times, with the count at column {column}")
    if len(re.findall(r"\\*$", pattern)[0]) % 2:
        raise RequestError(f"{what} is not valid: at column {len(pattern)} a backslash is followed by nothing")
    grammar = f"%llguidance {{}}\nstart: {regex(pattern)}\n"
    if not passed.has(grammar):
        message = fault_of(grammar)
        if message is not None:
            raise RequestError(f"{what} is not valid: {plain(_IN_REGEX.sub('', message))}")
        passed.add(grammar)


def check_text(text: str, what: str) -> None:
    """Raise RequestError for a text that is too long, or that is not valid Unicode."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"{what} has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} has half a surrogate pair at character {error.start}") from error


def _check_repeats(grammar: str, what: str) -> None:
    """Raise RequestError for too large counts in the regular expressions of a grammar."""
    for found in _REGEXES.finditer(grammar):
        if too_many_repeats(found[1]) is not None:
            line = grammar.count("\n", 0, found.start()) + 1
            raise RequestError(f"{what} is not valid: line {line} repeats a part more than {MAX_REPEATS} times")


def _fault_of_schema(prepared: Schema) -> str | None:
    return fault_of(LLMatcher.grammar_from_json_schema(schema_text(prepared)))


def check_size(grammar: str) -> None:
    """Raise RequestError for a grammar that is too large to send."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken")


class Passed:
    """Digests of texts that have passed, in an LRU cache. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def has(self, text: str) -> bool:
        digest = _digest(text)
        with self._lock:
            if digest not in self._digests:
                return False
            self._digests.move_to_end(digest)
            return True

    def add(self, text: str) -> None:
        with self._lock:
            self._digests[_digest(text)] = None
            while len(self._digests) > self._most:
                self._digests.popitem(last=False)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


passed = Passed(4096)
"""Shared by all requests of a process. An entry takes about 150 bytes, whatever the size of its text."""
