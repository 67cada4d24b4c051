"""load_spec(): reads a checkpoint's config.json into a ModelSpec, by the family of its architecture.

Unsupported models are refused here, by name, before any weight is opened.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec

from vllm_lite.checkpoint.families.common import Family, as_ids
from vllm_lite.checkpoint.families.generic import read_generic
from vllm_lite.checkpoint.gguf.checkpoint import GgufCheckpoint
from vllm_lite.checkpoint.gguf.files import gguf_files
from vllm_lite.checkpoint.layer_specs.pooling import (
    HeadSpec,
    PoolingSpec,
    adjusted,
    classifier,
    embedder,
    read_modules,
    token_classifier,
    tokens_head,
)
from vllm_lite.checkpoint.layer_specs.qwen_vision import QwenVisionSpec
from vllm_lite.checkpoint.layer_specs.vision import VisionSpec, read_vision
from vllm_lite.checkpoint.model_spec import DTYPE_BYTES, LayerSpec, ModelSpec, make_kv_groups
from vllm_lite.checkpoint.quantization.read import older_quantization
from vllm_lite.checkpoint.tensors.fused_experts import as_stored
from vllm_lite.checkpoint.tensors.tied_head import has_own_head
from vllm_lite.checkpoint.typed_json import TokenId, convert, read_json
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.runtime.nested_settings import PoolingOptions

FAMILIES = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "BloomForCausalLM": "bloom",
    "Cohere2ForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "DeepseekV32ForCausalLM": "deepseek_sparse",
    "Ernie4_5ForCausalLM": "ernie",
    "Ernie4_5_MoeForCausalLM": "ernie",
    "Exaone4ForCausalLM": "exaone",
    "FalconForCausalLM": "bloom",
    "FalconH1ForCausalLM": "falcon_h1",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "bloom",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma3ForConditionalGeneration": "gemma",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GemmaForCausalLM": "gemma",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "Glm4ForCausalLM": "glm",
    "Glm4MoeForCausalLM": "glm_moe",
    "Glm4MoeLiteForCausalLM": "glm_moe_lite",
    "GlmForCausalLM": "glm",
    "GlmMoeDsaForCausalLM": "deepseek_sparse",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite",
    "GraniteMoeSharedForCausalLM": "granite",
    "GraniteSWAForCausalLM": "granite_swa",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "Idefics3ForConditionalGeneration": "idefics3",
    "InternLM3ForCausalLM": "llama",
    "KimiK25ForConditionalGeneration": "deepseek",
    "Kimi_K25ForConditionalGeneration": "deepseek",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "Lfm3ForCausalLM": "lfm3",
    "LlamaForCausalLM": "llama",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava",
    "LlavaOnevisionForConditionalGeneration": "llava",
    "Mamba2ForCausalLM": "mamba2",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "Mistral4ForCausalLM": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "MuseGlimmerForConditionalGeneration": "muse_glimmer",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmo",
    "NemotronHForCausalLM": "nemotron_h",
    "OPTForCausalLM": "gpt2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen_moe",
    "Qwen2VLForConditionalGeneration": "qwen",
    "Qwen2_5_VLForConditionalGeneration": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "Qwen3VLForConditionalGeneration": "qwen",
    "Qwen3VLMoeForConditionalGeneration": "qwen_moe",
    "SeedOssForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""Architecture of a decoder -> module of `families`."""
