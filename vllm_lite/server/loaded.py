"""What a server reads of the model's folder, while the engine starts."""

from pathlib import Path
from typing import Any

import msgspec

from vllm_lite import log
from vllm_lite.client.chat_template import ChatTemplate
from vllm_lite.client.stream import load_tokenizer
from vllm_lite.client.tokenizer import Tokenizer
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ModelError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.config import ServeConfig

_GENERATION = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"}

logger = log.get(__name__)


class Loaded:
    """See the module."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.tokenizer: Tokenizer | None = None
        self.template: ChatTemplate | None = None
        self.defaults: dict[str, Any] = {}

    def load(self, resolved: EngineConfig) -> None:
        """Raises ModelError."""
        self.tokenizer = load_tokenizer(self._config.tokenizer, resolved.tokenizer or resolved.model)
        self.template = ChatTemplate.load(resolved.tokenizer or resolved.model, self._config.chat_template)
        if self._config.generation_config == "auto":
            self.defaults = generation_defaults(Path(resolved.model))


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Sampling defaults of the checkpoint's generation_config.json. Raises ModelError."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        found = {name: given[name] for name in _GENERATION if given.get(name) is not None}
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        found = {name: value for name, value in found.items() if name in SamplingParams.__struct_fields__}
        SamplingParams(**found)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: {error}; correct it, or give --generation-config vllm") from error
    if found:
        logger.info("sampling defaults of the model: %s (--generation-config vllm ignores them)", found)
    return found
