"""The tokens that end an answer, from files, tokenizer, vocabulary and chat template, and the precedence among
these."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from tests.scripted import END, FILL, tokenizer_of
from tests.unit.test_gguf_tokenizer import file_with
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.gguf.config import end_ids
from vllm_lite.checkpoint.gguf.header import GgufHeader
from vllm_lite.checkpoint.gguf.metadata import Metadata
from vllm_lite.client.engines import launch
from vllm_lite.client.text.end_tokens import EOS_TOKEN, TEMPLATE, VOCABULARY, EndTokens, find_end_tokens
from vllm_lite.client.text.templates import closing_token, template_process
from vllm_lite.client.text.templates.chat_template import ChatTemplate
from vllm_lite.client.text.templates.closing_token import Closing, find_closing
from vllm_lite.client.text.templates.template_process import Answer, Render
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.client.text.tokenizer_formats import conversion
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ModelError
from vllm_lite.runtime.frames import frame
from vllm_lite.tools.doctor.model import chats

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNHEARD = CHATML.replace("im_end", "fin").replace("im_start", "go")
"""A format of which no list knows the tokens."""
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% if m.reasoning %}<|begin|>think{{ m.reasoning }}<|end|>{% endif %}"
    "<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}"
)
"""A template like Solar's: `<|end|>` closes the reasoning, after which the answer begins."""
USER_ENDS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
"""A template like GLM's: the beginning of the next message ends an answer."""
HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>")


class Written:
    """A small checkpoint. `ids` has the ids of its special tokens."""

    def __init__(self, path: Path, tokens: Sequence[str] = (), *, special: bool = True, **config: Any) -> None:
        """`config` are keys of its config.json."""
        self.path = path
        library, ids = tokenizer_of("ab", tokens, special=special)
        self.ids = {text: ids[text] for text in (FILL, END, *tokens)}
        library.save(str(path / "tokenizer.json"))
        self.num_tokens = library.get_vocab_size()
        self.write("config.json", LLAMA | {"vocab_size": self.num_tokens, "eos_token_id": None} | config)

    def write(self, name: str, content: Any) -> None:
        (self.path / name).write_text(json.dumps(content))

    def tokenizer(self, template: str | None = None, **tokens: Any) -> None:
        self.write("tokenizer_config.json", tokens | ({} if template is None else {"chat_template": template}))

    def found(self, template: str | None = None, *, renders: bool = False) -> EndTokens:
        return find_end_tokens(self.path, self.path, load_spec(self.path), template, renders=renders)

    def texts(self, *, renders: bool = False) -> set[str]:
        found = self.found(renders=renders)
        return {found.texts[token] for token in found.ids}


