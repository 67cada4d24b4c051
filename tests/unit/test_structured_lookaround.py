"""Patterns with look-around, written without it: they match the same texts, by Python's own engine."""

import random
import re
import time
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deadlines import scaled
from tests.examples import examples
from tests.grammar_walk import Walker
from vllm_lite.errors import RequestError
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.structured.compile import compile_form
from vllm_lite.structured.regexes.lookaround import automaton_of
from vllm_lite.structured.regexes.patterns import all_of, equivalents
from vllm_lite.structured.regexes.regex_tree import NotHeldError, NotReadError, outside, property_ranges, read_tree

WALKER = Walker()
LETTERS = "ab-1"


def as_python(pattern: str) -> str:
    """A pattern in Rust's syntax as one for Python, which has no braces behind \\x."""
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: f"\\U{found[1]:0>8}", pattern)


def matches(patterns: list[str], text: str) -> bool:
    return all(re.search(as_python(pattern), text) for pattern in patterns)


# ---- any pattern

ATOMS = st.sampled_from(
    ["a", "b", "-", r"\d", r"\w", ".", "[^a]", "[ab]", "^", "$", r"\b", r"\B", "(?<=a)", "(?<![b1])"]
)


def groups(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda look: f"{look[0]}{look[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    )


TEXTS = [text for length in range(4) for text in map("".join, product(LETTERS, repeat=length))]


@settings(max_examples=examples(150))
@given(st.recursive(ATOMS, groups, max_leaves=8), st.integers(0, 2**32))
def test_the_same_texts_match(pattern: str, seed: int) -> None:
    rng = random.Random(seed)
    longer = ["".join(rng.choices(LETTERS, k=rng.randrange(4, 12))) for _ in range(30)]
    try:
        found = equivalents(pattern)
    except NotHeldError as error:
        if "nothing matches" in str(error):
            assert not any(re.search(pattern, text, re.ASCII) for text in [*TEXTS[1:], *longer])
        return
    for text in [*TEXTS[r"\B" in pattern :], *longer]:  # Python 3.11 has a \B of its own in the empty text
        assert matches(found, text) == bool(re.search(pattern, text, re.ASCII)), (pattern, found, text)


@pytest.mark.parametrize("pattern", ["^(?!a)", "b$", r"\bab?\b", "(?=.*1)(?!.*-)", "(?<!a)b"])
def test_an_automaton_and_its_opposite(pattern: str) -> None:
    tree = read_tree(pattern)
    one, other = automaton_of(tree), automaton_of(tree, is_negative=True)
    for text in TEXTS:
        assert one.accepts(text) == bool(re.search(pattern, text))
        assert other.accepts(text) != one.accepts(text)


def test_several_patterns_as_one() -> None:
    pattern = as_python(all_of(["^a", "b"], ["-$", "11"]))
    for text in TEXTS:
        wanted = text.startswith("a") and "b" in text and not text.endswith("-") and "11" not in text
        assert bool(re.search(pattern, text)) == wanted


# ---- patterns that frameworks write

ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
ZOD_HOST = (
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)
ZOD_EMOJI = (
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$"
)
ZOD_IBAN = r"^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
DECIMAL_5_2 = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)$"
DECIMAL_15_4 = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,11}|(?=[\d.]{1,16}0*$)\d{0,11}\.\d{0,4}0*$)$"
DECIMAL_38_12 = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,26}|(?=[\d.]{1,39}0*$)\d{0,26}\.\d{0,12}0*$)$"
PASSWORD = r"^(?=.*[A-Z])(?=.*\d)(?!.*\s).{8,64}$"


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (ZOD_EMAIL, ["a@b.co", "first.last+tag@sub.example.com"], [".a@b.co", "a..b@c.de", "a@b", "a@b.c", "ab.co"]),
        (ZOD_DURATION, ["P3W", "P1Y2M3DT4H5M6.5S", "PT1S"], ["P", "PT", "P1W2D", "P1DT"]),
        (ZOD_HOST, ["a", "example.com.", "x-1.y.z"], ["", "-a.b", "a..b", "a-.b", ".", "x." * 127 + "y"]),
        (ZOD_EMOJI, ["😀", "👍🏽", "1\ufe0f\u20e3"], ["", "12", "a😀"]),
        (ZOD_IBAN, ["DE02120300000000202051"], ["DE01120300000000202051", "DE99120300000000202051", "DE0212"]),
        (DECIMAL, ["1", "-0.5", "+10.", ".5"], ["", "-", ".", "+.", "1e5", "1.2.3"]),
        (DECIMAL_5_2, ["999.99", "-0001.5", "12", "1.5000"], ["1000", "1.234", "1234.5", ".", ""]),
        (DECIMAL_15_4, ["1", "-00012345678901.1234000", ".5"], ["123456789012", "1.12345", ".", ""]),
        (PASSWORD, ["Passw0rd", "A1" + "x" * 62], ["password1", "PASSWORD", "Pass w0rd", "Aa1", "A1" + "x" * 63]),
        (r"^(?:(?!--).)*$", ["a-b", ""], ["a--b"]),
        (r"\bfoo\b", ["foo", "a foo."], ["food", "a_foo"]),
        (r"\A[ab]+\Z", ["ab"], ["ab ", "c"]),
        (r"^[^]$", ["x", "]"], ["", "xy"]),
        (r"^[[]\cA\0$", ["[\x01\x00"], ["["]),
    ],
)
def test_patterns_of_frameworks_are_held(pattern: str, taken: list[str], refused: list[str]) -> None:
    grammar, notes = compile_form(StructuredOutputsParams(json={"type": "string", "pattern": pattern}))
    assert notes == ()
    found = [text for text in [*taken, *refused] if WALKER.takes(grammar, _json(text))]
    assert found == taken


