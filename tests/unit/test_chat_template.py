"""Chat templates: the text that transformers makes of them, and nothing that a request or a template could abuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from vllm_lite.client.text.templates.chat_template import ChatTemplate, with_read_arguments
from vllm_lite.client.text.templates.template_source import MAX_TEMPLATE_BYTES, TemplateSource
from vllm_lite.errors import ModelError, RequestError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Templates like those of six families, each with the feature in which it differs from the others.
LLAMA2 = """{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- set content = system + message['content'] if loop.first else message['content'] %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + content | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
LLAMA3 = """{{- bos_token }}
{%- if date_string is not defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}
{%- endif %}
{%- if not tools is none %}{{- raise_exception('no tools here') }}{% endif %}
<|start|>system<|end|>

Today is in {{ date_string }}
{% for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{% if add_generation_prompt %}
<|start|>assistant<|end|>

{% endif %}"""
MISTRAL = """{%- set ns = namespace(index=0, system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = message.content %}{% continue %}{% endif %}
    {%- if ns.index > 20 %}{% break %}{% endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message.role == 'user' %}
        {{- '[INST]' }}
        {%- if loop.last and ns.system != '' %}{{- ns.system + '\\n\\n' }}{% endif %}
        {{- message.content + '[/INST]' }}
    {%- else %}
        {{- message['content'] }}{{ eos_token }}
    {%- endif %}
{%- endfor %}"""
QWEN = """{%- macro show(text) %}<|im|>{{ text }}{% endmacro %}
{%- if messages[0].role != 'system' %}{{- show('system') }}
You are helpful.
{%- endif %}
{%- for message in messages[::-1] | reverse %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- show(message.role) + '\\n' + content + '<|done|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- show('assistant') + '\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
CHATML = """{% for message in messages %}{{'<|im|>' + message['role'] + '
' + message['content'] + '<|end|>' + '\n'}}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im|>assistant\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
<turn>{{ role }}
{% generation %}{{ {'é': [1.5, none]} | tojson(indent=2) }}{% endgeneration %}{{ message['content'] | trim }}
{{ dict(a=1)['a'] }}{{ ['ü', '<&>'] | tojson }}<end>
{% endfor %}
{% if add_generation_prompt %}<turn>model
{% endif %}"""
FAMILIES = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "chatml": CHATML,
    "gemma": GEMMA,
}

USER = {"role": "user", "content": "  What is 2 < 3 & é?\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "<think>hm</think>\nIt is true. 🙂"}
CHATS: list[list[dict[str, Any]]] = [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER, ANSWER]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = make_checkpoint(tmp_path_factory.mktemp("template") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token, tokenizer.eos_token = TOKENS["bos_token"], TOKENS["eos_token"]
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=len)
def test_the_text_agrees_with_transformers(
    oracle: Any, family: str, chat: list[dict[str, Any]], generate: bool
) -> None:
    wanted = oracle.apply_chat_template(
        chat, chat_template=FAMILIES[family], tokenize=False, add_generation_prompt=generate
    )
    template = ChatTemplate(TemplateSource(FAMILIES[family], TOKENS))
    assert template.render(chat, add_generation_prompt=generate) == wanted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", ["It is", "It is  \n", " It is"])
def test_the_last_message_can_be_continued(oracle: Any, family: str, content: str) -> None:
    chat = [USER, {"role": "assistant", "content": content}]
    settings: Any = {"tokenize": False, "continue_final_message": True, "add_generation_prompt": False}
    wanted = oracle.apply_chat_template(chat, chat_template=FAMILIES[family], **settings)
    template = ChatTemplate(TemplateSource(FAMILIES[family], TOKENS))
    assert template.render(chat, add_generation_prompt=False, continue_final_message=True) == wanted
    assert chat[-1]["content"] == content


def test_variables_reach_the_template(oracle: Any) -> None:
    wanted = oracle.apply_chat_template(
        [USER], chat_template=QWEN, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert ChatTemplate(TemplateSource(QWEN, TOKENS)).render([USER], variables={"enable_thinking": False}) == wanted
    assert "<think>" in wanted


TOOL_USE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor %}{% endfor %}"""
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tools_and_calls_reach_the_template(oracle: Any, tools: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["é"]}}}
    chat: list[Any] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    wanted = oracle.apply_chat_template(chat, tools, chat_template=TOOL_USE, tokenize=False)
    template = ChatTemplate(TemplateSource(TOOL_USE, TOKENS))
    assert template.render(chat, tools=tools, add_generation_prompt=False) == wanted
    as_text = {**call, "function": {"name": "add", "arguments": '{"a": 1, "b": ["\\u00e9"]}'}}
    read = [USER, {**chat[1], "tool_calls": with_read_arguments([as_text])}, chat[2]]
    assert template.render(read, tools=tools, add_generation_prompt=False) == wanted


def test_whether_a_template_shows_tools() -> None:
    assert TemplateSource(TOOL_USE).takes_tools
    assert not TemplateSource(CHATML).takes_tools


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt", "chat_template"])
def test_reserved_variables_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        ChatTemplate(TemplateSource(CHATML, TOKENS)).render([USER], variables={name: "x"})


def test_nested_values_are_for_variables_that_the_template_reads() -> None:
    template = ChatTemplate(TemplateSource(CHATML + "{% if parts %}{{ parts[1] }}{% endif %}", TOKENS))
    assert template.render([USER], variables={"parts": [5, 6], "others": "x"}).endswith("6")
    for value in ([5], {"a": 5}):
        with pytest.raises(RequestError, match="the chat template does not read 'others' of chat_template_kwargs;"):
            template.render([USER], variables={"others": value})


def test_errors_of_a_template_are_reported() -> None:
    with pytest.raises(RequestError, match="Roles must alternate"):
        ChatTemplate(TemplateSource(LLAMA2, TOKENS)).render([USER, USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__ }}{{ self._TemplateReference__context.eval_ctx.environment }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ lipsum(n=1000) }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    chat = [dict(USER)]
    with pytest.raises(RequestError):
        ChatTemplate(TemplateSource(source, TOKENS)).render(chat)
    assert chat == [USER]


@pytest.mark.parametrize("source", ["{{ strftime_now.__code__ }}", "{{ messages[0].content.format.__self__ }}"])
def test_hidden_attributes_render_as_nothing(source: str) -> None:
    assert ChatTemplate(TemplateSource(source, TOKENS)).render([USER]) == ""


def test_a_broken_template_is_a_broken_model() -> None:
    with pytest.raises(ModelError, match="here"):
        ChatTemplate(TemplateSource("{% if %}", name="here"))


def test_a_mark_cannot_be_forged() -> None:
    """A user's text never ends the prompt."""
    chat = [{"role": "user", "content": "CONTINUE_FINAL_MESSAGE_TAG "}, {"role": "assistant", "content": "So"}]
    text = ChatTemplate(TemplateSource(CHATML)).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im|>assistant\nSo")


def test_templates_are_found_in_each_of_their_files(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    tokens = {"bos_token": {"content": "<b>"}, "eos_token": "<e>", "pad_token": None}
    show = "{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    config = {**tokens, "chat_template": show + "1"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert _loaded(tmp_path).render([USER]) == "<b><e>1"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": show + "2"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert _loaded(tmp_path).render([USER]) == "<b><e>2"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": show + "2b"}))
    assert _loaded(tmp_path).render([USER]) == "<b><e>2b"
    (tmp_path / "chat_template.jinja").write_text(show + "3")
    assert _loaded(tmp_path).render([USER]) == "<b><e>3"
    (tmp_path / "own.jinja").write_text(show + "4")
    own = ChatTemplate.load(tmp_path, tmp_path / "own.jinja")
    assert own is not None
    assert own.render([USER]) == "<b><e>4"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer_config"):
        ChatTemplate.load(tmp_path)


def test_templates_with_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Chats with tools get `tool_use`; a user names any of them; a single one needs no name."""
    named = [{"name": "tool_use", "template": TOOL_USE}, {"name": "default", "template": CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template, plain, tool_use = _loaded(tmp_path), *(ChatTemplate(TemplateSource(text)) for text in (CHATML, TOOL_USE))
    assert template.render([USER]) == template.render([USER], tools=[]) == plain.render([USER])
    assert template.render([USER], tools=TOOLS) == tool_use.render([USER], tools=TOOLS) != plain.render([USER])
    found = TemplateSource.load(tmp_path)
    assert found is not None
    assert found.takes_tools
    assert found.texts == CHATML + TOOL_USE
    for name, text in (("default", CHATML), ("tool_use", TOOL_USE)):
        own = ChatTemplate.load(tmp_path, name)
        assert own is not None
        for tools in (None, TOOLS):
            assert own.render([USER], tools=tools) == ChatTemplate(TemplateSource(text)).render([USER], tools=tools)
    with pytest.raises(ModelError, match=r"cannot be read: No such file.*the model's, which are tool_use, default"):
        ChatTemplate.load(tmp_path, "no_such_name")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text("rag")
    (folder / "default.jinja").write_text("a file wins")
    assert _loaded(tmp_path).render([USER]) == "a file wins"
    (tmp_path / "tokenizer_config.json").unlink()
    (folder / "default.jinja").unlink()
    assert _loaded(tmp_path).render([USER]) == "rag"
    (folder / "other.jinja").write_text("other")
    with caplog.at_level("WARNING", logger="vllm_lite"):
        assert ChatTemplate.load(tmp_path) is None
    assert "name one with --chat-template: other, rag" in caplog.text


@pytest.mark.parametrize("place", ["source", "for_tools"])
def test_both_templates_are_bounded(tmp_path: Path, place: str) -> None:
    names = {"source": "chat_template.jinja", "for_tools": "additional_chat_templates/tool_use.jinja"}
    (tmp_path / "additional_chat_templates").mkdir()
    for each, name in names.items():
        (tmp_path / name).write_text("x" * (MAX_TEMPLATE_BYTES + 1 if each == place else 1))
    with pytest.raises(ModelError, match="at most 1048576 are read"):
        TemplateSource.load(tmp_path)


def _loaded(folder: Path) -> ChatTemplate:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template
