"""What a server reads of the model's folder, while the engine starts."""

from typing import Any

from vllm_lite.client.sampling import generation_defaults
from vllm_lite.client.stream import load_tokenizer
from vllm_lite.client.text.chat_template import TemplateSource
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.config import ResolvedConfig
from vllm_lite.server.calls.rendering import Renderer
from vllm_lite.server.config import ServeConfig


class Loaded:
    """See the module."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.tokenizer: Tokenizer | None = None
        self.renderer: Renderer | None = None
        self.defaults: dict[str, Any] = {}

    def load(self, resolved: ResolvedConfig) -> None:
        """Raises ModelError."""
        wanted = self._config.tokenizer and resolved.tokenizer
        self.tokenizer = load_tokenizer(wanted, resolved.tokenizer)
        template = TemplateSource.load(resolved.tokenizer, self._config.chat_template)
        self.renderer = None if template is None else Renderer(template)
        if self._config.generation_config == "auto":
            self.defaults = generation_defaults(resolved.model)

    def close(self) -> None:
        if self.renderer is not None:
            self.renderer.close()
