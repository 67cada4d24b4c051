"""/server_info and /tokenizer_info: for admins, or opened by a flag."""

import os
import platform
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite import __version__
from vllm_lite.client.text.templates import template_source
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http.application import gets
from vllm_lite.server.http.auth import require_admin
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.errors import ApiError

_FILES = {"vocab_file", "merges_file", "tokenizer_file", "name_or_path"}
"""Fields with paths of the machine on which a tokenizer was saved."""


class Information:
    """Answers /server_info and /tokenizer_info."""

    def __init__(self, config: ServeConfig, tokenizer: Tokenizer | None, template: str | None) -> None:
        """Raises ModelError for an unreadable tokenizer_config.json."""
        self._config = config
        self._tokenizer = None
        if config.enable_tokenizer_info_endpoint and tokenizer is not None:
            self._tokenizer = tokenizer_settings(tokenizer, template)

    def routes(self) -> list[Route]:
        tokenizer = {"/tokenizer_info": self.tokenizer} if self._config.enable_tokenizer_info_endpoint else {}
        return gets({"/server_info": self.server, **tokenizer})

    async def server(self, request: Request) -> Response:
        """Answer with the settings, without keys, and the environment; `config_format` is text or json, as in vLLM."""
        require_admin(request)
        form = request.query_params.get("config_format", "text")
        if form not in ("text", "json"):
            raise ApiError(400, f"config_format must be text or json, got {form!r}", "config_format")
        text = self._config.to_yaml()
        env = {name: value for name, value in os.environ.items() if name.startswith("VLLM_LITE_") and "KEY" not in name}
        system = {"python_version": platform.python_version(), "os": platform.platform(), "cpu_count": os.cpu_count()}
        return as_json(
            {
                "vllm_config": text if form == "text" else msgspec.yaml.decode(text),
                "vllm_env": env,
                "system_env": {"vllm_lite_version": __version__, **system},
            }
        )

    async def tokenizer(self, _: Request) -> Response:
        """Answer with the checkpoint's tokenizer settings, and the chat template in use."""
        if self._tokenizer is None:
            raise ApiError(404, "this model has no tokenizer")
        return as_json(self._tokenizer)


def tokenizer_settings(tokenizer: Tokenizer, template: str | None) -> dict[str, Any]:
    """Return the checkpoint's tokenizer_config.json, if any, without paths; tokens as texts."""
    found = template_source.read_json(Path(tokenizer.source).with_name(template_source.CONFIG_FILE))
    said = {name: _text(value) for name, value in found.items() if name not in _FILES}
    return {"tokenizer_class": "Tokenizer", **said, **({} if template is None else {"chat_template": template})}


def _text(value: Any) -> Any:
    """Replace tokens that are objects by their texts."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {name: _text(each) for name, each in value.items()}
    return [_text(each) for each in value] if isinstance(value, list) else value
