"""Tokenizers, special tokens and templates of GGUF files, against the tokenizers that they were made of."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests import tokenizers_for_tests as made
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.client.text.tokenizer_formats import conversion
from vllm_lite.client.text.tokenizer_formats.gguf_tokenizer import GgufTokenizer
from vllm_lite.client.text.tokenizer_formats.pre_tokenizers import WORDS
from vllm_lite.errors import ModelError

TEXTS = [
    "Hello, World! How are you?",
    "don't I'LL you'VE  WE'RE",
    "1234567 3.14159 ٣٤٥",
    "naïve café 日本語 漢字 हिन्दी 🙂",
    "a  b\n\n  c\r\n\td   ",
    "HelloWorld iPhoneXMLHttp foo_bar(baz[1:22])",
]
BOS, EOS = "<|begin|>", "<|end|>"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def file_with(path: Path, tokens: list[str], types: list[int], **others: Any) -> Path:
    """A GGUF file with a tokenizer and nothing else; `others` are keys below tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in {"ggml.bos_token_id": len(tokens) - 2, "ggml.eos_token_id": len(tokens) - 1, **others}.items():
        name = f"tokenizer.{key.replace('__', '.')}"
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    write(writer)
    return path


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def bytes_model(pre: str) -> tokenizers.Tokenizer:
    """BPE of bytes, trained on words that are cut as `pre` says."""
    empty = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    words = WORDS[pre]
    empty["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(words.steps)}
    empty["model"]["ignore_merges"] = words.whole_words
    library = tokenizers.Tokenizer.from_str(json.dumps(empty))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        TEXTS * 5, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return library


def bytes_file(path: Path, pre: str = "gpt-2", **others: Any) -> Path:
    model = json.loads(bytes_model(pre).to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), BOS, EOS]
    merges = [" ".join(merge) for merge in model["merges"]]
    keys = {"ggml.model": "gpt2", "ggml.pre": pre, "ggml.merges": merges, "ggml.add_bos_token": False, **others}
    return file_with(path, tokens, [1] * (len(tokens) - 2) + [3, 3], **keys)


def sentencepiece_bytes() -> bytes:
    trainer, out = pytest.importorskip("sentencepiece").SentencePieceTrainer, io.BytesIO()
    trainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=out,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        hard_vocab_limit=False,
    )
    return out.getvalue()


def kind_of(processor: Any, piece: int) -> int:
    """The kind of a piece in a GGUF file."""
    kinds = {
        2: processor.is_unknown(piece),
        3: processor.is_control(piece),
        4: processor.id_to_piece(piece) == "<extra>",  # which the user has defined
        6: processor.is_byte(piece),
    }
    return next((kind for kind, is_it in kinds.items() if is_it), 1)


def pieces_file(path: Path, processor: Any, **others: Any) -> Path:
    ids = range(processor.get_piece_size())
    keys = {
        "ggml.model": "llama",
        "ggml.scores": [processor.get_score(each) for each in ids],
        "ggml.unknown_token_id": processor.unk_id(),
        "ggml.bos_token_id": processor.bos_id(),
        "ggml.eos_token_id": processor.eos_id(),
        **others,
    }
    return file_with(
        path, [processor.id_to_piece(each) for each in ids], [kind_of(processor, each) for each in ids], **keys
    )


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "smollm", "tekken", "qwen35", "lfm2"])
def test_bytes_are_merged_as_they_were_learned(tmp_path: Path, pre: str) -> None:
    loaded, library = Tokenizer.load(bytes_file(tmp_path / "m.gguf", pre)), bytes_model(pre)
    for text in TEXTS:
        ids = loaded.encode(text)
        assert ids == library.encode(text).ids
        assert loaded.decode(ids) == text
    assert loaded.encode(f"Hello{EOS}")[-1] == loaded.added_tokens[EOS]
    assert loaded.special_ids == {loaded.added_tokens[BOS], loaded.added_tokens[EOS]}


def test_pieces_match_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes())
    loaded = Tokenizer.load(pieces_file(tmp_path / "m.gguf", processor))
    plain = Tokenizer.load(pieces_file(tmp_path / "plain.gguf", processor, **{"ggml.add_space_prefix": False}))
    for text in (*TEXTS, "  two spaces", "Ünïcode"):
        ids = loaded.encode(text)
        assert ids == [processor.bos_id(), *processor.encode(text)]
        assert loaded.decode(ids) == text
        assert plain.decode(plain.encode(text)) == text
        assert plain.encode(f" {text}") == ids


