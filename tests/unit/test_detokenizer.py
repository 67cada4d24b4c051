"""Streams end with exactly the text that decoding at once gives; stop strings do not depend on how text is cut."""

import random
import time
import unicodedata
from itertools import chain, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import tokenizers_for_tests as made
from tests.examples import examples
from vllm_lite.client.text.detokenizer import BYTE_OF_LETTER, MAX_HELD_BYTES, Detokenizer, vocabulary
from vllm_lite.client.text.stop_strings import StopStrings
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ModelError

TOKENIZERS = {name: Tokenizer(make()) for name, make in made.KINDS.items()}
VOCABULARIES = {name: vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}
BYTE_FALLBACK = TOKENIZERS["byte fallback, stripped"]
BYTE_LEVEL = TOKENIZERS["byte level"]

KINDS_WITH_BYTES = ("byte fallback, stripped", "byte fallback", "byte fallback, added tokens", "metaspace with bytes")
kinds = st.sampled_from(sorted(TOKENIZERS))


def pieces_of(kind: str, token_ids: list[int], *, skip: bool = True, **options: object) -> list[str]:
    detokenizer = Detokenizer(VOCABULARIES[kind], skip_special_tokens=skip, **options)  # type: ignore[arg-type]
    return [*(detokenizer.feed([token_id]) for token_id in token_ids), detokenizer.flush()]


def fallback_ids(data: bytes) -> list[int]:
    return [BYTE_FALLBACK.token_id(f"<0x{value:02X}>") or 0 for value in data]


def level_ids(text: str) -> list[int]:
    """Ids of the tokens of single bytes, without merges."""
    alphabet = {value: letter for letter, value in BYTE_OF_LETTER.items()}
    return [BYTE_LEVEL.token_id(alphabet[value]) or 0 for value in text.encode()]


@settings(max_examples=examples(400))
@given(kinds, st.lists(st.integers(0, 400), max_size=40), st.booleans())
def test_pieces_add_up_to_the_text_decoded_at_once(kind: str, numbers: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = [number % (tokenizer.vocab_size + 2) for number in numbers]  # two ids are outside the vocabulary
    assert "".join(pieces_of(kind, token_ids, skip=skip)) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=examples(400))
@given(kinds, st.lists(st.integers(0, 400), max_size=30), st.booleans(), st.data())
def test_the_text_does_not_depend_on_the_chunks(kind: str, numbers: list[int], skip: bool, data: st.DataObject) -> None:
    """Tokens come one by one, or several at a time after drafts or a break."""
    tokenizer = TOKENIZERS[kind]
    token_ids = [number % tokenizer.vocab_size for number in numbers]
    detokenizer = Detokenizer(VOCABULARIES[kind], skip_special_tokens=skip)
    text, rest = "", token_ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        text, rest = text + detokenizer.feed(rest[:count]), rest[count:]
    assert text + detokenizer.flush() == tokenizer.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=examples(300))
@given(st.sampled_from(KINDS_WITH_BYTES), st.data())
def test_runs_of_byte_tokens(kind: str, data: st.DataObject) -> None:
    """Mostly valid UTF-8, cut and spoilt at random places, between words and special tokens."""
    some = st.one_of(
        st.text("aé▁ 猫🙂", min_size=1, max_size=4).map(lambda text: fallback_ids(text.encode())),
        st.binary(min_size=1, max_size=2).map(fallback_ids),
        st.integers(0, TOKENIZERS[kind].vocab_size - 1).map(lambda token_id: [token_id]),
    )
    token_ids = list(chain.from_iterable(data.draw(st.lists(some, max_size=8))))
    assert "".join(pieces_of(kind, token_ids)) == TOKENIZERS[kind].decode(token_ids)


@settings(max_examples=examples(400))
@given(st.text(max_size=30))
@example("👩‍👩‍👧‍👦 naïve 猫 e\u0301")
def test_no_piece_holds_half_a_character(text: str) -> None:
    for kind, token_ids in (
        ("byte level", level_ids(text)),
        ("byte fallback", fallback_ids(text.encode())),
    ):
        pieces = pieces_of(kind, token_ids)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_returned_with_its_last_byte() -> None:
    assert pieces_of("byte level", level_ids("é🙂!")) == ["", "é", "", "", "", "🙂", "!", ""]


