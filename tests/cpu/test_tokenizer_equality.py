"""The same ids and texts as transformers.AutoTokenizer, whatever tokenizer_config.json says."""

import json
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tokenizers_for_tests as made
from tests.examples import examples
from vllm_lite.client.chat import ChatTokenizer
from vllm_lite.client.text.tokenizer import Tokenizer

DEMO = Path(str(files("vllm_lite") / "demo_model"))
TEXTS = [
    "the cat",
    " the cat sat .",
    "é 猫 🙂 e\u0301",
    "<s> the</s>",
    "two words the",
    "",
    "  ",
    "<|begin|>the<|end|> x",
    "日本 x",
    "a\n\tb\r\n",
]
# transformers 5 does not look at add_bos_token and add_eos_token where there is a tokenizer.json
CONFIGS: list[dict[str, Any] | None] = [
    None,
    {"tokenizer_class": "PreTrainedTokenizerFast"},
    {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_eos_token": True},
    {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False},
    {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4, "clean_up_tokenization_spaces": True},
]
NAMED = [
    ("byte level", {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<|begin|>"}),
    ("byte level", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}),
    ("byte level, NFC", {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "eos_token": "<|end|>"}),
]


@cache
def demo() -> tuple[Tokenizer, Any]:
    return Tokenizer.load(DEMO), auto_tokenizer(DEMO)


def auto_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *product(("byte level", "byte fallback, stripped", "byte fallback", "byte fallback, added tokens"), CONFIGS),
        *NAMED,
    ],
)
def test_ids(tmp_path: Path, kind: str, config: dict[str, Any] | None) -> None:
    (tmp_path / "tokenizer.json").write_bytes(made.KINDS[kind]())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(tmp_path), auto_tokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids


TOKEN = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TEMPLATE = (
    "{{ bos_token }}{% for each in messages %}{{ each.role }}: {{ each.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}the{% endif %}"
)
TOOL_TEMPLATE = "tools{{ tools[0].function.name }}{{ messages[0].content }}{{ bos_token }}"
NAMED_TEMPLATES = [{"name": "tool_use", "template": TOOL_TEMPLATE}, {"name": "default", "template": TEMPLATE}]
FILES: dict[str, dict[str, Any]] = {
    "texts": {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}},
    "objects": {
        "tokenizer_config.json": {
            "bos_token": {"__type": "AddedToken", **TOKEN},
            "eos_token": None,
            "chat_template": TEMPLATE,
        }
    },
    "no tokens": {"tokenizer_config.json": {"chat_template": TEMPLATE, "add_bos_token": True}},
    "an older map": {
        "tokenizer_config.json": {"bos_token": "</s>", "chat_template": TEMPLATE},
        "special_tokens_map.json": {"bos_token": TOKEN, "eos_token": "</s>"},
    },
    "a newer config": {
        "tokenizer_config.json": {
            "bos_token": "</s>",
            "chat_template": TEMPLATE,
            "added_tokens_decoder": {"0": {**TOKEN, "special": True}},
        },
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>"},
    },
    "named": {"tokenizer_config.json": {"bos_token": "<s>", "chat_template": NAMED_TEMPLATES}},
    "files": {
        "tokenizer_config.json": {"bos_token": "<s>", "chat_template": "no"},
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/tool_use.jinja": TOOL_TEMPLATE,
    },
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CHAT = [{"role": "user", "content": " the cat"}, {"role": "assistant", "content": "</s>été 🙂"}]


@pytest.mark.parametrize("kind", ["byte fallback, stripped", "byte fallback, added tokens", "metaspace"])
@pytest.mark.parametrize("case", FILES)
def test_ids_of_chats(tmp_path: Path, kind: str, case: str) -> None:
    """With a BOS that the post-processor adds to texts, and without; with the templates and tokens of every place."""
    (tmp_path / "tokenizer.json").write_bytes(made.KINDS[kind]())
    for name, content in FILES[case].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    ours, theirs = ChatTokenizer(tokenizer, tmp_path), auto_tokenizer(tmp_path)
    for tools, generate in ((None, True), (None, False), (TOOLS, True)):
        options: Any = {"tools": tools, "add_generation_prompt": generate}
        wanted = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
        assert ours.apply_chat_template(CHAT, **options) == wanted
        assert tokenizer.decode(wanted, skip_special_tokens=False) == theirs.decode(wanted)


@settings(max_examples=examples(200))
@given(st.text(max_size=60))
def test_ids_and_text_of_the_demo_model(text: str) -> None:
    ours, theirs = demo()
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 2047), max_size=40), st.booleans())
def test_text_of_random_ids_of_the_demo_model(ids: list[int], skip: bool) -> None:
    ours, theirs = demo()
    expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_special_ids_of_the_demo_model() -> None:
    ours, theirs = demo()
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]},
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]},
    ],
)
def test_the_second_text_is_marked_as_by_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    words = {word: place for place, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"))}
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = auto_tokenizer(tmp_path)("a b", "c a")
    ids, types = Tokenizer.load(tmp_path).encode_pair("a b", "c a")
    assert ids == theirs["input_ids"] == [2, 5, 6, 3, 7, 5, 3]
    assert types == theirs.get("token_type_ids", [0] * 7)
