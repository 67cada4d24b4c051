"""WordPiece, unigram models and BPE of characters in GGUF files, against the libraries that they come from."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from tests.unit.test_gguf_tokenizer import TEXTS, bytes_file, file_with, pieces_file
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.client.text.tokenizer_formats import conversion_process
from vllm_lite.client.text.tokenizer_formats.gguf_tokenizer import GgufTokenizer
from vllm_lite.client.text.tokenizer_formats.pre_tokenizers import UNNAMED, WORDS
from vllm_lite.errors import ModelError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(file: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(GgufTokenizer(file).make()))


# ---- WordPiece

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]"]
WORD_PIECES = [*SPECIAL, "hello", "world", "##s", "na", "##ive", "##\u00efve", "Hello", "\u65e5", "\u672c", "##\u672c"]
WORD_PIECES += [*"!,.abcdefgh[]", *(f"##{letter}" for letter in "abcdefgh!")]
SENTENCES = [
    "Hello, worlds!",
    "hello [MASK] na\u00efve",
    "\u65e5\u672c abc",
    "xyz hello",
    "a[b] [unused0] [CLS]",
    "\u0000a\tb  ",
    "",
]
WORD_PIECE_KEYS: dict[str, Any] = {
    "ggml.model": "bert",
    "ggml.bos_token_id": None,
    "ggml.eos_token_id": None,
    "ggml.unknown_token_id": 1,
    "ggml.padding_token_id": 0,
    "ggml.cls_token_id": 2,
    "ggml.seperator_token_id": 3,
    "ggml.mask_token_id": 4,
}


def in_file(piece: str) -> str:
    """A piece as converters write it: SentencePiece's space where it begins a word, nothing where it does not."""
    if piece.startswith("[") and piece.endswith("]"):
        return piece
    return piece.removeprefix("##") if piece.startswith("##") else f"\u2581{piece}"


def word_piece_file(path: Path, **others: Any) -> Path:
    types = [3 if piece in SPECIAL[:5] else 1 for piece in WORD_PIECES]
    return file_with(path, [in_file(piece) for piece in WORD_PIECES], types, **(WORD_PIECE_KEYS | others))


def bert(**options: Any) -> tokenizers.Tokenizer:
    vocab = {piece: number for number, piece in enumerate(WORD_PIECES)}
    return transformers.BertTokenizer(vocab=vocab, **options).backend_tokenizer


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, {"do_lower_case": True}),
        ({"ggml.normalizer.lowercase": False}, {"do_lower_case": False, "strip_accents": False}),
        ({"ggml.normalizer.strip_accents": False}, {"do_lower_case": True, "strip_accents": False}),
    ],
    ids=["uncased", "cased", "accents"],
)
def test_word_pieces_match_bert(tmp_path: Path, keys: dict[str, Any], options: dict[str, Any]) -> None:
    ours, theirs = made(word_piece_file(tmp_path / "m.gguf", **keys)), bert(**options)
    for text in SENTENCES:
        found, expected = ours.encode(text), theirs.encode(text)
        assert found.ids == expected.ids, text
        assert ours.decode(found.ids) == theirs.decode(expected.ids)
    pair, expected = ours.encode("hello", "world"), theirs.encode("hello", "world")
    assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids)
    assert len({*made(word_piece_file(tmp_path / "n.gguf")).encode("na\u00efve").ids}) == 4, "the accent is dropped"


def test_the_ends_of_word_pieces_have_other_names_in_other_files(tmp_path: Path) -> None:
    """Newer converters call the first token bos; old ones name none, and the vocabulary has both."""
    without = {"ggml.cls_token_id": None, "ggml.seperator_token_id": None}
    files = [word_piece_file(tmp_path / "none.gguf", **without)]
    files.append(word_piece_file(tmp_path / "bos.gguf", **without, **{"ggml.bos_token_id": 2, "ggml.eos_token_id": 3}))
    for file in files:
        assert made(file).encode("hello").ids == [2, 6, 3]
    config = GgufTokenizer(word_piece_file(tmp_path / "m.gguf")).config()
    named = {name: config[f"{name}_token"] for name in ("cls", "sep", "mask", "pad", "unk")}
    assert named == {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]", "unk": "[UNK]"}


