"""A checkpoint's config.json, read into a ModelSpec by the family of its architecture.

What is not supported is refused here, by name, before any weight is opened.
"""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec

from vllm_lite.checkpoint.families.common import Family, as_ids
from vllm_lite.checkpoint.families.generic import read_generic
from vllm_lite.checkpoint.fused_experts import as_stored
from vllm_lite.checkpoint.gguf.checkpoint import GgufCheckpoint
from vllm_lite.checkpoint.model_spec import DTYPE_BYTES, ModelSpec
from vllm_lite.checkpoint.quantization.older import older_quantization
from vllm_lite.checkpoint.tied_head import has_own_head
from vllm_lite.checkpoint.typed_json import TokenId, convert, read_json
from vllm_lite.errors import ConfigError, ModelError

FAMILIES = {
    "BloomForCausalLM": "bloom",
    "Cohere2ForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Ernie4_5ForCausalLM": "ernie",
    "Ernie4_5_MoeForCausalLM": "ernie",
    "Exaone4ForCausalLM": "exaone",
    "FalconForCausalLM": "bloom",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "bloom",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma3ForConditionalGeneration": "gemma",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm",
    "Glm4MoeForCausalLM": "glm_moe",
    "GlmForCausalLM": "glm",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite",
    "GraniteMoeSharedForCausalLM": "granite",
    "InternLM3ForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmo",
    "OPTForCausalLM": "gpt2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen_moe",
    "Qwen2VLForConditionalGeneration": "qwen",
    "Qwen2_5_VLForConditionalGeneration": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen_moe",
    "Qwen3VLForConditionalGeneration": "qwen",
    "SeedOssForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""Architecture -> module of `families`."""
OUTER_KEYS = ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
"""What a multimodal model says for all of it. It wins over its text part, into which transformers writes defaults: an
EOS id where the model has two, or that the head is not tied."""


class _RawGenerationConfig(msgspec.Struct):
    eos_token_id: TokenId | list[TokenId] | None = None


def load_spec(path: str | Path, model_impl: str = "auto") -> ModelSpec:
    """Read `config.json` (and the EOS ids of `generation_config.json`) of the checkpoint folder `path`. A head that it
    calls tied is not if the files hold another. A GGUF file, or a folder with one, says all that itself.

    `model_impl`: whether a class of this package computes the model ("native") or one of "transformers"; with "auto"
    the latter does where there is no native one.

    Raises ModelError when a file is missing or damaged, a value is wrong, or the model is not supported.
    """
    folder = Path(path)
    if (gguf := GgufCheckpoint.find(folder)) is not None:
        return gguf.spec(partial(_parse_config, "native", None))
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; a checkpoint folder with a config.json is expected")
    spec = read_json(folder / "config.json", partial(_parse_config, model_impl, older_quantization(folder)))
    if spec.tie_word_embeddings and has_own_head(folder):
        spec = msgspec.structs.replace(spec, tie_word_embeddings=False, tied_in_config_only=True)
    if spec.experts is not None:
        spec = as_stored(spec, folder)
    if spec.implementation == "transformers":
        spec = msgspec.structs.replace(spec, folder=str(folder))
    if (folder / "generation_config.json").exists():
        eos = read_json(folder / "generation_config.json", _parse_generation_config)
        spec = msgspec.structs.replace(spec, eos_token_ids=eos) if eos else spec
    return spec


def resolve_dtype(requested: str, spec: ModelSpec) -> str:
    """The dtype to compute in: `requested` itself, or for "auto" the checkpoint's own.

    Raises ConfigError for a name that is neither.
    """
    if requested == "auto":
        return spec.dtype
    if requested not in DTYPE_BYTES:
        raise ConfigError(f"dtype {requested!r} is not supported; use auto, {', '.join(DTYPE_BYTES)}")
    return requested


def _parse_config(model_impl: str, older: dict[str, Any] | None, raw_json: Any) -> ModelSpec:
    """Check the architecture before all else: a foreign model's missing keys would be the wrong thing to report.
    `older`: the quantization_config where config.json has none."""
    if older is not None and isinstance(raw_json, dict) and not raw_json.get("quantization_config"):
        raw_json = raw_json | {"quantization_config": older}
    names = raw_json.get("architectures") if isinstance(raw_json, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or (name not in FAMILIES and model_impl == "native"):
        raise ModelError(f"architectures {names!r} is not supported; supported: {', '.join(FAMILIES)}")
    if model_impl == "transformers" or name not in FAMILIES:
        return read_generic(name, _text_part(raw_json))
    family: Family = resolve_name(f"vllm_lite.checkpoint.families.{FAMILIES[name]}:FAMILIES")[name]
    text = _text_part(raw_json)
    named = {family.aliases.get(key, key): value for key, value in text.items()}
    return family.read(name, convert(named, family.config))


def _text_part(raw_json: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the model that writes text: `text_config` where the model is more than that."""
    inner = raw_json.get("text_config")
    if inner is None:
        return raw_json
    if not isinstance(inner, dict):
        raise ModelError(f"text_config {inner!r} is not an object; it must be what config.json is for a model of text")
    return inner | {key: raw_json[key] for key in OUTER_KEYS if raw_json.get(key) is not None}


def _parse_generation_config(raw_json: Any) -> tuple[int, ...]:
    return as_ids(convert(raw_json, _RawGenerationConfig).eos_token_id)
