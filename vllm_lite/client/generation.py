"""The sampling parameters that a checkpoint recommends, in its generation_config.json."""

from pathlib import Path
from typing import Any

import msgspec

from vllm_lite.errors import ModelError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.runtime import log

FILE = "generation_config.json"
_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")

logger = log.get(__name__)


def generation_defaults(folder: str | Path) -> dict[str, Any]:
    """Fields of SamplingParams; none if the checkpoint in `folder` has no such file. Raises ModelError."""
    path = Path(folder) / FILE
    if not path.is_file():
        return {}
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        found = {name: given[name] for name in _NAMES if given.get(name) is not None}
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        SamplingParams(**found)
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: {error}; correct it, or ignore it with generation_config 'vllm'") from error
    if found:
        logger.info("sampling defaults of the model: %s (generation_config 'vllm' ignores them)", found)
    return found
