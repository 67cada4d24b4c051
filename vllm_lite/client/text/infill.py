"""Fill in the middle: the tokens of code models around the text before a gap and after it.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022); names: the models' own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vllm_lite.client.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Names:
    """Tokens of a family: `before` and `behind` precede the text before and after a gap, `middle` requests the gap.

    `ends`: tokens that such a model writes at the end of the gap, if the vocabulary has them. `file`: names for the
    token before each of several files. `behind_first`: the text after the gap comes first. `glued`: the tokenizer would
    put a space before that text.
    """

    before: str
    behind: str
    middle: str | None
    ends: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    behind_first: bool = False
    glued: bool = False


_FAMILIES = (
    _Names(  # Qwen2.5-Coder, CodeGemma, Granite
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
        ("<|file_sep|>", "<|file_separator|>"),
    ),
    _Names(  # StarCoder
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>"), ("<file_sep>",)
    ),
    _Names("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
    _Names("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), glued=True),  # Code Llama
    _Names("[PREFIX]", "[SUFFIX]", None, behind_first=True),  # Codestral
)
_MARK = "\n"
"""Prefix for a text whose beginning must not get a space."""


class Infill:
    """Prompts of one model for a gap in a text."""

    def __init__(self, tokenizer: Tokenizer, names: _Names) -> None:
        self._tokenizer = tokenizer
        self._names = names
        tokens = (names.before, names.behind, names.middle)
        self._before, self._behind, self._middle = (self._ids(() if name is None else (name,)) for name in tokens)
        self.ends = self._ids(names.ends)
        """Token ids that end the generated text."""
        self._file = self._ids(names.file)[:1]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Make the infill prompts of this tokenizer's model; None if its vocabulary has no tokens for them."""
        for names in _FAMILIES:
            needed = (names.before, names.behind, names.middle)
            if all(name is None or tokenizer.token_id(name) is not None for name in needed):
                return cls(tokenizer, names)
        return None

    def _ids(self, names: Sequence[str]) -> list[int]:
        return [found for name in names if (found := self._tokenizer.token_id(name)) is not None]

    def file(self, text: Sequence[int]) -> list[int]:
        """Return the token ids of another file for prompt()."""
        return [*self._file, *text, *self._line_end()]

    def prompt(
        self, before: Sequence[int], behind: str, files: Sequence[int] = (), most: int | None = None
    ) -> list[int]:
        """Return the token ids that request the text between `before`, without special tokens, and `behind`. The tokens
        of other `files` come first, without their beginning if there would be more than `most` tokens."""
        head, tail = [*self._before, *before], [*self._behind, *self._encoded(behind)]
        gap = [*(tail + head if self._names.behind_first else head + tail), *self._middle]
        special = self._special()
        if most is not None:
            room = max(0, most - len(special) - len(self._file) - len(gap))
            files = files[max(0, len(files) - room) :]
        return [*special, *files, *(self._file if files else ()), *gap]

    def _line_end(self) -> list[int]:
        return self._tokenizer.encode(_MARK, add_special_tokens=False)

    def _special(self) -> list[int]:
        """Tokens that the tokenizer puts before any text."""
        return [token for token in self._tokenizer.encode("") if token in self._tokenizer.special_ids][:1]

    def _encoded(self, text: str) -> list[int]:
        if not self._names.glued:
            return self._tokenizer.encode(text, add_special_tokens=False)
        mark = self._line_end()
        return self._tokenizer.encode(_MARK + text, add_special_tokens=False)[len(mark) :]
