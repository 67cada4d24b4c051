"""Real chat templates: the format that is chosen for each reads the call that the template renders."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.real.cache import folder_of
from tests.real.test_templates import TEMPLATES
from tests.response_transcripts import pieces_of, read
from vllm_lite.client.text.response.choose import choose
from vllm_lite.client.text.templates.chat_template import ChatTemplate
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.errors import RequestError

SOURCES = {name.rpartition("/")[2].removeprefix("tool_chat_template_"): text for name, text in TEMPLATES.items()}
NO_TOKENS: Any = SimpleNamespace(added_tokens={}, special_ids=())
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Looks the weather up.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city."},
                "days": {"type": "integer", "description": "How many days."},
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": "Paris", "days": 3}
USER: dict[str, Any] = {"role": "user", "content": "What is the weather like in Paris?"}
CALLING: dict[str, Any] = {"role": "assistant", "content": ""}
EXPECTED = {
    "Apertus-8B-Instruct": ("apertus", "apertus"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "GigaChat3-10B-A1.8B": ("gigachat3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", None),
    "GLM-4.6": ("glm45", "glm45"),
    "LFM2.5-8B-A1B": ("lfm2", "qwen3"),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", None),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "MiniMax-M3": ("minimax_m3", "minimax_m3"),
    "granite_20b_fc": ("granite_20b_fc", None),
    "meetkai-functionary-medium-v3.1": ("functionary_v31", None),
    "meetkai-functionary-medium-v3.2": ("functionary_v32", None),
    "muse-glimmer": ("muse_glimmer", "muse_glimmer"),
    "muse_glimmer": ("muse_glimmer", "muse_glimmer"),
    "tencent-Hy3": ("hy_v3", "hy_v3"),
    "upstage-Solar-Open-100B": ("solar_open", "solar_open"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_json", "qwen3"),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "deepseek_v32"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "deepseek_v4"),
    "fireworks-ai-llama-3-firefunction-v2": ("phi4_mini_json", None),
    "functiongemma": ("functiongemma", None),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "hunyuan_a13b": ("hunyuan_a13b", "hunyuan_a13b"),
    "internlm2_tool": ("internlm", None),
    "llama4_pythonic": ("pythonic", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "mistral"),
    "moonshotai-Kimi-K2": ("kimi_k2", "kimi_k2"),
    "openai-gpt-oss-120b": ("openai", "openai"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "qwen3"),
    "phi4_mini": ("phi4_mini_json", None),
    "xlam_llama": ("xlam", None),
    "xlam_qwen": ("xlam", None),
}
"""Template -> formats of calls and of reasoning."""
OTHERWISE = {
    "gemma3_pythonic": "no comma between two arguments",
    "llama3.2_pythonic": "texts without quotes",
    "toolace": "texts without quotes",
    "phi4_mini": "arguments as Python prints them, without the word before the calls",
}
"""Templates that do not render calls as they ask the model to write them."""


def _common(one: str, other: str) -> str:
    """The text that both begin with."""
    return next((one[:end] for end in range(len(one), 0, -1) if other.startswith(one[:end])), "")


def _with_call(template: ChatTemplate, arguments: Any) -> str | None:
    """Render a call, whose arguments some templates take as text. None if the template raises an error."""
    call = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    try:
        return template.render([USER, CALLING | {"tool_calls": [call]}], tools=[TOOL], add_generation_prompt=False)
    except RequestError:
        return None


def rendered_call(template: ChatTemplate) -> tuple[str, str] | None:
    """Render a prompt and the message behind it that calls. None if the template takes no calls, or leaves them out."""
    try:
        ending, plain = (template.render([USER], tools=[TOOL], add_generation_prompt=ends) for ends in (True, False))
        full = _with_call(template, ARGUMENTS) or _with_call(template, json.dumps(ARGUMENTS))
    except RequestError:
        return None
    if full is None:
        return None
    prompt = ending if full.startswith(ending) else _common(plain, full)
    message = full[len(prompt) :]
    return (prompt, message) if "get_weather" in message else None


@pytest.mark.parametrize("name", SOURCES)
def test_a_call_rendered_by_a_template_is_parsed_back(name: str) -> None:
    source = SOURCES[name]
    choice = choose(None, NO_TOKENS, template=source)
    if name in EXPECTED:
        assert (choice.calls, choice.reasoning) == EXPECTED[name]
    rendered = rendered_call(ChatTemplate(TemplateSource(source, {"bos_token": "<s>", "eos_token": "</s>"})))
    if rendered is None or choice.calls is None or name in OTHERWISE:
        return
    assert choice.format is not None
    prompt, text = rendered
    message = read(choice.format, pieces_of(text, {}), prompt, [TOOL])
    assert [(called, json.loads(arguments)) for called, arguments in message.calls] == [("get_weather", ARGUMENTS)]


def test_every_template_that_is_expected_was_looked_at() -> None:
    if folder_of("llama-cpp") is None or folder_of("vllm") is None:
        pytest.skip("`make real` fetches the templates")
    assert not EXPECTED.keys() - SOURCES.keys()
