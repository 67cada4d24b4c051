"""WordWrap: wraps lines between words, while the text is still arriving."""

import unicodedata


class WordWrap:
    """Terminal output for a text that arrives in pieces.

    A piece is shown at once, including its last word, which may be incomplete; a word that becomes too long for its
    line is erased and moved to the next. A word longer than a line is not broken, so that it can be copied; neither is
    text between two lines that begin with ```.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""
        self._word_width = 0
        self._broken = False
        """Whether a line was just ended by wrapping: a line end of the text is then dropped."""
        self._verbatim = False

    def feed(self, text: str, width: int) -> str:
        """Return the output for `text`, with lines of `width` columns."""
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
        if self._column > width:  # the terminal itself has wrapped the line
            self._column = self._word_width = columns
        if columns == 2:  # Chinese and Japanese may be wrapped anywhere
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
