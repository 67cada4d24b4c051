"""Compatibility of an engine's settings with a model's config.json, checked by both `serve` and `plan`."""

from collections.abc import Mapping
from typing import cast, get_args

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.quantization.spec import Awq, BlockScaled, Gguf, Gptq, Mixed, PackedInts, QuantizationSpec
from vllm_lite.checkpoint.shard import Shard, Stage
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError

MAX_COUNTED_EXPERTS = 16_384
"""Maximum number of experts with load metrics, as each is a series of /metrics. The largest models in wide use have 58
layers of 256."""
NO_ADAPTERS = "enable_lora is for models with a native implementation, not for those of transformers"

STORED: Mapping[str, tuple[type[QuantizationSpec], ...]] = {
    "awq": (Awq,),
    "gptq": (Gptq,),
    "compressed-tensors": (PackedInts, BlockScaled, Mixed),
    "gguf": (Gguf,),
    "fp8": (BlockScaled,),
    "int8": (BlockScaled,),
}
"""Forms of checkpoints, by their names as --quantization. The last two are also forms that dense weights can get."""
BYTES = {"fp8": "float8", "int8": "int8"}
"""Labels of the last two in checkpoints."""


def on_load(config: EngineConfig, spec: ModelSpec) -> Quantization | None:
    """The form that dense weights get on load. None if `quantization` is absent or names the checkpoint's own form.
    Raises ConfigError if it names the form of other checkpoints."""
    asked, own = config.quantization, spec.quantization
    if asked is None or (isinstance(own, STORED.get(asked, ())) and BYTES.get(asked) in (None, own.label)):
        return None
    if asked in get_args(Quantization):
        return cast(Quantization, asked)
    found = "not quantized" if own is None else own.label
    raise ConfigError(f"quantization {asked} is a form of checkpoints, and this one is {found}; leave it out")


def check_settings(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for settings with which the model cannot be served, naming an alternative."""
    if spec.implementation == "transformers" and config.deterministic:
        raise ConfigError(
            f"deterministic needs a native implementation, which {spec.architecture} does not have, or model_impl was "
            "set to transformers: its results may depend on the other sequences of a step"
        )
    if spec.implementation == "transformers" and config.enable_lora:
        raise ConfigError(NO_ADAPTERS)
    is_gguf = isinstance(spec.quantization, Gguf)
    if config.load_format == ("safetensors" if is_gguf else "gguf"):
        raise ConfigError(
            f"load_format {config.load_format} is not this checkpoint's, which is in "
            f"{'GGUF' if is_gguf else 'safetensors'}; leave it out"
        )
    spec.check_tensor_parallel(Shard.of(config))
    num_counted = sum(own.experts.routing.num_experts for own in spec.layers if own.experts is not None)
    if config.expert_load_metrics and num_counted > MAX_COUNTED_EXPERTS:
        raise ConfigError(
            f"expert_load_metrics counts at most {MAX_COUNTED_EXPERTS:,} experts, those of all layers together, and "
            f"this model has {num_counted:,}; leave it off"
        )


def check_stages(spec: ModelSpec, stage: Stage) -> None:
    """Raise ConfigError unless the model's layers can be divided among the stages."""
    count = stage.count
    if count == 1:
        return
    if count > spec.num_layers:
        raise ConfigError(f"the model's {spec.num_layers} layers cannot be shared out over {count} stages")
    why = None
    if spec.implementation != "native":
        why = "its code is that of transformers"
    elif spec.encoder is not None or spec.pooling is not None:
        why = "it makes vectors or scores"
    elif spec.layers_without_kv:
        why = "some of its layers attend to K and V of others"
    elif any(own.attention.index_size for own in spec.layers):
        why = "some of its layers attend to what others have chosen"
    elif spec.per_layer_size:
        why = "each of its layers has vectors of its own for each token"
    if why is not None:
        raise ConfigError(
            f"the layers of {spec.architecture} cannot be shared out over {count} stages, which send each other the "
            f"residual stream alone: {why}"
        )


def check_staged_settings(config: ResolvedConfig) -> None:
    """Raise ConfigError for settings that need all layers in one worker, if there are several stages."""
    method = config.speculative_config and config.speculative_config.method
    asked = {
        "enable_lora": config.enable_lora,
        "expert_load_metrics": config.expert_load_metrics,
        f"speculative_config's method {method}": method in ("draft_model", "eagle3", "mtp", "self"),
    }
    for name, is_on in asked.items():
        if is_on and config.num_stages > 1:
            raise ConfigError(f"{name} needs all layers in one stage, and {config.num_stages} share them; leave it off")
