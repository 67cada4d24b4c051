"""Loading, encoding and decoding; the ids are compared with transformers in tests/cpu/test_tokenizer_equality.py."""

import json
import threading
from pathlib import Path

import pytest

from tests import tokenizers_for_tests as made
from tests.fakes import DEADLINE_S
from vllm_lite.client.streams.stream import load_tokenizer
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ModelError


def test_a_folder_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(made.byte_level())
    for path in (tmp_path, file, str(tmp_path)):
        assert Tokenizer.load(path).source == str(file)


def test_the_error_for_a_missing_file_has_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read \(No such file.*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff\xfe", made.byte_level()[:500]])
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: "):
        Tokenizer.load(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    with pytest.raises(ModelError, match=r"tokenizer\.json: is the pointer of Git LFS .* run `git lfs pull`"):
        Tokenizer.load(tmp_path)


def test_a_damaged_file_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    """A model without a tokenizer is served with token ids; text to one with a damaged tokenizer would be refused."""
    assert load_tokenizer(None, str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: "):
        load_tokenizer(None, str(tmp_path))


def test_the_bundled_models_tokenizer_has_its_name() -> None:
    tokenizer = load_tokenizer("demo", "/no/such/folder")
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("One windy day")) == "One windy day"


def test_round_trip() -> None:
    tokenizer = Tokenizer(made.byte_level())
    for text in ("the cat", "naïve 🙂 猫", " two  spaces\n", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_long_text_lets_other_threads_continue() -> None:
    """Its ids equal those of a plain call of the library."""
    tokenizer = Tokenizer(made.byte_level())
    text = "the cat sat on naïve 🙂 猫 " * 20_000
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(tokenizer.encode(text)))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        thread.join(0.001)  # and takes the interpreter's lock again
        num_turns += 1
    assert num_turns > 3  # it would have the lock once before and once behind, or has others to share a core with
    assert found == [tokenizer.library.encode(text).ids]


def test_the_beginning_of_a_text() -> None:
    """It has the requested number of tokens, or a few less if a character has several."""
    tokenizer = Tokenizer(made.byte_level())
    for text in ("the cat sat on na\u00efve \N{CAT} mats", "\N{CAT}" * 9, "the cat " * 40_000):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for num_tokens in (1, 3, 7, len(ids) - 1, len(ids)):
            kept = tokenizer.beginning(text, num_tokens)
            assert text.startswith(kept)
            assert num_tokens - 4 < len(tokenizer.encode(kept, add_special_tokens=False)) <= num_tokens
    assert tokenizer.beginning(text, len(ids)) == text


def test_offsets_of_tokens_in_a_text() -> None:
    tokenizer = Tokenizer(made.byte_level())
    text = "the cat sat"
    ids = tokenizer.encode(text, add_special_tokens=False)
    places = tokenizer.offsets(text, ids)
    assert places is not None
    assert "".join(text[start:end] for start, end in places) == text
    assert tokenizer.offsets(text, ids[:-1]) == places[:-1]
    assert tokenizer.offsets(text, [ids[0], *ids[2:]]) is None
    assert tokenizer.offsets(text, ids[2:]) == places[2:]
    assert tokenizer.offsets(text, [*ids, ids[0]]) is None


def test_special_tokens() -> None:
    tokenizer = Tokenizer(made.byte_fallback())
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 0
    ids = tokenizer.encode("<s> a</s>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode([0, *tokenizer.encode("a", add_special_tokens=False), 1]) == "a"
    assert tokenizer.decode([1], skip_special_tokens=False) == "</s>"


def test_the_vocabulary() -> None:
    tokenizer = Tokenizer(made.byte_fallback())
    assert tokenizer.vocab_size == 3 + 256 + len(made.WORDS)
    assert tokenizer.token(0) == "<s>"
    assert tokenizer.token_id("▁the") == tokenizer.vocab_size - len(made.WORDS) + 1
    assert [tokenizer.token(wrong) for wrong in (-1, tokenizer.vocab_size, 2**32, 2**70)] == [None] * 4
    assert tokenizer.byte_ids() == {3 + value: value for value in range(256)}


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    """A tokenizer.json may hold a truncation to 512 tokens and a padding to the longest text."""
    data = json.loads(made.byte_level())
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    tokenizer = Tokenizer(json.dumps(data).encode())
    assert len(tokenizer.encode("x" * 5)) == 5


def test_threads_share_a_tokenizer() -> None:
    tokenizer = Tokenizer(made.byte_level())
    texts = [f"the {number} " * 50 for number in range(8)]
    expected = [tokenizer.encode(text) for text in texts]
    wrong: list[str] = []

    def work(place: int) -> None:
        for _ in range(30):
            ids = tokenizer.encode(texts[place])
            if ids != expected[place] or tokenizer.decode(ids) != texts[place]:
                wrong.append(texts[place])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not wrong
