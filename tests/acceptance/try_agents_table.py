"""The agents of try_agents.py: for each, its installation, its settings for address, key and model, and its command.

Everything else is as the agent comes. `permitted` is what lets it run a tool without asking, where nobody sits at a
terminal. In texts $url is the server, $model its model, $prompt the task, $home a folder of the agent's own and
$programs the folder of programs in this repository.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

KEY = "sk-any"
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Agent(NamedTuple):
    """`package` is the one whose version counts; `more` are installed with it. `env` and `files` (below its home) hold
    the address, the key and the model."""

    name: str
    registry: Literal["npm", "pypi"]
    package: str
    command: tuple[str, ...]
    permitted: str = ""
    env: Mapping[str, str] = _NOTHING
    files: Mapping[str, str] = _NOTHING
    more: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    """A command that runs first, for an agent that can only be configured in this way."""


_CODEX = {
    ".codex/config.toml": 'model = "$model"\nmodel_provider = "local"\n'
    '[model_providers.local]\nname = "local"\nbase_url = "$url/v1"\n'
    'env_key = "LOCAL_KEY"\nwire_api = "responses"\n'
}
AGENTS = (
    Agent(
        "Codex CLI",
        "npm",
        "@openai/codex",
        ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "$prompt"),
        "`--dangerously-bypass-approvals-and-sandbox`",
        env={"LOCAL_KEY": KEY},
        files=_CODEX,
    ),
    Agent(
        "Codex CLI, `-m gpt-5.5`",  # for which it has a custom tool, and searches for others
        "npm",
        "@openai/codex",
        ("codex", "exec", "-m", "gpt-5.5", "--dangerously-bypass-approvals-and-sandbox", "$prompt"),
        "`--dangerously-bypass-approvals-and-sandbox`",
        env={"LOCAL_KEY": KEY},
        files=_CODEX,
    ),
    Agent(
        "Claude Code",
        "npm",
        "@anthropic-ai/claude-code",
        ("claude", "-p", "$prompt", "--allowedTools", "Bash"),
        "`--allowedTools Bash`",
        env={"ANTHROPIC_BASE_URL": "$url", "ANTHROPIC_AUTH_TOKEN": KEY, "ANTHROPIC_MODEL": "$model"},
    ),
    Agent(
        "OpenCode",
        "npm",
        "opencode-ai",
        ("opencode", "run", "$prompt"),
        files={
            ".config/opencode/opencode.json": '{"provider": {"local": {"npm": "@ai-sdk/openai-compatible", '
            '"name": "local", "options": {"baseURL": "$url/v1", "apiKey": "sk-any"}, '
            '"models": {"$model": {"name": "$model"}}}}, '
            '"model": "local/$model"}'
        },
    ),
    Agent(
        "Qwen Code",
        "npm",
        "@qwen-code/qwen-code",
        ("qwen", "--yolo", "-p", "$prompt"),
        "`--yolo`",
        env={
            "OPENAI_BASE_URL": "$url/v1",
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": "$model",
            **dict.fromkeys(("https_proxy", "HTTPS_PROXY"), ""),  # it sends requests to this machine there as well
        },
    ),
    Agent(
        "aider",
        "pypi",
        "aider-chat",
        ("aider", "--model", "openai/$model", "--yes-always", "--message", "$prompt"),
        "`--yes-always`",
        env={"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": KEY},
    ),
    Agent(
        "Cline CLI",
        "npm",
        "cline",
        ("cline", "$prompt"),
        setup=("cline", "auth", "-p", "openai", "-k", KEY, "-m", "$model", "-b", "$url/v1"),
    ),
    Agent(
        "pi",
        "npm",
        "@mariozechner/pi-coding-agent",
        ("pi", "-p", "--provider", "local", "--model", "$model", "$prompt"),
        files={
            ".pi/agent/models.json": '{"providers": {"local": {"baseUrl": "$url/v1", "api": "openai-completions", '
            '"apiKey": "sk-any", "models": [{"id": "$model"}]}}}'
        },
    ),
    Agent(
        "Continue CLI",
        "npm",
        "@continuedev/cli",
        ("cn", "-p", "--auto", "--config", "$home/config.yaml", "$prompt"),
        "`--auto`",
        files={
            "config.yaml": "name: local\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: local\n    provider: openai\n"
            "    model: $model\n    apiBase: $url/v1\n    apiKey: sk-any\n    roles: [chat]\n"
        },
    ),
    Agent(
        "GitHub Copilot CLI",
        "npm",
        "@github/copilot",
        ("copilot", "--allow-all-tools", "-p", "$prompt"),
        "`--allow-all-tools`",
        env={
            "COPILOT_PROVIDER_BASE_URL": "$url/v1",
            "COPILOT_PROVIDER_API_KEY": KEY,
            "COPILOT_MODEL": "$model",
            "COPILOT_OFFLINE": "true",
        },
    ),
    Agent(
        "grok-cli",
        "npm",
        "@vibe-kit/grok-cli",
        ("grok", "-m", "$model", "-p", "$prompt"),
        env={"GROK_BASE_URL": "$url/v1", "GROK_API_KEY": KEY},
    ),
    Agent(
        "mini-swe-agent",
        "pypi",
        "mini-swe-agent",
        ("mini", "--yolo", "--exit-immediately", "-m", "openai/$model", "-t", "$prompt"),
        "`--yolo`",
        env={
            "OPENAI_API_BASE": "$url/v1",
            "OPENAI_API_KEY": KEY,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
    ),
    Agent(
        "deepagents-code",
        "pypi",
        "deepagents-code",
        ("dcode", "-n", "$prompt", "--model", "openai:$model", "--shell-allow-list", "all"),
        "`--shell-allow-list all`",
        env={"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": KEY},
    ),
    Agent(
        "Hermes Agent",
        "pypi",
        "hermes-agent",
        ("hermes", "chat", "-Q", "--yolo", "-q", "$prompt"),
        "`--yolo`",
        files={
            ".hermes/config.yaml": "model:\n  default: $model\n  provider: custom\n"
            "  base_url: $url/v1\n  api_key: sk-any\n"
        },
    ),
    Agent(
        "gptme",
        "pypi",
        "gptme",
        ("gptme", "-n", "-m", "local/$model", "$prompt"),
        "`-n`",
        env={"OPENAI_BASE_URL": "$url/v1"},
    ),
    Agent(
        "smolagents",
        "pypi",
        "smolagents",
        ("python", "$programs/smolagents_turn.py"),
        env={"TRY_URL": "$url", "TRY_MODEL": "$model", "TRY_PROMPT": "$prompt"},
        more=("openai",),
    ),
)