@pytest.fixture
def never_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise AssertionError("the template was rendered")

    monkeypatch.setattr(closing_token, "rendered_by", refuse)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates of tests need no bounds, and a process takes its time."""

    def answers(source: TemplateSource, asked: Sequence[Render]) -> list[Any]:
        template = ChatTemplate(source)
        return [
            msgspec.msgpack.decode(template_process._answer(template, frame(each)[4:])[4:], type=Answer)
            for each in asked
        ]

    monkeypatch.setattr(closing_token, "_asked", answers)


def closing(template: str, *tokens: str, known: Sequence[str] = ()) -> Closing:
    return find_closing(TemplateSource(template, {}), tokens, known)


# ---- files and tokenizer


def test_the_tokenizers_eos_token_ends_besides_that_of_config(tmp_path: Path, never_rendered: None) -> None:
    """A training of a base model with ChatML leaves two end tokens."""
    it = Written(tmp_path, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    it.write(
        "config.json", json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": it.ids["<|endoftext|>"]}
    )
    it.tokenizer(CHATML, eos_token="<|im_end|>")
    assert it.texts() == {"<|endoftext|>", "<|im_end|>"}
    found = it.found()
    assert found.named["config.json"] == (it.ids["<|endoftext|>"],)
    assert found.named[EOS_TOKEN] == found.named[TEMPLATE] == (it.ids["<|im_end|>"],)
    assert found.problem is not None
    assert all(word in found.problem for word in ("config.json", EOS_TOKEN, "<|endoftext|>", "<|im_end|>"))


def test_an_eos_of_null_ends_by_the_tokenizer(tmp_path: Path) -> None:
    it = Written(tmp_path)
    it.tokenizer(eos_token={"content": END})
    assert load_spec(tmp_path).eos_token_ids == ()
    assert it.found().ids == (it.ids[END],)
    assert it.found().problem is None


def test_an_eos_token_of_the_vocabulary_proper(tmp_path: Path) -> None:
    it = Written(tmp_path)
    it.tokenizer(eos_token="a")
    token = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    assert it.found().named == {EOS_TOKEN: (token,)}
    it.tokenizer(eos_token="no token")
    assert it.found().named == {}


def test_config_and_generation_config_both_count(tmp_path: Path) -> None:
    it = Written(tmp_path, eos_token_id=1)
    it.write("generation_config.json", {"eos_token_id": [1, 3]})
    it.tokenizer(eos_token=END)
    found = it.found()
    assert found.ids == (1, 3, it.ids[END])
    assert found.problem is not None, "the tokenizer names none of theirs"
    it.write("generation_config.json", {"eos_token_id": [it.ids[END], 1]})
    assert it.found().problem is None, "one file has the tokens of both others"
    it.write("generation_config.json", {"eos_token_id": 1})
    it.write("config.json", json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": [1, it.ids[END]]})
    assert it.found().problem is None, "the first and the last meet in the second"


def test_without_any_end_token_there_is_a_problem(tmp_path: Path) -> None:
    found = Written(tmp_path).found()
    assert found.ids == ()
    assert found.problem is not None
    assert "max_tokens" in found.problem


def test_an_id_beyond_the_models_vocabulary_is_left_out(tmp_path: Path) -> None:
    it = Written(tmp_path)
    it.write("config.json", json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": it.ids[END]})
    it.tokenizer(eos_token=END)
    assert it.found().ids == ()


def test_an_architecture_that_has_an_end_of_its_own(tmp_path: Path) -> None:
    raw = {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 1,
        "n_positions": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = find_end_tokens(tmp_path, tmp_path, load_spec(tmp_path))
    assert found.named == {"GPT2LMHeadModel": (50256,)}


def test_an_id_of_config_that_the_user_overrides(tmp_path: Path) -> None:
    Written(tmp_path, eos_token_id=3)
    options = EngineConfig.check({"hf_overrides": {"eos_token_id": 5}}).pooling
    found = find_end_tokens(tmp_path, tmp_path, load_spec(tmp_path, options=options))
    assert found.named == {"LlamaForCausalLM": (5,)}


@pytest.mark.parametrize(("architecture", "expected"), [("llama", [1, 2, 3]), ("gpt-oss", [1, 3])])
def test_the_ids_of_a_gguf_file(architecture: str, expected: list[int]) -> None:
    """The `eot` of gpt-oss is <|end|>."""
    named = {f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(("eos", "eot", "eom"), 1)}
    assert end_ids(Metadata(GgufHeader({"general.architecture": architecture, **named}, {}))) == expected


def test_a_gguf_file_that_names_one_id(tmp_path: Path, never_rendered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file as converters write it: its EOS token is the end of a text, and messages end with another control
    token."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "<|im_start|>", "<|im_end|>", "<|begin|>", "<|endoftext|>"]
    kinds = [1] * (len(tokens) - 4) + [3] * 4
    more = {"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.merges": ["a b"], "chat_template": CHATML}
    file = file_with(tmp_path / "m.gguf", [*tokens[:-4], "ab", *tokens[-4:]], [1, *kinds], **more)
    (tmp_path / "spec").mkdir()
    like = load_spec(Written(tmp_path / "spec").path)
    spec = msgspec.structs.replace(like, vocab_size=len(tokens) + 1, eos_token_ids=(len(tokens),))
    found = find_end_tokens(file, conversion.folder_of(file), spec)
    assert found.named["m.gguf"] == found.named[EOS_TOKEN] == (len(tokens),)
    assert found.ids == (len(tokens), len(tokens) - 2)
    assert found.problem is not None
    assert found.problem.startswith("m.gguf and the chat template disagree")


def test_a_model_that_makes_vectors_has_no_ends(tmp_path: Path) -> None:
    it = Written(tmp_path, architectures=["LlamaForSequenceClassification"])
    it.tokenizer(CHATML, eos_token=END)
    config = EngineConfig.check({"model": str(tmp_path), "device": "cpu"})
    assert launch.resolve(config).end_token_ids == ()
    assert "end tokens" not in [line.name for line in chats(str(tmp_path))]


# ---- vocabulary


def test_a_known_end_of_a_message_counts_with_a_template_alone(tmp_path: Path, never_rendered: None) -> None:
    """The text of a base model may have any token in it that is not the end of a text."""
    it = Written(tmp_path, ["<|im_start|>", "<|im_end|>", "<|end|>", "<EOT>", "<|end_of_text|>", "<|other|>"])
    it.tokenizer(eos_token=END)
    assert it.texts() == {END, "<|end_of_text|>"}


def test_with_a_template(tmp_path: Path, never_rendered: None) -> None:
    it = Written(tmp_path, ["<|im_start|>", "<|im_end|>", "<|end_of_text|>", "<|other|>"])
    it.tokenizer(CHATML, eos_token=END)
    assert it.texts() == {END, "<|end_of_text|>", "<|im_end|>"}


def test_a_template_that_the_user_gives_counts_as_its_own(tmp_path: Path, never_rendered: None) -> None:
    it = Written(tmp_path, ["<|im_start|>", "<|im_end|>"])
    it.tokenizer(eos_token=END)
    assert it.found(CHATML).ids == (it.ids[END], it.ids["<|im_end|>"])


def test_only_special_tokens_are_known_by_their_spelling(tmp_path: Path, in_process: None) -> None:
    it = Written(tmp_path, ["<|im_end|>", "<|end_of_text|>"], special=False)
    it.tokenizer("{{ messages[0].content }}", eos_token=END)
    assert it.texts() == {END}


@pytest.mark.parametrize("has_template", [True, False])
def test_gpt_oss_does_not_end_at_the_end_of_a_channel(tmp_path: Path, in_process: None, *, has_template: bool) -> None:
    it = Written(tmp_path, HARMONY_TOKENS)
    it.tokenizer(HARMONY if has_template else None, eos_token="<|return|>")
    for renders in (False, True):
        ends = it.texts(renders=renders)
        assert "<|end|>" not in ends
        assert ends == {"<|return|>", "<|endoftext|>"} | ({"<|call|>"} if has_template else set())


def test_gpt_oss_with_a_template_that_writes_no_channels(tmp_path: Path, in_process: None) -> None:
    it = Written(tmp_path, HARMONY_TOKENS)
    it.tokenizer("{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|return|>{% endfor %}")
    assert it.texts() == {"<|return|>", "<|call|>", "<|endoftext|>"}


def test_one_sure_end_does_not_make_others_so(tmp_path: Path, in_process: None) -> None:
    """A template like Muse's: a message has parts, each followed by `<|eom|>`, and ends with `<|eot|>`."""
    it = Written(tmp_path, ["<|eot|>", "<|eom|>"])
    parts = "{% if m.reasoning %}{{ m.reasoning }}<|eom|>{% endif %}{{ m.content }}<|eot|>"
    it.tokenizer(f"{{% for m in messages %}}{parts}{{% endfor %}}", eos_token=END)
    assert it.texts() == {END, "<|eot|>"}


