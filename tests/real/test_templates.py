"""Real chat templates, of llama.cpp, vLLM and the tokenizers: prompts equal those of transformers' renderer."""

import json
from functools import lru_cache
from typing import Any

import pytest

from tests.real.cache import files_of
from vllm_lite.client.text.templates.chat_template import ChatTemplate
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.errors import RequestError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  What is 2 < 3 & é?\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "It is true. 🙂"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"sky": "clear"}'}
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "user": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": ([USER, ANSWER, USER], None),
    "tools": ([USER], [TOOL]),
    "call": ([USER, CALL, RESULT], [TOOL]),
}
FOLDERS = (("llama-cpp", "templates/*.jinja"), ("vllm", "*.jinja"))


def templates() -> dict[str, str]:
    """Every template in the cache by a name of its own."""
    found = {f"{folder}/{file.stem}": file.read_text() for folder, glob in FOLDERS for file in files_of(folder, glob)}
    for name in ("llama2", "llama3_1", "qwen3", "gptoss", "gpt4o", "deepseek_v3", "gemma3", "gpt35turbo", "claude"):
        for file in files_of(f"tokenizer-{name}", "tokenizer_config.json"):
            text = json.loads(file.read_text()).get("chat_template")
            if isinstance(text, str):
                found[f"tokenizer/{name}"] = text
    return found


TEMPLATES = templates()


def of_transformers(template: str, name: str, *, generate: bool) -> str | None:
    """The text; None where the template does not take these messages."""
    from transformers.utils.chat_template_utils import render_jinja_template

    chat, tools = CHATS[name]
    render: Any = render_jinja_template
    given = {"tools": tools, "chat_template": template, "add_generation_prompt": generate, **TOKENS}
    try:
        rendered = render(conversations=[chat], **given)[0]
    except Exception:  # whatever a template does wrong
        return None
    return str(rendered[0])


@lru_cache(maxsize=1)
def compiled(template: str) -> ChatTemplate:
    """The template as an engine has it, compiled once for all chats."""
    return ChatTemplate(TemplateSource(template, TOKENS))


def of_this_engine(template: str, name: str, *, generate: bool) -> str | None:
    chat, tools = CHATS[name]
    try:
        return compiled(template).render(chat, tools=tools, add_generation_prompt=generate)
    except RequestError:
        return None


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_match_transformers(template: str) -> None:
    """Compare the prompts of transformers that have the user's message: chats that a template refuses or drops as they
    are get through in another form here."""
    text = TEMPLATES[template]
    for name in CHATS:
        for generate in (True, False):
            before = of_transformers(text, name, generate=generate)
            if before is None or USER["content"].strip() not in before:
                continue
            found = of_this_engine(text, name, generate=generate)
            if found != before:  # some templates print the time
                assert found == of_transformers(text, name, generate=generate), name


def test_all_templates_were_tried() -> None:
    if not all(files_of(folder, glob) for folder, glob in FOLDERS):
        pytest.skip("llama-cpp or vllm is not in the cache; `make real` fetches them")
    assert len(TEMPLATES) >= 122
    taken = [name for name, text in TEMPLATES.items() if of_transformers(text, "user", generate=True)]
    assert len(taken) > 100
