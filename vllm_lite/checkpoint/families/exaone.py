"""EXAONE 4: norms after blocks and on Q and K; in models with sliding layers, only these have rope."""

from vllm_lite.checkpoint.families.common import FULL, SLIDING, Family, layer_types_of, rotating, windows_of
from vllm_lite.checkpoint.families.llama import LlamaConfig, llama_layers, llama_like, window_of
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ModelError


class Exaone4Config(LlamaConfig, kw_only=True):
    sliding_window_pattern: int | str | None = 4


def _exaone4(architecture: str, raw: Exaone4Config) -> ModelSpec:
    window, pattern = window_of(raw), raw.sliding_window_pattern
    if raw.layer_types is None and window is not None and (not isinstance(pattern, int) or pattern < 1):
        raise ModelError(f"sliding_window_pattern {pattern!r} is not supported without layer_types; give these")
    every = pattern if isinstance(pattern, int) else 1
    types = layer_types_of(raw, lambda layer: FULL if window is None or (layer + 1) % every == 0 else SLIDING)
    layers = llama_layers(raw, windows_of(types, window))
    if window is not None:
        layers = rotating(layers, [kind == SLIDING for kind in types])
    return llama_like(architecture, raw, layers, qk_norm="head")


FAMILIES = {"Exaone4ForCausalLM": Family(Exaone4Config, _exaone4)}