ENCODERS = {
    f"{stem}{ending}": module
    for stem, module in (
        ("Bert", "bert"),
        ("Roberta", "bert"),
        ("XLMRoberta", "bert"),
        ("Camembert", "bert"),
        ("DistilBert", "distilbert"),
        ("ModernBert", "modernbert"),
        ("NomicBert", "nomic_bert"),
        ("Gte", "gte"),
        ("New", "gte"),
    )
    for ending in ("Model", "ForMaskedLM", "ForSequenceClassification")
}
"""Architecture of an encoder -> module of `families`: without a head, with an LM head, which is not read, or with a
classification head."""
ENCODERS |= {
    f"{stem}ForTokenClassification": ENCODERS[f"{stem}Model"]
    for stem in ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "ModernBert")
}
ENCODERS["OpenAIPrivacyFilterForTokenClassification"] = "privacy_filter"
CAUSAL, CLASSIFIER, HEADLESS = "ForCausalLM", "ForSequenceClassification", "Model"
FOR_TOKENS = "ForTokenClassification"
"""Endings of the names of a decoder's architectures: with an LM head, with a head for text labels, without a head, with
a head for token labels."""
ENDINGS = ("ForConditionalGeneration", "ForMaskedLM", CAUSAL, CLASSIFIER, FOR_TOKENS, HEADLESS)
NO_OPTIONS = PoolingOptions()
CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
OUTER_KEYS = ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
"""Outer keys of a multimodal model's config.json. They override its text_config, into which transformers writes
defaults: one EOS id for a model with two, or an untied head."""


class _RawEnds(msgspec.Struct):
    eos_token_id: TokenId | list[TokenId] | None = None


def load_spec(path: str | Path, model_impl: str = "auto", options: PoolingOptions = NO_OPTIONS) -> ModelSpec:
    """Read `config.json` of the checkpoint folder `path`. End tokens of `generation_config.json` are added. A head
    declared as tied is not if the files have another one. A GGUF file, or a folder with one, has all of this itself.

    `model_impl`: "native" for a model class of this package, or "transformers"; "auto" takes transformers' if there is
    no native one. `options` are the user's pooling options, and override config.json.

    Raises ModelError if a file is missing or damaged, a value is invalid, or the model is not supported.
    """
    folder = Path(path)
    if (gguf := GgufCheckpoint.find(folder)) is not None:
        return _gguf_spec(gguf, options)
    if folder.is_file():
        raise ModelError(f"{folder}: no GGUF file; a checkpoint is the folder that has the weights and a config.json")
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; a checkpoint folder with a config.json is expected")
    spec = read_json(folder / CONFIG_FILE, partial(_parse_folder, folder, model_impl, options))
    if spec.tie_word_embeddings and has_own_head(folder):
        spec = msgspec.structs.replace(spec, tie_word_embeddings=False, tied_in_config_only=True)
    if spec.experts is not None:
        spec = as_stored(spec, folder)
    if spec.implementation == "transformers":
        spec = msgspec.structs.replace(spec, folder=str(folder))
    ends = dict.fromkeys((*_generation_ends(folder), *spec.eos_token_ids))
    return msgspec.structs.replace(spec, eos_token_ids=tuple(ends))


def _gguf_spec(gguf: GgufCheckpoint, options: PoolingOptions) -> ModelSpec:
    """Read the model and its pooler from a GGUF file."""
    spec, modules = gguf.spec(partial(_parse_config, "native", None)), gguf.modules()
    if spec.pooling is None:
        return _converted(spec, {}, modules, options)
    pooling = embedder({}, modules, spec.pooling.kind, generates=False)
    return msgspec.structs.replace(spec, pooling=adjusted(pooling, options))


