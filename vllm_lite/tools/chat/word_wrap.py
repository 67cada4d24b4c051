"""Ends lines between words, while the words are still being written."""

import unicodedata


class WordWrap:
    """Terminal output for a text that arrives in pieces.

    A piece is shown at once, its last word as well, which may go on; a word that becomes too long for its line is
    taken back and begins the next one. One that fills a whole line stays whole for who copies it, like everything
    between two lines that begin with ```.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""
        self._word_width = 0
        self._broken = False
        """A line has just ended that did not end in the text: a line end of the text changes nothing more."""
        self._verbatim = False

    def feed(self, text: str, width: int) -> str:
        """Return what to print for `text` where lines have `width` columns."""
        return "".join([self._char(char, width) for char in text])

    def _char(self, char: str, width: int) -> str:
        if char == "\n":
            return self._end_line()
        if char in " \t":
            return self._space(char, width)
        self._broken = False
        columns = num_columns(char)
        if self._column == self._word_width and self._word == "``" and char == "`":
            self._verbatim = not self._verbatim
        back = ""
        is_over = self._column + columns >= width and not self._verbatim
        if is_over and self._word_width < self._column:
            back = "\b" * self._word_width + " " * self._word_width + "\n" + self._word
            self._column = self._word_width
        self._column += columns
        self._word += char
        self._word_width += columns
        if self._column > width:  # the terminal has begun a line of its own
            self._column = self._word_width = columns
        if columns == 2:  # lines of Chinese and Japanese end anywhere
            self._word, self._word_width = "", 0
        return back + char

    def _end_line(self) -> str:
        is_said, self._broken = self._broken, False
        self._column = self._word_width = 0
        self._word = ""
        return "" if is_said else "\n"

    def _space(self, char: str, width: int) -> str:
        self._word, self._word_width = "", 0
        if self._broken:
            return ""
        self._column = self._column + 1 if char == " " else (self._column // 8 + 1) * 8
        if self._column < width or self._verbatim:
            return char
        self._column, self._broken = 0, True
        return "\n"


def num_columns(char: str) -> int:
    """Number of columns of a character in a terminal."""
    if char.isascii():
        return 1
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