def test_a_run_of_byte_tokens_is_returned_with_its_end() -> None:
    the = BYTE_FALLBACK.token_id("▁the") or 0
    assert pieces_of("byte fallback, stripped", [the, *fallback_ids("é".encode()), the]) == ["the", "", "", "é the", ""]


def test_a_run_that_is_not_utf8_waits_for_nothing() -> None:
    assert pieces_of("byte fallback", fallback_ids(b"a\xffb\xc3\xa9")) == ["", "\ufffd" * 2, *["\ufffd"] * 3, ""]


def test_a_long_run_of_byte_tokens_streams() -> None:
    text = "猫" * 100
    pieces = pieces_of("byte fallback", fallback_ids(text.encode()))
    assert "".join(pieces) == text
    waited = next(place for place, piece in enumerate(pieces) if piece)
    assert waited <= MAX_HELD_BYTES + 2
    assert set(pieces[waited + 1 : -1]) == {"", "猫"}


def test_skipped_tokens_do_not_end_the_beginning() -> None:
    """The space of the first word goes, though a special token came before it."""
    bos, the = BYTE_FALLBACK.token_id("<s>") or 0, BYTE_FALLBACK.token_id("▁the") or 0
    assert pieces_of("byte fallback, stripped", [bos, the, the]) == ["", "the", " the", ""]
    assert pieces_of("byte fallback, stripped", [bos, the], skip=False) == ["<s>", " the", ""]


def test_the_beginning_lasts_until_there_is_text() -> None:
    """With two spaces to strip, the one of the second word still belongs to the beginning."""
    space, the = BYTE_FALLBACK.token_id("▁") or 0, BYTE_FALLBACK.token_id("▁the") or 0
    assert pieces_of("byte fallback, two stripped", [space, the, the]) == ["", "the", " the", ""]


def test_added_tokens_stand_for_themselves() -> None:
    for text in ("two words", "日本", "<|end|>"):
        token_ids = BYTE_LEVEL.encode(f"a{text}b")
        assert len(token_ids) == 3
        assert "".join(pieces_of("byte level", token_ids, skip=False)) == f"a{text}b"


def test_a_decoder_that_looks_at_the_last_token_is_refused() -> None:
    with pytest.raises(ModelError, match="BPEDecoder"):
        vocabulary(Tokenizer(made.suffixes()))


def test_time_per_token_does_not_grow() -> None:
    """Amortised O(1): the last thousands of 30,000 tokens take as long as the first ones, within noise."""
    generator = random.Random(1)
    for kind, tokenizer in TOKENIZERS.items():
        detokenizer = Detokenizer(VOCABULARIES[kind], stop=["never seen", "nor this"])
        times = []
        for _ in range(30):
            token_ids = [generator.randrange(tokenizer.vocab_size) for _ in range(1000)]
            began = time.thread_time()
            detokenizer.feed(token_ids)
            times.append(time.thread_time() - began)
        assert min(times[-5:]) < 5 * min(times[1:6]), kind


def test_spaces_between_special_tokens() -> None:
    """Only some decoders make any; those before and behind other tokens stay."""
    kind = next(name for name, make in made.KINDS.items() if make is made.word_piece)
    tokenizer = TOKENIZERS[kind]
    tokens = [tokenizer.token_id(name) or 0 for name in ("the", "<s>", "</s>", "cat", "</s>", "##s", "<s>", "<s>")]
    assert "".join(pieces_of(kind, tokens, skip=False)) == "the <s> </s> cat </s>s <s> <s>"
    joined = pieces_of(kind, tokens, skip=False, spaces_between_special_tokens=False)
    assert "".join(joined) == "the <s></s> cat </s>s <s><s>"
    for skip in (True, False):
        every = pieces_of("byte level", [0, 1, 5, 1, 0], skip=skip)
        assert pieces_of("byte level", [0, 1, 5, 1, 0], skip=skip, spaces_between_special_tokens=False) == every


# ---- stop strings


