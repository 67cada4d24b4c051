"""Choice of a format: by the chat template, then the vocabulary, then the architecture."""

# ruff: noqa: RUF001 - DeepSeek's literals have such letters

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.response_transcripts import TOOLS, WRITERS, pieces_of, read
from vllm_lite.client.text.response.choose import choose
from vllm_lite.client.text.response.shipped import descriptions
from vllm_lite.client.text.templates.template_literals import UNKNOWN, stands_free, template_literals


def chosen(
    template: str | None = None, tokens: tuple[str, ...] = (), architectures: tuple[str, ...] = ()
) -> tuple[str | None, str | None]:
    """The names of the formats of calls and of reasoning for a model of which this is known."""
    tokenizer: Any = SimpleNamespace(added_tokens={text: place for place, text in enumerate(tokens)}, special_ids=())
    made = choose(None, tokenizer, template=template, architectures=architectures)
    return made.calls, made.reasoning


# ---- the chat template


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("{{ '<tool_call>' + call + '</tool_call>' }}", "hermes"),
        ("{% set a = '<tool_call>' %}{% set b = '</tool_call>' %}{{ a ~ x ~ b }}", "hermes"),
        ("{% set ns = ']<]minimax[>[' %}{{ ns ~ '<tool_call>' }} {{ ns ~ '</tool_call>' }}", "minimax_m3"),
        ("{% set ns = '<]other[>[' %}{{ ns ~ '<tool_call>' }}{{ ns ~ '</tool_call>' }}", None),
        ("{{ '<]other[>[<tool_call> <]other[>[</tool_call>' }}", None),
        ("{# a model may write <tool_call> or </tool_call> #}{{ x }}", None),
        ("{% set d = '｜DSML｜' %}{{ '<' + d + 'function_calls>' }}", "deepseek_v32"),
        ("{% set d = '｜DSML｜' %}{{ '<' + d + 'tool_calls>' }}", "deepseek_v4"),
        ("{% set d = '｜DSML｜' %}{{ '<' + d + 'tool_calls>' }}{% set d = '｜DSML｜' %}", "deepseek_v4"),
        ("{% set d = 'a' %}{% set d = '｜DSML｜' %}{{ '<' + d + 'function_calls>' }}", None),
        ('{% generation %}{{ "<function name=\\"" }}{% endgeneration %}<param name="x">', "minicpm5"),
        ("{{ 'Call functools[{\"name\": 1}]' }}", "phi4_mini_json"),
        ("{{ 'from myfunctools[0]' }}", None),
        ("{% if '<TOOLCALL>' in x and '</TOOLCALL>' in x %}{% endif %}", "nemotron_json"),
        ("{% broken", None),
        ("{% broken <|tools_prefix|>", "apertus"),
        ("", None),
    ],
)
def test_literals_of_a_template_select_a_format_anywhere(template: str, calls: str | None) -> None:
    assert chosen(template)[0] == calls


def test_constants_are_joined_as_they_would_be_written() -> None:
    found = template_literals("{% set a = 'x' %}a{{ a + 'y' ~ b ~ 'z' }}{{ f('in ' + a) }}{{ c.d['e'] }}").split(
        UNKNOWN
    )
    assert {"axy", "z", "in x", "e"} <= set(found)
    assert "y" not in found


def test_constants_that_double_each_other_stay_small() -> None:
    """Sixty of them would be 2**60 letters."""
    doubled = "".join(f"{{% set a{i + 1} = a{i} ~ a{i} %}}" for i in range(60))
    assert len(template_literals("{% set a0 = 'xx' %}" + doubled + "{{ a60 }}")) < 2_000_000


def test_a_template_that_is_too_deep_is_searched_as_it_is() -> None:
    template = "{{ " + "(" * 5000 + "'<TOOLCALL></TOOLCALL>'" + ")" * 5000 + " }}"
    assert template_literals(template) == template


@pytest.mark.parametrize(
    ("literal", "text", "is_free"),
    [
        ("<a>", "<a>", True),
        ("<a>", "x<a>y", True),
        ("<a>", "<a></a>", True),
        ("<a>", "[<a>", False),
        ("<a>", "|<a>", False),
        ("<a>", "<a>]", False),
        ("<a>", "[<a> <a>", True),
        ("word", "words", False),
        ("word", "swords word", True),
        ("word[", "word[[", True),
        ("word[", "sword[", False),
        ("<a>", "<b>", False),
    ],
)
def test_standing_free(literal: str, text: str, is_free: bool) -> None:
    assert stands_free(literal, text) is is_free


