"""Words of every pre-tokenizer of GGUF files: of a text that shows their differences, and as the families' own classes.

`pre_tokenizer_words.json` was made with llama.cpp's expressions by another library of expressions; Falcon's last steps
cut bytes, as its tokenizer.json does, so its words are spelled in bytes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers

from vllm_lite.client.text.tokenizer_formats.pre_tokenizers import UNNAMED, WORDS, Words

ROWS: dict[str, Any] = json.loads((Path(__file__).parent / "pre_tokenizer_words.json").read_text())
TEXTS = [
    ROWS["text"],
    "e\u0301 \u00e9 <a>+=|b`  12\u00bd 34\u0663\u0664",
    "x\r\n \n y",
    "   ",
    "can't WE'LL \u2018q\u2019",
    "\u1100\u1161",
]


def cut(words: Words, text: str) -> list[str]:
    return [word for word, _ in library(words).pre_tokenizer.pre_tokenize_str(text)]


def library(words: Words) -> tokenizers.Tokenizer:
    empty = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    empty["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(words.steps)}
    return tokenizers.Tokenizer.from_str(json.dumps(empty))


def in_bytes(word: str) -> str:
    ((spelled, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
    return spelled


def test_every_name_is_known() -> None:
    assert set(WORDS) == set(ROWS["names"])
    assert len(WORDS) == 91
    assert set(UNNAMED.values()) <= set(WORDS)


@pytest.mark.parametrize("name", sorted(ROWS["names"]))
def test_words_match_the_family(name: str) -> None:
    same_as, whole_words, adds_bos = ROWS["names"][name]
    words = WORDS[name]
    expected = ROWS["words"][same_as]
    if words.are_bytes and name != "falcon":
        expected = [in_bytes(word) for word in expected]
    assert cut(words, ROWS["text"]) == expected
    assert (words.whole_words, words.adds_bos) == (whole_words, adds_bos)


OWN_CLASSES = {
    "qwen2": transformers.Qwen2Tokenizer,
    "qwen35": transformers.Qwen3_5Tokenizer,
    "command-r": transformers.CohereTokenizer,
    "mpt": transformers.GPTNeoXTokenizer,
    "gpt-2": transformers.GPT2Tokenizer,
}


@pytest.mark.parametrize("name", OWN_CLASSES)
def test_words_match_the_familys_own_class(name: str) -> None:
    theirs = OWN_CLASSES[name]().backend_tokenizer
    assert (theirs.normalizer is not None) is WORDS[name].nfc
    for text in TEXTS:
        assert cut(WORDS[name], text) == [word for word, _ in theirs.pre_tokenizer.pre_tokenize_str(text)]
        if theirs.normalizer is not None:
            assert theirs.normalizer.normalize_str(text) == normalizers.NFC().normalize_str(text)


def test_tekkens_expression_is_the_one_that_mistral_publishes() -> None:
    common = pytest.importorskip("mistral_common")
    published = json.loads((Path(common.__file__).parent / "data" / "tekken_240911.json").read_text())["config"][
        "pattern"
    ]
    assert WORDS["tekken"].steps[0]["pattern"] == {"Regex": published}
