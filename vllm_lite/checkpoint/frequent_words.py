"""Frequent words: the part of a large vocabulary that most tokens of a text are from, by its tokenizer.json.

Tokens that were merged of others (byte pair encoding) have their numbers in the order in which they were merged, which
is that of how often they stood in what the tokenizer was trained on. The others are special tokens, bytes, and symbols,
which where there are many of them have an order, too. No torch.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from vllm_lite.runtime.untrusted_files import MAX_TOKENIZER_BYTES, read_bounded

TOKENIZER_FILE = "tokenizer.json"
LARGE = 1 << 16
"""Tokens of a vocabulary that is worth dividing."""
MERGED, SYMBOLS = 24 << 10, 8 << 10
"""The most tokens of each kind that count as frequent."""
BLOCK = 256
"""Numbers of tokens that are taken together, or not at all."""


class _Model(msgspec.Struct):
    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]


class _File(msgspec.Struct):
    model: _Model


def frequent_words(folder: str | Path, vocab_size: int, others: Collection[int] = ()) -> tuple[range, ...]:
    """The numbers of frequent tokens and of `others`, ascending, in blocks. Empty where the vocabulary is small, or its
    tokenizer does not say: then all are."""
    if vocab_size < LARGE:
        return ()
    try:
        raw = read_bounded(Path(folder) / TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
        model = msgspec.json.decode(raw, type=_File).model
    except (OSError, ValueError, msgspec.MsgspecError):  # no BPE, or a file that its own reader reports
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
    """The numbers between those of `words`, which ascend."""
    found, start = [], 0
    for each in (*words, range(vocab_size, vocab_size)):
        if each.start > start:
            found.append(range(start, each.start))
        start = each.stop
    return tuple(found)
