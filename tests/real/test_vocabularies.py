"""llama.cpp's vocabulary files: each text of their `.inp` has the ids of their `.out`. And real tokenizer.json files
beside transformers."""

import unicodedata
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real.models import PAGE
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.client.text.tokenizer_formats.gguf_tokenizer import GgufTokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
EXACT = (
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
TOKENIZERS = ("llama2", "llama3_1", "qwen3", "gptoss", "gpt4o", "deepseek_v3", "gemma3", "gpt35turbo", "claude")
TEXTS = (
    "",
    " ",
    "\n\n  12",
    "  double  spaces ",
    "don't",
    "ﬁ é 🦙",
    "نص",
    "昨日は雪が降りました。",
    "<|im_start|>user",
    "</s>",
)
COMPOSES = ("qwen35",)
"""llama.cpp leaves letters and their marks apart, which the model's own tokenizer.json composes; so does this."""
WITHOUT_VECTORS = ("aquila", "baichuan", "gpt-neox", "nomic-bert-moe")


@pytest.mark.parametrize("name", EXACT)
def test_texts_have_the_ids_of_llama_cpp(real: Callable[[str], Path], name: str) -> None:
    file = real("llama-cpp") / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{file}.inp").read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    wanted = [[int(number) for number in line.split()] for line in Path(f"{file}.out").read_text().splitlines()]
    assert len(texts) == len(wanted) >= 45
    tokenizer = Tokenizer.load(file)
    wrong = {
        text: (found, ids)
        for text, ids in zip(texts, wanted, strict=True)
        if name not in COMPOSES or unicodedata.is_normalized("NFC", text)
        if (found := tokenizer.encode(text, add_special_tokens=False)) != ids
    }
    assert not wrong


@pytest.mark.parametrize("name", WITHOUT_VECTORS)
def test_a_vocabulary_without_vectors_gives_texts_back(real: Callable[[str], Path], name: str) -> None:
    tokenizer = Tokenizer.load(real("llama-cpp") / f"ggml-vocab-{name}.gguf")
    for text in ("Hello, world! 123", "نص", "   deep   space\n\n"):
        found = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert found == (" ".join(text.split()) if name == "nomic-bert-moe" else text)


def test_a_unigram_vocabulary_has_the_ids_of_xlm_roberta(real: Callable[[str], Path]) -> None:
    from transformers import XLMRobertaTokenizer

    file = real("llama-cpp") / "ggml-vocab-nomic-bert-moe.gguf"
    made: Any = GgufTokenizer(file).make()
    table: Any = b64decode(made["normalizer"]["precompiled_charsmap"])
    theirs = XLMRobertaTokenizer(vocab=made["model"]["vocab"], _spm_precompiled_charsmap=table)
    tokenizer = Tokenizer.load(file)
    texts = Path(file.with_name("ggml-vocab-qwen35.gguf.inp")).read_bytes().decode().split(SEPARATOR)
    for text in (*TEXTS, PAGE, *texts):
        assert tokenizer.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_have_the_ids_of_transformers(real: Callable[[str], Path], name: str) -> None:
    """transformers' plain class reads a tokenizer.json unchanged; the classes of Llama and GPT-2 build their own."""
    from transformers import PreTrainedTokenizerFast

    file = real(f"tokenizer-{name}") / "tokenizer.json"
    theirs, tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file)), Tokenizer.load(file.parent)
    for text in (*TEXTS, PAGE):
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            kept = theirs.decode(ids, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == kept