def _json(text: str) -> str:
    return '"' + "".join(f"\\u{ord(char):04x}" if char < " " else char for char in text) + '"'


# ---- patterns that cannot be rewritten


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (DECIMAL_38_12, "the pattern cannot be held: its look-around has too many cases"),
        (r"^(?:a(?=.{90}[ac]).{90}|[ac](?=.{89}a).{89}){1,9}$", "the pattern cannot be held: its "),
        (r"^a*(?=(?:[ab]{3}c){900}|x)(?:[abc]{1,900}x?)$", "the pattern cannot be held: its "),
        (r"^(?!(?:a{49}b{49}){99})$", "the pattern cannot be held: its parts are repeated too often"),
        (r"(?<=ab)c", "column 8: look-behind at more than one character"),
        (r"(a)(?!b)\1", r"column 11: the escape .1 cannot be held"),
        (r"(?!x", "column 5: a group is not closed"),
        ("(?!x)" + "a" * 5000, "it is too long"),
    ],
)
def test_other_patterns_are_refused_in_time(pattern: str, said: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(RequestError, match=f"the JSON schema at #: .*{said}"):
        compile_form(StructuredOutputsParams(json={"type": "string", "pattern": pattern}))
    assert time.monotonic() - began_s < scaled(5)


def test_a_format_is_held_where_its_pattern_cannot_be() -> None:
    schema = {"type": "object", "properties": {"d": {"type": "string", "format": "date", "pattern": r"(\d)(?!x)\1"}}}
    grammar, notes = compile_form(StructuredOutputsParams(json=schema))
    assert notes == ("#/properties/d: 'pattern'",)
    assert WALKER.takes(grammar, '{"d": "2024-02-29"}')
    assert not WALKER.takes(grammar, '{"d": "2023-02-29"}')


def test_a_pattern_is_held_that_contradicts_its_format() -> None:
    """zod 4.1 calls times without a zone `time`, for which RFC 3339 wants one."""
    schema = {"type": "string", "format": "time", "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d$"}
    grammar, notes = compile_form(StructuredOutputsParams(json=schema))
    assert notes == ("#: 'format'",)
    assert WALKER.takes(grammar, '"23:59"')
    assert not WALKER.takes(grammar, '"23:59:00Z"')


# ---- reading


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", ")", "a)", "*a", "a++", "(?>a)", "(?i)a", r"\k<n>", r"\1", "[b-a]", "[a", "\\", r"\p{Foo}", r"\pL"),
        *(r"\x4", "a{3,2}", r"\ud800", "a{5000}", "(" * 60 + ")" * 60, r"\q"),
    ],
)
def test_unsupported_patterns(pattern: str) -> None:
    with pytest.raises(NotReadError):
        read_tree(pattern)


def test_classes_have_no_half_pairs() -> None:
    assert outside(()) == ((0, 0xD7FF), (0xE000, 0x10FFFF))
    assert outside(outside(((5, 9),))) == ((5, 9),)
    for name in ("L", "Lu", "Script=Greek"):
        assert all(last < 0xD800 or first > 0xDFFF for first, last in property_ranges(name))
