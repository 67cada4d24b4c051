"""Settings: the flags with which a server was started, and the settings of its computation, for the page."""

import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_lite.config import ResolvedConfig
from vllm_lite.server.config import SECRET, ServeConfig

COMPUTED = (
    *("device", "dtype", "quantization", "kv_cache_dtype", "model_impl", "attention_backend", "exact_activations"),
    *("tensor_parallel_size", "data_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("block_size", "enable_prefix_caching", "swap_space"),
)
"""Settings that determine the number formats, the kernels and the size of steps."""


def settings_of(config: ServeConfig, resolved: ResolvedConfig, kernels: Mapping[str, str] = {}) -> dict[str, Any]:
    """The command with its non-default flags, the resolved settings, and the `kernels` that the engine's workers
    report. API keys are left out."""
    words = ["vllm-lite serve"]
    for field in msgspec.structs.fields(ServeConfig):
        value = getattr(config, field.name)
        if field.name not in SECRET and value != _default(field):
            words.append(_flag(field.name, value))
    return {
        "command": " ".join(words),
        "kernels": kernels,
        "computed": {name: msgspec.to_builtins(getattr(resolved, name)) for name in COMPUTED},
    }


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    said = msgspec.to_builtins(value)
    text = msgspec.json.encode(said).decode() if isinstance(said, dict | list) else str(said)
    return f"{flag} {shlex.quote(text)}"
