"""Texts that are longer than their model takes: split into windows, whose results are joined."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from vllm_lite.client.prompt import Prompt
from vllm_lite.errors import RequestError


class TextWindow(NamedTuple):
    """Tokens [start, end) of a text. Results are used for [first, last); the other tokens are their context."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TextPart:
    """A window's place in its text."""

    whole: Prompt
    """The whole text."""
    rows: slice
    """Tokens of the window whose results are used."""
    is_last: bool


def cut(num_tokens: int, room: int, overlap: int) -> list[TextWindow]:
    """Make windows of at most `room` tokens, each beginning `overlap` tokens before the end of the previous one; each
    window's results are used for the nearer half of the overlap."""
    starts = range(0, max(num_tokens - overlap, 1), room - overlap)
    firsts = [start + overlap // 2 if start else 0 for start in starts]
    lasts = [*firsts[1:], num_tokens]
    return [
        TextWindow(start, min(start + room, num_tokens), first, last)
        for start, first, last in zip(starts, firsts, lasts, strict=True)
    ]


def windows_of(prompt: Prompt, added: tuple[int, int], longest: int, overlap: int) -> Iterator[tuple[Prompt, TextPart]]:
    """Split a prompt into windows of at most `longest` tokens. `added`: numbers of special tokens at its beginning and
    end, which each window gets, too. Raises RequestError if no other tokens would fit."""
    ids, (num_before, num_behind) = prompt.token_ids, added
    before, behind = ids[:num_before], ids[len(ids) - num_behind :]
    own, room = ids[num_before : len(ids) - num_behind], longest - num_before - num_behind
    if room <= overlap:
        raise RequestError(
            f"windows of {longest} tokens, {num_before + num_behind} of them special, must have more than the "
            f"{overlap} of their overlap; give a smaller stride"
        )
    for window in cut(len(own), room, overlap):
        first = num_before + window.first - window.start if window.start else 0
        is_last = window.last == len(own)
        last = num_before + window.last - window.start + (num_behind if is_last else 0)
        part = TextPart(prompt, slice(first, last), is_last)
        yield Prompt(None, [*before, *own[window.start : window.end], *behind]), part


def joined_rows(windows: Sequence[tuple[bytes, TextPart]], num_tokens: Sequence[int]) -> bytes:
    """Join the results of windows, of `num_tokens` tokens each, to those of the whole text's tokens."""
    found = bytearray()
    for (data, part), count in zip(windows, num_tokens, strict=True):
        size = len(data) // count
        found += data[part.rows.start * size : part.rows.stop * size]
    return bytes(found)


def mean_vector(vectors: Sequence[bytes], weights: Sequence[int], *, normalizes: bool) -> bytes:
    """Weighted mean of float32 vectors; `normalizes`: scaled to norm 1."""
    total = sum(weights)
    mean = [0.0] * (len(vectors[0]) // 4)
    for data, weight in zip(vectors, weights, strict=True):
        share = weight / total
        mean = [so_far + share * number for so_far, number in zip(mean, array("f", data), strict=True)]
    if normalizes:
        length = sqrt(sum(number * number for number in mean))
        mean = [number / length for number in mean] if length else mean
    return array("f", mean).tobytes()