def test_a_known_spelling_within_messages_is_no_end(tmp_path: Path, in_process: None) -> None:
    it = Written(tmp_path, ["<|begin|>", "<|content|>", "<|end|>", "<|flush|>"])
    it.tokenizer(PARTS, eos_token="<|flush|>")
    assert it.texts() == {"<|flush|>"}
    it.tokenizer(PARTS.replace("m.reasoning", "m.nothing"), eos_token="<|flush|>")
    assert it.texts() == {"<|flush|>", "<|end|>"}


# ---- template


def test_end_tokens_that_only_the_template_names(tmp_path: Path) -> None:
    it = Written(tmp_path, ["<|go|>", "<|fin|>"], special=False)
    it.tokenizer(UNHEARD, eos_token=END)
    found = it.found()
    assert found.named[TEMPLATE] == (it.ids["<|fin|>"],)
    assert found.ids == (it.ids[END], it.ids["<|fin|>"])
    assert found.lines() == [f"{it.ids[END]} {END} ({EOS_TOKEN})", f"{it.ids['<|fin|>']} <|fin|> ({TEMPLATE})"]


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (CHATML, "<|im_end|>"),
        (UNHEARD, "<|fin|>"),
        (HARMONY, "<|return|>"),
        (PARTS, None),
        (USER_ENDS, "<|user|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        (
            "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %} \n<|fin|>{% endif %}{% endfor %}",
            "<|fin|>",
        ),
        ("{% for m in messages %}{{ m.content }}</text>so<|sep|><|fin|>\n{% endfor %}", "<|fin|>"),
        ("{% for m in messages %}{{ m.content }}</text>{% endfor %} and so on", "</text>"),
        ("{% for m in messages %}{{ m.content }}<|fin|>\n<|go|>{% endfor %} always", "<|fin|>"),
        ("{% if not tools %}{{ raise_exception('tools!') }}{% endif %}" + UNHEARD, "<|fin|>"),
        ("{{ raise_exception('never') }}", None),
    ],
)
def test_the_token_that_closes_a_message(template: str, token: str | None, in_process: None) -> None:
    tokens = (
        "<|im_start|>",
        "<|im_end|>",
        "<|go|>",
        "<|fin|>",
        "<|user|>",
        "<|assistant|>",
        "</text>",
        "<|sep|>",
        "\n",
    )
    assert closing(template, *tokens, *HARMONY_TOKENS).token == token