# ---- unigram models

UNTIDY = [
    *TEXTS,
    "  two  spaces ",
    "\uff21\uff22 \u2460 \u00bd \ufb01",
    "x\u3000y\u200bz",
    "",
    "\u4e2d",
]


def unigram(**options: Any) -> Any:
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, *conversion_process.TEXTS] * 20),
        model_writer=out,
        model_type="unigram",
        vocab_size=120,
        character_coverage=0.98,
        hard_vocab_limit=False,
        user_defined_symbols=["<extra>"],
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def unigram_file(path: Path, processor: Any, **others: Any) -> Path:
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    model = messages.ModelProto()
    model.ParseFromString(processor.serialized_model_proto())
    table = model.normalizer_spec.precompiled_charsmap
    keys = {
        "ggml.model": "t5",
        "ggml.add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "ggml.remove_extra_whitespaces": model.normalizer_spec.remove_extra_whitespaces,
        **({"ggml.precompiled_charsmap": table} if table else {}),
    }
    return pieces_file(path, processor, **(keys | others))


def test_likeliest_pieces_match_sentencepiece(tmp_path: Path) -> None:
    processor = unigram()
    ours = made(unigram_file(tmp_path / "m.gguf", processor))
    for text in UNTIDY:
        ids = processor.encode(text)
        assert ours.encode(text).ids == [*ids, processor.eos_id()], text
        assert ours.encode(text, add_special_tokens=False).ids == ids
    extra = processor.piece_to_id("<extra>")
    assert ours.encode("<extra>Hello", add_special_tokens=False).ids == [extra, *processor.encode("Hello")]
    both = made(unigram_file(tmp_path / "both.gguf", processor, **{"ggml.add_bos_token": True}))
    assert both.encode("Hello").ids[0] == processor.bos_id()
    loaded = Tokenizer.load(unigram_file(tmp_path / "loaded.gguf", processor))
    text = "Hello, World! How are you?"
    assert loaded.decode(loaded.encode(text)) == processor.decode(processor.encode(text)) == text


def test_pieces_without_a_map_of_characters_and_without_a_space_before_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"normalization_rule_name": "identity", "add_dummy_prefix": False}
    processor = unigram(**options, remove_extra_whitespaces=False)
    ours = made(unigram_file(tmp_path / "m.gguf", processor))
    for text in ("Hello, World!", " Hello", "\uff21 a  b"):
        assert ours.encode(text, add_special_tokens=False).ids == processor.encode(text), text


@pytest.mark.parametrize("table", [[], [1, 0], [4, 0, 0, 0, 1], [3, 0, 0, 0, 1, 2, 3, 4, 5], [1 << 20, 2]])
def test_a_damaged_map_of_characters_is_one_sentence(tmp_path: Path, table: list[int]) -> None:
    keys: dict[str, Any] = {"ggml.model": "t5", "ggml.scores": [0.0] * 3, "ggml.unknown_token_id": 0}
    file = file_with(
        tmp_path / "m.gguf", ["a", "b", "c"], [1, 3, 3], **keys, **{"ggml.precompiled_charsmap": table or [0]}
    )
    with pytest.raises(ModelError, match="precompiled_charsmap has"):
        GgufTokenizer(file).make()


# ---- BPE of characters

