"""Frequent words of a vocabulary, by its tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.checkpoint import frequent_words as module
from vllm_lite.checkpoint.frequent_words import frequent_words, rest_of


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LARGE", 64), ("MERGED", 20), ("SYMBOLS", 8), ("BLOCK", 4)):
        monkeypatch.setattr(module, name, value)


def write(folder: Path, model: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"} | model}))
    return folder


SYMBOLS = [chr(ord("a") + number) for number in range(12)]
MERGES = [(first, second) for first in SYMBOLS for second in SYMBOLS][:100]


def vocabulary(first_symbol: int) -> dict[str, int]:
    """Twelve symbols at `first_symbol`, and 100 merged tokens in the order of their merges in all other places."""
    places = [number for number in range(112) if not first_symbol <= number < first_symbol + 12]
    own = {symbol: first_symbol + number for number, symbol in enumerate(SYMBOLS)}
    return own | {"".join(pair): place for pair, place in zip(MERGES, places, strict=True)}


@pytest.mark.parametrize("as_text", [False, True], ids=["pairs", "texts"])
def test_early_merges_symbols_and_named_tokens_are_frequent(tmp_path: Path, as_text: bool) -> None:
    merges: list[Any] = [" ".join(pair) for pair in MERGES] if as_text else [list(pair) for pair in MERGES]
    folder = write(tmp_path, {"vocab": vocabulary(80), "merges": merges})
    assert frequent_words(folder, 112, (101, 5)) == (range(20), range(80, 88), range(100, 104))
    folder = write(tmp_path, {"vocab": vocabulary(0), "merges": merges})
    assert frequent_words(folder, 112) == (range(8), range(12, 32))


def test_the_last_block_ends_with_the_vocabulary(tmp_path: Path) -> None:
    folder = write(tmp_path, {"vocab": vocabulary(80), "merges": MERGES})
    assert frequent_words(folder, 110, (109, 300)) == (range(20), range(80, 88), range(108, 110))


@pytest.mark.parametrize(
    "model",
    [{"vocab": [["a", -1.0]], "type": "Unigram"}, {"vocab": vocabulary(0), "merges": []}, {"vocab": {"a": "b"}}],
    ids=["unigram", "no merges", "damaged"],
)
def test_without_known_frequencies_all_words_are_used(tmp_path: Path, model: dict[str, Any]) -> None:
    assert frequent_words(write(tmp_path, model), 112) == ()


def test_small_vocabularies_and_missing_files(tmp_path: Path) -> None:
    assert frequent_words(tmp_path, 112) == ()
    write(tmp_path, {"vocab": vocabulary(80), "merges": MERGES})
    assert frequent_words(tmp_path, 112)
    assert frequent_words(tmp_path, 63) == ()
    assert frequent_words(tmp_path, 112, range(0, 112, 4)) == (), "frequent words that are most of all save nothing"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.booleans())
def test_word_pieces_and_their_rest_cover_the_vocabulary(sizes: list[int], starts: bool) -> None:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    pieces = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    words = pieces[0 if starts else 1 :: 2]
    rest = rest_of(words, ends[-1])
    assert sorted(number for piece in (*words, *rest) for number in piece) == list(range(ends[-1]))