def first_end(text: str, stops: list[str], begin: int = 0) -> tuple[int, str] | None:
    """Find the first stop string that ends after `begin`, and its end: the definition, without an automaton."""
    for end in range(begin + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


few_letters = st.text("ab", min_size=1, max_size=5)


@settings(max_examples=examples(400))
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(few_letters, min_size=1, max_size=4), st.booleans())
def test_stop_strings_follow_the_definition(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    found = first_end(text, stops)
    finder = StopStrings(stops, include)
    seen = ""
    for piece in pieces:
        seen += finder.feed(piece)
        if finder.found:
            break
    if found is None:
        assert finder.found is None
        assert seen + finder.flush() == text
    else:
        end, stop = found
        assert finder.found == stop
        assert seen == (text[:end] if include else text[: end - len(stop)])


def test_a_stop_string_that_begins_again_inside_itself() -> None:
    """All stop strings of up to seven letters, each after each of its own prefixes: the partial match must not hide the
    full one."""
    for letters in chain.from_iterable(product("abc", repeat=size) for size in range(1, 8)):
        stop = "".join(letters)
        for place in range(len(stop)):
            text, finder = stop[:place] + stop, StopStrings([stop])
            assert finder.feed(text) == text[: text.index(stop)]
            assert finder.found == stop


@settings(max_examples=examples(200))
@given(st.text("abc", max_size=20), st.lists(few_letters, min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    finder = StopStrings(stops)
    seen = finder.feed(text)
    if finder.found is None:
        proper = {stop[:length] for stop in stops for length in range(len(stop))}
        longest = max(len(prefix) for prefix in proper if text.endswith(prefix))
        assert len(seen) == len(text) - longest


def test_text_held_back_is_returned_at_the_end() -> None:
    pieces = pieces_of("byte level", level_ids("one two thr"), stop=["three"])
    assert pieces[-2:] == ["", "thr"]
    assert "".join(pieces) == "one two thr"


def test_a_stop_string_across_tokens_and_inside_one() -> None:
    the = BYTE_LEVEL.token_id("the") or 0
    for stop, token_ids in (("cat", level_ids("a cat sat")), ("h", [*level_ids("a "), the, the])):
        detokenizer = Detokenizer(VOCABULARIES["byte level"], stop=[stop])
        text = detokenizer.feed(token_ids)
        assert detokenizer.stopped == stop
        assert text == ("a " if stop == "cat" else "a t")
        assert detokenizer.num_tokens == (5 if stop == "cat" else 3)
        assert detokenizer.flush() == ""


def test_a_stop_string_is_found_in_text_released_at_the_end() -> None:
    detokenizer = Detokenizer(VOCABULARIES["byte fallback"], stop=["é"])
    assert detokenizer.feed(fallback_ids("aé".encode())) == ""
    assert detokenizer.flush() == "a"
    assert detokenizer.stopped == "é"


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (7, "ababab"), (8, "abababab")]
)
def test_min_tokens(min_tokens: int, text: str) -> None:
    """Tokens a b a b ...: the stop string "ab" counts if its last token is not among the first `min_tokens`."""
    detokenizer = Detokenizer(VOCABULARIES["byte level"], stop=["ab"], min_tokens=min_tokens)
    assert detokenizer.feed(level_ids("ab" * 4)) + detokenizer.flush() == text
    assert (detokenizer.stopped == "ab") == (min_tokens < 8)


def test_a_stop_string_may_begin_in_one_that_did_not_count() -> None:
    detokenizer = Detokenizer(VOCABULARIES["byte level"], stop=["aa"], min_tokens=2)
    assert detokenizer.feed(level_ids("aaab")) == "a"
    assert detokenizer.num_tokens == 3


@settings(max_examples=examples(300))
@given(st.text("ab", max_size=12), st.lists(few_letters, min_size=1, max_size=3), st.integers(0, 13))
def test_min_tokens_follow_the_definition(text: str, stops: list[str], min_tokens: int) -> None:
    detokenizer = Detokenizer(VOCABULARIES["byte level"], stop=stops, min_tokens=min_tokens)
    seen = detokenizer.feed(level_ids(text)) + detokenizer.flush()
    found = first_end(text, stops, begin=min_tokens)
    assert detokenizer.stopped == (found[1] if found else None)
    assert seen == (text[: found[0] - len(found[1])] if found else text)


def test_the_alphabet_covers_every_byte_once() -> None:
    assert sorted(BYTE_OF_LETTER.values()) == list(range(256))
    assert not any(unicodedata.category(letter) in ("Cc", "Zs") for letter in BYTE_OF_LETTER)