def test_tokens_at_the_ends_are_as_the_file_says(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"ggml.add_bos_token": True, "ggml.add_eos_token": True}
    loaded = Tokenizer.load(bytes_file(tmp_path / "m.gguf", **flags))
    ids = loaded.encode("Hello")
    assert (ids[0], ids[-1]) == (loaded.added_tokens[BOS], loaded.added_tokens[EOS])
    assert loaded.encode("Hello", add_special_tokens=False) == ids[1:-1]


def test_both_texts_of_a_pair_have_ends(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"ggml.add_bos_token": True, "ggml.add_eos_token": True}
    processor = GgufTokenizer(bytes_file(tmp_path / "m.gguf", **flags)).make()["post_processor"]
    parts = [next(iter(part.values()))["id"] for part in processor["pair"]]
    assert parts == [BOS, "A", EOS, BOS, "B", EOS]


@pytest.mark.parametrize("flag", [None, 1], ids=["no flag", "a flag that is a number"])
@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("gpt-2", False)])
def test_the_first_token_is_the_models_usual_one_by_default(
    tmp_path: Path, pre: str, flag: int | None, *, adds: bool
) -> None:
    loaded = Tokenizer.load(bytes_file(tmp_path / "m.gguf", pre, **{"ggml.add_bos_token": flag}))
    assert (loaded.encode("Hello")[0] == loaded.added_tokens[BOS]) is adds


def test_words_are_composed_and_whole_as_the_model_has_them(tmp_path: Path) -> None:
    composes = {pre: Tokenizer.load(bytes_file(tmp_path / f"{pre}.gguf", pre)) for pre in ("qwen2", "gpt-2")}
    same = [loaded.encode("e\u0301") == loaded.encode("\u00e9") for loaded in composes.values()]
    assert same == [True, False]
    whole = [GgufTokenizer(bytes_file(tmp_path / "m.gguf", pre)).make()["model"] for pre in ("llama-bpe", "gpt-2")]
    assert [model["ignore_merges"] for model in whole] == [True, False]


PIECES = {"ggml.model": "llama", "ggml.add_bos_token": False, "ggml.add_space_prefix": False}


def test_text_without_pieces_is_one_unknown_token(tmp_path: Path) -> None:
    """There are no bytes to fall back to. Several characters are one token."""
    tokens, types = ["<unk>", "a", "<tool>", "<pad>", BOS, EOS], [2, 1, 4, 3, 3, 3]
    ids = {"ggml.unknown_token_id": 0, "ggml.padding_token_id": 3, "ggml.scores": [0.0] * 6}
    file = file_with(tmp_path / "m.gguf", tokens, types, **PIECES, **ids)
    made_of = GgufTokenizer(file)
    library = tokenizers.Tokenizer.from_str(json.dumps(made_of.make()))
    assert library.encode("a\u00e9\u00fca<tool>").ids == [1, 0, 1, 2]
    assert library.encode("<unk>a").ids == [0, 1]
    special = {number for number, token in library.get_added_tokens_decoder().items() if token.special}
    assert special == {0, 3, 4, 5}, "a tool's token is text"
    assert made_of.make()["model"]["byte_fallback"] is False
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": "<unk>", "pad_token": "<pad>"}
    assert made_of.config() == {**names, "chat_template": []}


def test_pieces_are_merged_by_score_and_then_by_their_numbers(tmp_path: Path) -> None:
    """A piece that is found in texts as it is, as control tokens are, is not merged."""
    tokens, types = ["ab", "c", "a", "bc", "abc", "ca", "b", BOS, EOS], [1, 1, 1, 1, 1, 3, 1, 3, 3]
    scores = [-1.0, -9.0, -9.0, -2.0, -3.0, -0.5, -9.0, 0.0, 0.0]
    file = file_with(tmp_path / "m.gguf", tokens, types, **PIECES, **{"ggml.scores": scores})
    assert GgufTokenizer(file).make()["model"]["merges"] == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]