# ---- the vocabulary, and the architecture


def test_the_vocabulary_decides_if_the_template_does_not() -> None:
    """LFM2.5's template names no token of calls."""
    tokens = ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>")
    assert chosen("{{ messages }}", tokens) == ("lfm2", "qwen3")
    assert chosen(None, tokens, ("LlamaForCausalLM",)) == ("lfm2", "qwen3")
    assert chosen("<tool_call></tool_call>", tokens) == ("hermes", "qwen3")
    assert chosen(None, ("<|tool_call|>", "<|/tool_call|>"))[0] == "phi4_mini_json"
    assert chosen(None, ("<|tool_call|>",))[0] == "granite"


def test_the_architecture_decides_among_formats_with_the_same_tokens() -> None:
    tokens = ("<tool_call>", "</tool_call>")
    assert chosen("x", tokens)[0] == "hermes"
    assert chosen("x", tokens, ("Qwen3NextForCausalLM",))[0] == "qwen3_coder"
    assert chosen("x", ("<｜tool▁calls▁begin｜>",), ("DeepseekV3ForCausalLM",))[0] == "deepseek_v3"


def test_the_architecture_is_the_last_criterion() -> None:
    assert chosen("x", (), ("GptOssForCausalLM",)) == ("openai", "openai")
    assert chosen("x", ("<|tools_prefix|>",), ("GptOssForCausalLM",)) == ("apertus", "apertus")
    assert chosen("x", ("<other>",), ("LlamaForCausalLM",)) == (None, None)
    assert chosen(None, (), ("MiniMaxM2ForCausalLM",)) == ("minimax_m2", "minimax_m2")


def test_the_choice_has_a_reason() -> None:
    tokenizer: Any = SimpleNamespace(added_tokens={"<|tools_prefix|>": 1}, special_ids=())
    assert "vocabulary" in choose(None, tokenizer, template="x").why
    assert "architecture is LlamaForCausalLM" not in choose(None, tokenizer, template="x").why
    tokenizer.added_tokens = {}
    assert "no known format in the chat template" in choose(None, tokenizer, template="x").why
    why = "there is no chat template, and no known format in the vocabulary or the architecture"
    assert choose(None, tokenizer).why == why
    assert "architecture is GptOssForCausalLM" in choose(None, tokenizer, architectures=["GptOssForCausalLM"]).why


@pytest.mark.parametrize("name", [name for name, item in descriptions().items() if item.fingerprints])
def test_each_fingerprint_chooses_its_format(name: str) -> None:
    """A template that has the literals of one list, and nothing else, is of this format."""
    item = descriptions()[name]
    for texts in item.fingerprints:
        calls, reasoning = chosen(" ".join(texts))
        assert name in (calls, reasoning)
        assert item.tool_calls is None or calls == name


# ---- templates made of the writers' formats, in place of the real ones

OTHERS = {
    "deepseek_v3": "<think>",
    "gemma4": "<|channel>",
    "gigachat3": "<|role_sep|><|message_sep|>",
    "openai": "<|start|>",
}
"""Literals of a format that are elsewhere in its models' templates."""
ASKED_FOR = {"hermes, text", "llama3_json", "pythonic", "xlam", "xlam, fenced", "phi4_mini", "hunyuan", "ernie45"}
ASKED_FOR |= {"functionary_v31", "functionary_v32", "command_r"}
"""Writers that do not write all literals of their format; the instructions in its templates have the others."""


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ASKED_FOR])
def test_a_template_that_writes_a_call_is_of_its_format(name: str) -> None:
    writer = WRITERS[name]
    tokenizer: Any = SimpleNamespace(added_tokens={}, special_ids=())
    text = writer.calls([("get_weather", {"city": "Paris", "days": 3})])
    choice = choose(None, tokenizer, template=f"{{{{ {json.dumps(text + ' ' + OTHERS.get(name, ''))} }}}}")
    assert choice.calls == writer.names[0]
    assert choice.format is not None
    message = read(choice.format, pieces_of(text, {}), tools=TOOLS)
    assert [(called, json.loads(arguments)) for called, arguments in message.calls] == [
        ("get_weather", {"city": "Paris", "days": 3})
    ]