def test_tokens_between_the_parts_of_an_answer(in_process: None) -> None:
    calls = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.arguments }}"
        "</tool_call>{% endif %}<|fin|>{% endfor %}"
    )
    assert closing(calls, "<tool_call>", "</tool_call>", "<|fin|>") == Closing("<|fin|>", frozenset({"<tool_call>"}))
    assert closing(HARMONY, *HARMONY_TOKENS).inner >= {"<|end|>"}


def test_a_known_end_token_wins_only_beside_the_candidate(in_process: None) -> None:
    both = "{% for m in messages %}{{ m.content }}<|done|><|fin|>\n{% endfor %}"
    assert closing(both, "<|done|>", "<|fin|>").token == "<|done|>"
    assert closing(both, "<|done|>", "<|fin|>", known=["<|fin|>"]).token == "<|fin|>"
    apart = both.replace("<|done|>", "<|done|>\n")
    assert closing(apart, "<|done|>", "<|fin|>", known=["<|fin|>"]).token == "<|done|>"


@pytest.mark.parametrize(
    "hostile",
    ["{% if", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 10**10 }}"],
)
def test_a_damaged_or_hostile_template_does_not_fail_the_start(tmp_path: Path, hostile: str) -> None:
    it = Written(tmp_path, ["<|fin|>"])
    it.tokenizer("<|fin|>" + hostile, eos_token=END)
    assert it.texts() == {END}


@given(
    st.lists(st.sampled_from(["<|a|>", "<|ab|>", "[/B]", "</s>"]), min_size=1, max_size=4),
    st.sampled_from(["", "\n", " "]),
)
def test_the_first_token_closes_whatever_follows(row: list[str], blank: str) -> None:
    rest = row[0] + blank + blank.join(row[1:])
    texts = {"last": f"qzaskedzq<|go|>qzsaidzq{blank}{rest}", "earlier": "", "thinking": "", "calling": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closing_token, "rendered_by", lambda _: texts)
        assert closing("", "<|a|>", "<|ab|>", "[/B]", "</s>", "<|go|>").token == row[0]


# ---- programs that use the tokens


def test_an_engine_gets_the_end_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = Written(tmp_path, ["<|im_start|>", "<|im_end|>"], eos_token_id=3)
    it.tokenizer(CHATML, eos_token="<|im_end|>")
    config = EngineConfig.check({"model": str(tmp_path), "device": "cpu"})
    assert launch.resolve(config).end_token_ids == (3, it.ids["<|im_end|>"])
    assert "config.json and the tokenizer's eos_token disagree" in caplog.text
    it.tokenizer(eos_token=END)
    assert launch.resolve(config).end_token_ids == (3, it.ids[END])
    assert launch.resolve(config, template=CHATML).end_token_ids == (3, it.ids[END], it.ids["<|im_end|>"])


def test_a_damaged_tokenizer_is_left_to_the_client(tmp_path: Path) -> None:
    it = Written(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        it.found()
    assert launch.resolve(EngineConfig.check({"model": str(tmp_path), "device": "cpu"})).end_token_ids == ()


def test_doctor_shows_the_sources_of_end_tokens(tmp_path: Path) -> None:
    it = Written(tmp_path, ["<|im_start|>", "<|im_end|>"], eos_token_id=3)
    it.tokenizer(CHATML, eos_token=END)
    line = next(each for each in chats(str(tmp_path)) if each.name == "end tokens")
    assert line.level == "WARN"
    assert f"3 (config.json); {it.ids[END]} {END} ({EOS_TOKEN})" in line.text
    assert f"{it.ids['<|im_end|>']} <|im_end|> ({VOCABULARY}, {TEMPLATE})" in line.text
    it.write("generation_config.json", {"eos_token_id": [3, it.ids[END], it.ids["<|im_end|>"]]})
    assert next(each.level for each in chats(str(tmp_path)) if each.name == "end tokens") == "OK"
