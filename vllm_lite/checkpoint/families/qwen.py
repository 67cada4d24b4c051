"""Qwen2, Qwen2.5 and Qwen3: windows from some layer on, biases of Q, K and V or norms on Q and K.

For models that also take images (VL), this is the text part. Their rope has three axes, equal for text;
`layer_specs.vision` reads the tower.
"""

from typing import Annotated

from msgspec import Meta

from vllm_lite.checkpoint.families.common import FULL, SLIDING, Family, layer_types_of, windows_of
from vllm_lite.checkpoint.families.llama import LlamaConfig, llama_layers, llama_like, window_of
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ModelError

QWEN3_HEAD_DIM = 128


class QwenConfig(LlamaConfig, kw_only=True):
    max_window_layers: Annotated[int, Meta(ge=0)] = 28


def qwen_windows(raw: QwenConfig) -> list[int | None]:
    """The window of each layer: use_sliding_window enables sliding_window, from layer max_window_layers on."""
    window = window_of(raw) if raw.use_sliding_window else None
    if window is None and SLIDING in (raw.layer_types or ()):
        raise ModelError(f"layer_types has {SLIDING}, but sliding_window or use_sliding_window is off")
    first = raw.max_window_layers if window is not None else raw.num_hidden_layers
    return windows_of(layer_types_of(raw, lambda layer: FULL if layer < first else SLIDING), window)


def _qwen2(architecture: str, raw: QwenConfig) -> ModelSpec:
    """Read a Qwen2, whose config.json does not name its biases."""
    layers = llama_layers(raw, qwen_windows(raw))
    return llama_like(architecture, raw, layers, qkv_bias=True, output_bias=False)


def _qwen3(architecture: str, raw: QwenConfig) -> ModelSpec:
    layers = llama_layers(raw, qwen_windows(raw), head_dim=QWEN3_HEAD_DIM)
    return llama_like(architecture, raw, layers, qk_norm="head")


FAMILIES = {
    "Qwen2ForCausalLM": Family(QwenConfig, _qwen2),
    "Qwen2VLForConditionalGeneration": Family(QwenConfig, _qwen2),
    "Qwen2_5_VLForConditionalGeneration": Family(QwenConfig, _qwen2),
    "Qwen3ForCausalLM": Family(QwenConfig, _qwen3),
    "Qwen3VLForConditionalGeneration": Family(QwenConfig, _qwen3),
}