LETTERS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\u2581", "a", "b", "\n", "\n\n", "\u2581a", "ab", "\u2581ab"]
LETTERS += ["\u2581\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
MERGES = ["\u2581 a", "a b", "\u2581 ab", "\n \n", "\u2581 \u2581"]


@pytest.mark.parametrize("keys", [{"ggml.model": "gemma4"}, {"ggml.model": "gpt2", "ggml.pre": "gemma4"}])
def test_characters_are_merged_as_gemma_does_it(tmp_path: Path, keys: dict[str, Any]) -> None:
    ids = {"ggml.bos_token_id": 2, "ggml.eos_token_id": 1, "ggml.unknown_token_id": 3, "ggml.merges": MERGES}
    types = [3] * 5 + [1] * 9 + [6] * 256
    ours = made(file_with(tmp_path / "m.gguf", LETTERS, types, **ids, **keys))
    vocab = {token: number for number, token in enumerate(LETTERS)}
    merges: Any = [tuple(merge.split(" ")) for merge in MERGES]
    theirs = transformers.GemmaTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    for text in ("ab ab", "  a\n\n\nb", "\u65e5 a", "<eos>ab", "", " "):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        assert ours.encode(text).ids == [2, *expected]
        assert ours.decode(expected) == theirs.decode(expected)


def test_words_between_spaces_are_whole_texts(tmp_path: Path) -> None:
    """Jina's Chinese embeddings: words are separated by white space and have no byte fallback; lower case if the file
    says so."""
    tokens, merges = ["<unk>", "a", "b", "ab", "B", "\u4e2d", "<s>", "</s>"], ["a b"]
    keys: dict[str, Any] = {"ggml.model": "whitespace", "ggml.pre": "whitespace", "ggml.merges": merges}
    keys |= {"ggml.unknown_token_id": 0}
    types = [2, 1, 1, 1, 1, 1, 3, 3]
    plain = made(file_with(tmp_path / "m.gguf", tokens, types, **keys))
    lower = made(file_with(tmp_path / "l.gguf", tokens, types, **keys, **{"ggml.normalizer.lowercase": True}))
    assert plain.encode("ab  B \u4e2d\u00e9").ids == [3, 4, 5, 0]
    assert lower.encode("aB").ids == [3]


# ---- loading


def test_texts_need_not_come_back_with_their_spaces_and_capitals(tmp_path: Path) -> None:
    """A piece that is missing is seen nevertheless."""
    letters = {*"".join(conversion_process.TEXTS).casefold()} - {*" \n"}
    pieces = [*sorted(letters), *(f"##{letter}" for letter in sorted(letters))]
    tokens = [*SPECIAL[:5], *(in_file(piece) for piece in pieces)]
    types = [3] * 5 + [1] * len(pieces)
    loaded = Tokenizer.load(file_with(tmp_path / "m.gguf", tokens, types, **WORD_PIECE_KEYS))
    assert loaded.decode(loaded.encode("Hello,  World", add_special_tokens=False)) == "hello, world"
    without = tokens.index("\u2581;"), tokens.index(";")
    tokens = [f"[{number}]" if number in without else token for number, token in enumerate(tokens)]
    with pytest.raises(ModelError, match="turns 'a = b"):
        Tokenizer.load(file_with(tmp_path / "n.gguf", tokens, types, **WORD_PIECE_KEYS))


# ---- files without a name


def test_files_without_a_name_are_cut_as_their_architecture_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unnamed: dict[str, Any] = {"ggml.pre": None}
    found = GgufTokenizer(bytes_file(tmp_path / "m.gguf", **unnamed))
    for architecture, name in (("falcon", "falcon"), ("gptneox", "mpt"), ("qwen2", "qwen2")):
        found.values = {**found.values, "general.architecture": architecture}
        made_of = found.make()
        assert made_of["pre_tokenizer"] == _steps(name)
        assert (made_of["normalizer"] is not None) is WORDS[name].nfc
    assert UNNAMED["gptneox"] == "mpt", "which are cut as GPT-2's are, and composed"
    assert not caplog.records
    found.values = {**found.values, "general.architecture": "llama"}
    assert found.make()["pre_tokenizer"] == _steps("default")
    assert "has no tokenizer.ggml.pre" in caplog.text


def _steps(name: str) -> dict[str, Any]:
    steps = list(WORDS[name].steps)
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
