"""Frequent words: the part of a large vocabulary with most of a text's tokens, by its tokenizer.json.

Tokens of byte pair encoding are numbered in the order of their merges, which is that of their frequency in the
tokenizer's training data. The others are special tokens, bytes and symbols; if these are many, they are ordered as
well. No torch.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from vllm_lite.runtime.untrusted_files import MAX_TOKENIZER_BYTES, read_bounded

TOKENIZER_FILE = "tokenizer.json"
LARGE = 1 << 16
"""Minimum vocabulary size for which the division is worthwhile."""
MERGED, SYMBOLS = 24 << 10, 8 << 10
"""Maximum number of frequent tokens of each kind."""
BLOCK = 256
"""Granularity of the division, in token ids."""


class _Model(msgspec.Struct):
    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]


class _File(msgspec.Struct):
    model: _Model


def frequent_words(folder: str | Path, vocab_size: int, others: Collection[int] = ()) -> tuple[range, ...]:
    """Ascending ids of frequent tokens and of `others`, in whole blocks. Empty, meaning all, for a small vocabulary or
    a tokenizer without the needed data."""
    if vocab_size < LARGE:
        return ()
    try:
        raw = read_bounded(Path(folder) / TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
        model = msgspec.json.decode(raw, type=_File).model
    except (OSError, ValueError, msgspec.MsgspecError):  # not BPE, or a damaged file, which its own reader reports
        return ()
    if not model.merges:
        return ()
    merged = {pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair) for pair in model.merges}
    made = sorted(number for token, number in model.vocab.items() if token in merged)
    symbols = sorted(number for token, number in model.vocab.items() if token not in merged)
    chosen = {*made[:MERGED], *symbols[:SYMBOLS], *others}
    words = _in_blocks((number for number in chosen if 0 <= number < vocab_size), vocab_size)
    return words if 2 * sum(map(len, words)) <= vocab_size else ()


def _in_blocks(numbers: Iterable[int], vocab_size: int) -> tuple[range, ...]:
    ranges: list[range] = []
    for block in sorted({number // BLOCK for number in numbers}):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, vocab_size)
        if ranges and ranges[-1].stop == start:
            ranges[-1] = range(ranges[-1].start, stop)
        else:
            ranges.append(range(start, stop))
    return tuple(ranges)


def rest_of(words: Iterable[range], vocab_size: int) -> tuple[range, ...]:
    """The ids outside of `words`, which must ascend."""
    found, start = [], 0
    for each in (*words, range(vocab_size, vocab_size)):
        if each.start > start:
            found.append(range(start, each.start))
        start = each.stop
    return tuple(found)