def test_a_part_of_a_merge_may_begin_with_a_space(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.merges": ["  a", " a b"]}
    file = file_with(tmp_path / "m.gguf", [" ", "a", " a", "b", " ab", BOS, EOS], [1] * 5 + [3, 3], **keys)
    assert GgufTokenizer(file).make()["model"]["merges"] == [[" ", "a"], [" a", "b"]]


def test_tokens_are_bounded_and_have_a_type_or_none_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"ggml.model": "gpt2", "ggml.pre": "gpt-2"}
    with pytest.raises(ModelError, match="token_type has 3 numbers for 2 tokens"):
        GgufTokenizer(file_with(tmp_path / "m.gguf", ["a", "b"], [1, 1, 1], **plain))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b"])
    write(writer)
    assert GgufTokenizer(tmp_path / "m.gguf").make()["added_tokens"] == []
    monkeypatch.setattr("vllm_lite.client.text.tokenizer_formats.gguf_tokenizer.MAX_TOKENS", 1)
    with pytest.raises(ModelError, match="tokens has 2 tokens; it must have 1 to 1"):
        GgufTokenizer(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "none.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    write(writer)
    with pytest.raises(ModelError, match="tokens has 0 tokens"):
        GgufTokenizer(tmp_path / "none.gguf")


def test_templates_and_special_tokens(tmp_path: Path) -> None:
    one = bytes_file(tmp_path / "one.gguf", chat_template="{{ bos_token }}{{ messages }}")
    Tokenizer.load(one)
    found = TemplateSource.load(one)
    assert found is not None
    assert found.source == "{{ bos_token }}{{ messages }}"
    assert found.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    two = bytes_file(tmp_path / "two.gguf", chat_template="a", chat_template__tool_use="b {{ tools }}")
    Tokenizer.load(two)
    found = TemplateSource.load(two)
    assert found is not None
    assert (found.source, found.for_tools) == ("a", "b {{ tools }}")


def test_a_tokenizer_beside_the_file_wins(tmp_path: Path) -> None:
    file = bytes_file(tmp_path / "m.gguf")
    (tmp_path / "tokenizer.json").write_bytes(made.byte_level())
    assert conversion.find(file) is None
    assert Tokenizer.load(file).encode("the cat") == Tokenizer(made.byte_level()).encode("the cat")


def damaged() -> Iterator[Any]:
    yield {"ggml.model": "rwkv"}, "its tokenizer 'rwkv' is not supported; supported: gpt2, whitespace, gemma4, llama"
    yield {"ggml.model": "t5"}, "unknown_token_id is missing, or no token"
    yield {"ggml.model": "t5", "ggml.unknown_token_id": 0}, r"scores has 0 numbers for \d+ tokens"
    yield {"ggml.pre": "new"}, "how its tokenizer cuts words .*'new'.* is not known; supported: gpt-2"
    yield {"ggml.merges": ["a b"]}, "merges has 'a b', whose parts are not tokens"
    yield {"ggml.merges": ["x a"], "tokens": ["a", "xa"]}, "merges has 'x a', whose parts are not tokens"
    yield {"ggml.merges": ["a b"], "tokens": ["a", "b"]}, "merges has 'a b', whose parts are not tokens"
    yield {"ggml.merges": "a b"}, "merges is not an array"
    yield {"ggml.merges": [1, 2]}, "an array of numbers is where strings"
    yield {"ggml.merges": ["a" * 5000]}, "a string of more than 4096 characters"
    yield {"ggml.model": "llama"}, r"scores has 0 numbers for \d+ tokens"
    yield {"ggml.model": "llama", "ggml.scores": [0.5]}, "scores has 1 numbers for"


@pytest.mark.parametrize(("keys", "problem"), list(damaged()))
def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
    file, tokens = tmp_path / "m.gguf", keys.pop("tokens", ["a", "b"] if "ggml.pre" in keys else None)
    keys = {"ggml.model": "gpt2", "ggml.pre": "gpt-2", **keys}
    file = bytes_file(file, **keys) if tokens is None else file_with(file, tokens, [1] * len(tokens), **keys)
    with pytest.raises(ModelError, match=problem):
        GgufTokenizer(file).make()


def test_ids_that_are_no_tokens_name_none(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"ggml.bos_token_id": 1 << 31, "ggml.add_bos_token": True}
    made_of = GgufTokenizer(bytes_file(tmp_path / "m.gguf", **keys))
    assert made_of.config() == {"eos_token": EOS, "chat_template": []}
    assert made_of.make()["post_processor"]["type"] == "ByteLevel"
