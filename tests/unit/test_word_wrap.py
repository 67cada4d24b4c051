"""Words of a chat on a terminal: a screen shows them whole, however they arrive."""

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.tools.chat.word_wrap import WordWrap, num_columns


def screen(printed: str, width: int) -> list[str]:
    """The lines of a terminal that wraps where a line is full, as they look."""
    lines, column = [[""] * width], 0
    for char in printed:
        if char == "\b":
            column -= 1
            assert column >= 0, "a terminal does not go back to an earlier line"
        elif char == "\n":
            lines.append([""] * width)
            column = 0
        else:
            columns = num_columns(char)
            if column + columns > width:
                lines.append([""] * width)
                column = 0
            if columns:
                lines[-1][column] = char
            else:
                lines[-1][column - 1] += char
            column += columns
    return ["".join(line).rstrip() for line in lines]


def shown(text: str, width: int, size: int = 1) -> list[str]:
    wrap = WordWrap()
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    return screen("".join(wrap.feed(piece, width) for piece in pieces), width)


@given(
    st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=40), st.integers(10, 30), st.integers(1, 9)
)
def test_lines_equal_those_of_textwrap(words: list[str], width: int, size: int) -> None:
    text = " ".join(words)
    assert shown(text, width, size) == textwrap.wrap(text, width - 1)


def test_a_piece_is_shown_at_once() -> None:
    wrap = WordWrap()
    assert wrap.feed("one two t", 10) == "one two t"
    assert wrap.feed("h", 10) == "\b \nth"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two\n\nthree", ["one two", "", "three"]),
        ("12345678 \nnext", ["12345678", "next"]),
        ("123456789 \nnext", ["123456789", "next"]),  # the space fell where the line had ended already
        ("123456789 next", ["123456789", "next"]),
        ("see https://example.org/long now", ["see", "https://ex", "ample.org/", "long now"]),
        ("日本語のテキスト", ["日本語の", "テキスト"]),
        ("a e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301 b", ["a e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301", "b"]),
        ("```\none two three\n```\nfour five six", ["```", "one two th", "ree", "```", "four five", "six"]),
        ("- one two\n  three four", ["- one two", "  three", "four"]),
    ],
)
def test_lines_on_a_screen_of_ten_columns(text: str, lines: list[str]) -> None:
    for size in (1, 3, 100):
        assert shown(text, 10, size) == lines