def end_ids_by_file(path: str | Path, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Map each file that names end tokens to their ids, for the checkpoint at `path` with the spec `spec`. Ids in no
    file, from the architecture's config class or the user, are under the architecture's name; ids that the user
    overrides are left out. Raises ModelError."""
    folder = Path(path)
    if files := gguf_files(folder):
        found = {files[0].name: spec.eos_token_ids}
    else:
        found = {GENERATION_FILE: _generation_ends(folder), CONFIG_FILE: read_json(folder / CONFIG_FILE, _config_ends)}
    named = {token for ids in found.values() for token in ids}
    found[spec.architecture] = tuple(token for token in spec.eos_token_ids if token not in named)
    in_force = {name: tuple(token for token in ids if token in spec.eos_token_ids) for name, ids in found.items()}
    return {name: ids for name, ids in in_force.items() if ids}


def _parse_folder(folder: Path, model_impl: str, options: PoolingOptions, raw_json: Any) -> ModelSpec:
    """Read the model and its pooler from config.json and the files beside it."""
    raw = raw_json | (options.hf_overrides or {}) if isinstance(raw_json, dict) else raw_json
    name = _architecture(raw)
    modules = read_modules(folder)
    base = _base_of(name)
    if base is None:
        spec = _seeing(_parse_config(model_impl, older_quantization(folder), raw), raw, folder)
        if spec.encoder is None:
            return _converted(spec, raw, modules, options)
        kind, head = ("cls", None) if spec.pooling is None else (spec.pooling.kind, spec.pooling.head)
        if head is None:
            pooling = embedder(raw, modules, kind, generates=False)
        elif name is not None and name.endswith(FOR_TOKENS):
            pooling = token_classifier(raw, head, folder, spec.pooling.labels if spec.pooling else ())
        else:
            pooling = classifier(raw, head, kind)
    else:  # a decoder without an LM head, with the tensor names of one whose head is tied
        headless = raw | {"architectures": [base], "tie_word_embeddings": True}
        spec = _parse_config("native", older_quantization(folder), headless)
        if base.removesuffix(CAUSAL) + HEADLESS == name:
            pooling = embedder(raw, modules, "last", generates=False)
        elif base.removesuffix(CAUSAL) + FOR_TOKENS == name:
            pooling = token_classifier(raw, HeadSpec(output_bias=True), folder)
        elif (head := tokens_head(raw, folder)) is not None:  # config.json says whether the LM head is tied
            tied = bool(raw.get("tie_word_embeddings", spec.tie_word_embeddings))
            spec = msgspec.structs.replace(spec, tie_word_embeddings=tied)
            pooling = classifier({"num_labels": 1}, head, "last")
            pooling = msgspec.structs.replace(pooling, makes_pairs="template")
        else:
            pooling = classifier(raw, HeadSpec(), "last")
    longest = spec.max_position_embeddings
    if modules is not None and modules.max_seq_length is not None:
        longest = min(longest, modules.max_seq_length)
    pooling = adjusted(pooling, options)
    return msgspec.structs.replace(spec, pooling=pooling, max_position_embeddings=longest)


def _seeing(spec: ModelSpec, raw: Any, folder: Path) -> ModelSpec:
    """Add the vision tower to the spec, if the model has one with a native implementation."""
    vision = read_vision(spec.architecture, raw, folder, spec.hidden_size) if spec.implementation == "native" else None
    if vision is None:
        return spec
    if isinstance(vision, QwenVisionSpec):
        _check_axes(spec, mixed=vision.mixes_axes)
    if vision.num_deep >= spec.num_layers:
        raise ModelError(
            f"vision_config: deepstack_visual_indexes has {vision.num_deep} layers, and the text model must have more; "
            f"it has {spec.num_layers}"
        )
    extra = spec.extra_parameters + vision.num_parameters
    if vision.whole_in != "no layers":
        layers = tuple(_with_whole_images(layer, vision) for layer in spec.layers)
        spec = msgspec.structs.replace(spec, layers=layers, kv_groups=make_kv_groups(layers))
    return msgspec.structs.replace(spec, vision=vision, extra_parameters=extra)


def _with_whole_images(layer: LayerSpec, vision: VisionSpec) -> LayerSpec:
    attention = layer.attention
    whole = msgspec.structs.replace(attention, whole_images=vision.whole_images(attention.window))
    return msgspec.structs.replace(layer, attention=whole)


def _check_axes(spec: ModelSpec, *, mixed: bool) -> None:
    """Raise ModelError unless the layers' rope has three axes, whose pairs are `mixed` or side by side."""
    for axes in {layer.rope.axes for layer in spec.layers if layer.rope is not None}:
        if axes is None or (axes == tuple(sorted(axes))) is mixed:
            raise ModelError(
                "rope_parameters: images need mrope_section, one for each axis, with mrope_interleaved "
                f"{str(mixed).lower()}"
            )


def _converted(spec: ModelSpec, raw: dict[str, Any], modules: Any, options: PoolingOptions) -> ModelSpec:
    """Add a pooler to a generating model if its files describe one, or if the user's `convert` is embed; never if it is
    None."""
    if options.convert is None or (modules is None and options.convert != "embed"):
        return spec
    pooling: PoolingSpec = adjusted(embedder(raw, modules, "last", generates=True), options)
    return msgspec.structs.replace(spec, pooling=pooling)


def _architecture(raw_json: Any) -> str | None:
    names = raw_json.get("architectures") if isinstance(raw_json, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) else None


def _base_of(name: str | None) -> str | None:
    """Generating architecture of a decoder that classifies texts or tokens or has no head; None for all others."""
    for ending in (CLASSIFIER, FOR_TOKENS, HEADLESS):
        if name is not None and name.endswith(ending) and name not in ENCODERS:
            base = name.removesuffix(ending) + CAUSAL
            return base if base in FAMILIES else None
    return None


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
    """Parse a config.json. The architecture is checked first, as a foreign model's missing keys would be a misleading
    error. `older`: the quantization_config from another file, if config.json has none."""
    if older is not None and isinstance(raw_json, dict) and not raw_json.get("quantization_config"):
        raw_json = raw_json | {"quantization_config": older}
    name = _architecture(raw_json)
    families = FAMILIES | ENCODERS
    if name is None or (name not in families and model_impl == "native"):
        names = raw_json.get("architectures") if isinstance(raw_json, dict) else None
        raise ModelError(f"architectures {names!r} is not supported; supported: {_listed(families)}")
    if name not in families or (model_impl == "transformers" and name in FAMILIES):
        return read_generic(name, without_blanks(_text_part(raw_json)))
    if raw_json.get("is_causal") is False and name in FAMILIES:
        raise ModelError("is_causal false is not supported: the tokens of a decoder see those before them only")
    family: Family = resolve_name(f"vllm_lite.checkpoint.families.{families[name]}:FAMILIES")[name]
    text = without_blanks(_text_part(raw_json))
    kind = text.get("model_type")
    family = family.by_type.get(kind, family) if isinstance(kind, str) else family
    named = {family.aliases.get(key, key): value for key, value in text.items()}
    return family.read(name, convert(named, family.config))


def _listed(architectures: Iterable[str]) -> str:
    """List architectures for an error, grouped by ending to shorten the sentence."""
    by_ending: dict[str, list[str]] = {}
    for name in architectures:
        stem, ending = next((name.removesuffix(end), end) for end in (*ENDINGS, "") if name.endswith(end))
        by_ending.setdefault(ending, []).append(stem)
    return "; ".join(f"{' '.join(stems)}{f' (each {ending})' * bool(ending)}" for ending, stems in by_ending.items())


def _text_part(raw_json: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json for the text model: `text_config` if the model has more parts."""
    inner = raw_json.get("text_config")
    if inner is None:
        return raw_json
    if not isinstance(inner, dict):
        raise ModelError(f"text_config {inner!r} is not an object; it must be like the config.json of a text model")
    return inner | {key: raw_json[key] for key in OUTER_KEYS if raw_json.get(key) is not None}


def _generation_ends(folder: Path) -> tuple[int, ...]:
    file = folder / GENERATION_FILE
    return read_json(file, _ends) if file.exists() else ()


def _config_ends(raw_json: Any) -> tuple[int, ...]:
    return _ends(_text_part(raw_json) if isinstance(raw_json, dict) else raw_json)


def _ends(raw_json: Any) -> tuple[int, ...]:
    raw = without_blanks(raw_json) if isinstance(raw_json, dict) else raw_json
    return as_ids(convert(raw, _RawEnds).eos_token_id)


# ---- Placeholder values in config.json that mean that there is none, as several tools write them.


IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = ("dtype", "torch_dtype")


def without_blanks(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config with token ids below 0, windows of less than one token and the dtype "auto" replaced by null.

    "auto" means the same as no dtype.
    """
    changed: dict[str, Any] = {}
    for key in IDS:
        value = raw.get(key)
        if _is_below(value, 0):
            changed[key] = None
        elif isinstance(value, list):
            changed[key] = [each for each in value if not _is_below(each, 0)] or None
    if _is_below(raw.get("sliding_window"), 1):
        changed["sliding_window"] = None
    changed |= {key: None for key in DTYPES if raw.get(key) == "auto"}
    return raw | changed if changed else raw


def _is_below(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < least
