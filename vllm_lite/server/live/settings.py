"""Settings: the flags with which a server was started, and the settings of its computation, for the page."""

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_lite.config import ResolvedConfig
from vllm_lite.runtime.settings import flag_of
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
    flags = [flag_of(name, value) for name, value in config.changed().items() if name not in SECRET]
    return {
        "command": " ".join(["vllm-lite serve", *flags]),
        "kernels": kernels,
        "computed": {name: msgspec.to_builtins(getattr(resolved, name)) for name in COMPUTED},
    }
