"""Architecture name -> model class, imported when first used. A new family is a line in MODELS, and a file here if its
layers differ from all other families'; its config.json is read in checkpoint/families/."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.config_json import ENCODERS
from vllm_lite.checkpoint.fitting import NO_ADAPTERS, check_stages
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.checkpoint.quantization.on_load import Quantization, head_form
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.kernels.recurrent import Segments
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.pooler import Pooler
from vllm_lite.layers.quantized.exact import ExactForm
from vllm_lite.layers.quantized.select import form_for
from vllm_lite.layers.vision.tower import VisionTower
from vllm_lite.layers.weights.adapted_head import Which
from vllm_lite.layers.weights.lora import Adapters, stored_rows
from vllm_lite.layers.weights.weight_form import DENSE
from vllm_lite.layers.weights.weight_slot import WeightGroup
from vllm_lite.models.transformers.library import load_library
from vllm_lite.parallel.communicator import Communicator, SingleRank

MODELS = {
    "ApertusForCausalLM": "vllm_lite.models.apertus:Apertus",
    "ArceeForCausalLM": "vllm_lite.models.arcee:Arcee",
    "BloomForCausalLM": "vllm_lite.models.bloom:Bloom",
    "Cohere2ForCausalLM": "vllm_lite.models.cohere:Cohere2",
    "DeepseekV2ForCausalLM": "vllm_lite.models.deepseek:Deepseek",
    "DeepseekV3ForCausalLM": "vllm_lite.models.deepseek:Deepseek",
    "DeepseekV32ForCausalLM": "vllm_lite.models.deepseek:SparseDeepseek",
    "Ernie4_5ForCausalLM": "vllm_lite.models.llama:Llama",
    "Ernie4_5_MoeForCausalLM": "vllm_lite.models.ernie:ErnieMoe",
    "Exaone4ForCausalLM": "vllm_lite.models.exaone:Exaone4",
    "FalconForCausalLM": "vllm_lite.models.bloom:Falcon",
    "FalconH1ForCausalLM": "vllm_lite.models.falcon_h1:FalconH1",
    "GPT2LMHeadModel": "vllm_lite.models.gpt2:GPT2",
    "GPTNeoXForCausalLM": "vllm_lite.models.bloom:GPTNeoX",
    "Gemma2ForCausalLM": "vllm_lite.models.gemma:Gemma2",
    "Gemma3ForCausalLM": "vllm_lite.models.gemma:Gemma2",
    "Gemma3ForConditionalGeneration": "vllm_lite.models.gemma:Gemma2",
    "Gemma4ForCausalLM": "vllm_lite.models.gemma4:Gemma4",
    "Gemma4ForConditionalGeneration": "vllm_lite.models.gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "vllm_lite.models.gemma4:Gemma4",
    "Gemma4UnifiedForConditionalGeneration": "vllm_lite.models.gemma4:Gemma4",
    "GemmaForCausalLM": "vllm_lite.models.gemma:Gemma",
    "Glm4ForCausalLM": "vllm_lite.models.glm:Glm4",
    "Glm4MoeForCausalLM": "vllm_lite.models.llama:Llama",
    "Glm4MoeLiteForCausalLM": "vllm_lite.models.deepseek:Deepseek",
    "GlmForCausalLM": "vllm_lite.models.glm:Glm",
    "GlmMoeDsaForCausalLM": "vllm_lite.models.deepseek:SparseDeepseek",
    "GptOssForCausalLM": "vllm_lite.models.gpt_oss:GptOss",
    "GraniteForCausalLM": "vllm_lite.models.granite:Granite",
    "GraniteMoeHybridForCausalLM": "vllm_lite.models.granite:GraniteHybrid",
    "GraniteMoeForCausalLM": "vllm_lite.models.granite:Granite",
    "GraniteMoeSharedForCausalLM": "vllm_lite.models.granite:Granite",
    "GraniteSWAForCausalLM": "vllm_lite.models.granite:Granite",
    "HunYuanDenseV1ForCausalLM": "vllm_lite.models.hunyuan:HunYuan",
    "Idefics3ForConditionalGeneration": "vllm_lite.models.llama:Llama",
    "InternLM3ForCausalLM": "vllm_lite.models.llama:Llama",
    "KimiK25ForConditionalGeneration": "vllm_lite.models.deepseek:Deepseek",
    "Kimi_K25ForConditionalGeneration": "vllm_lite.models.deepseek:Deepseek",
    "Lfm2ForCausalLM": "vllm_lite.models.lfm2:Lfm2",
    "Lfm2MoeForCausalLM": "vllm_lite.models.lfm2:Lfm2",
    "Lfm3ForCausalLM": "vllm_lite.models.lfm3:Lfm3",
    "LlamaForCausalLM": "vllm_lite.models.llama:Llama",
    "LlavaForConditionalGeneration": "vllm_lite.models.llama:Llama",
    "LlavaNextForConditionalGeneration": "vllm_lite.models.llama:Llama",
    "LlavaOnevisionForConditionalGeneration": "vllm_lite.models.llama:Llama",
    "Mamba2ForCausalLM": "vllm_lite.models.nemotron_h:NemotronH",
    "MiniMaxM2ForCausalLM": "vllm_lite.models.llama:Llama",
    "Ministral3ForCausalLM": "vllm_lite.models.llama:Llama",
    "MinistralForCausalLM": "vllm_lite.models.llama:Llama",
    "Mistral3ForConditionalGeneration": "vllm_lite.models.deepseek:Mistral",
    "Mistral4ForCausalLM": "vllm_lite.models.deepseek:Deepseek",
    "MistralForCausalLM": "vllm_lite.models.llama:Llama",
    "MixtralForCausalLM": "vllm_lite.models.llama:Llama",
    "MuseGlimmerForConditionalGeneration": "vllm_lite.models.muse_glimmer:MuseGlimmer",
    "Olmo2ForCausalLM": "vllm_lite.models.olmo:Olmo",
    "Olmo3ForCausalLM": "vllm_lite.models.olmo:Olmo",
    "OlmoeForCausalLM": "vllm_lite.models.llama:Llama",
    "NemotronHForCausalLM": "vllm_lite.models.nemotron_h:NemotronH",
    "OPTForCausalLM": "vllm_lite.models.gpt2:OPT",
    "Phi3ForCausalLM": "vllm_lite.models.phi3:Phi3",
    "Qwen2ForCausalLM": "vllm_lite.models.llama:Llama",
    "Qwen2MoeForCausalLM": "vllm_lite.models.llama:Llama",
    "Qwen2VLForConditionalGeneration": "vllm_lite.models.llama:Llama",
    "Qwen2_5_VLForConditionalGeneration": "vllm_lite.models.llama:Llama",
    "Qwen3ForCausalLM": "vllm_lite.models.llama:Llama",
    "Qwen3MoeForCausalLM": "vllm_lite.models.llama:Llama",
    "Qwen3NextForCausalLM": "vllm_lite.models.qwen3_5:Qwen3_5",
    "Qwen3_5ForCausalLM": "vllm_lite.models.qwen3_5:Qwen3_5",
    "Qwen3_5ForConditionalGeneration": "vllm_lite.models.qwen3_5:Qwen3_5",
    "Qwen3_5MoeForCausalLM": "vllm_lite.models.qwen3_5:Qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "vllm_lite.models.qwen3_5:Qwen3_5",
    "Qwen3VLForConditionalGeneration": "vllm_lite.models.qwen_vl:Qwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "vllm_lite.models.qwen_vl:Qwen3VL",
    "SeedOssForCausalLM": "vllm_lite.models.llama:Llama",
    "SmolLM3ForCausalLM": "vllm_lite.models.llama:Llama",
    "SmolVLMForConditionalGeneration": "vllm_lite.models.llama:Llama",
    "Starcoder2ForCausalLM": "vllm_lite.models.starcoder2:Starcoder2",
}


_ENCODERS = {
    "Bert": "vllm_lite.models.bert:Bert",
    "Camembert": "vllm_lite.models.bert:Bert",
    "DistilBert": "vllm_lite.models.bert:DistilBert",
    "Gte": "vllm_lite.models.bert:Gte",
    "ModernBert": "vllm_lite.models.bert:ModernBert",
    "New": "vllm_lite.models.bert:Gte",
    "NomicBert": "vllm_lite.models.bert:NomicBert",
    "OpenAIPrivacyFilter": "vllm_lite.models.privacy_filter:PrivacyFilter",
    "Roberta": "vllm_lite.models.bert:Bert",
    "XLMRoberta": "vllm_lite.models.bert:Bert",
}
MODELS |= {
    name: _ENCODERS[stem] for name in ENCODERS for stem in _ENCODERS if name.startswith((f"{stem}M", f"{stem}F"))
}

TRANSFORMERS = "vllm_lite.models.transformers.model:TransformersModel"
"""Class for models without one of their own."""


class Model(Protocol):
    """Interface of a model for the worker. See `decoder.Decoder` for shapes and lifetimes."""

    spec: ModelSpec
    communicator: Communicator
    pooler: Pooler | None
    """Computes embeddings or scores from hidden states; None: the model only generates text."""
    tower: VisionTower[Any] | None
    """The vision tower; None: the model does not accept images."""
    own_columns: slice
    """The tokens of the vocabulary whose logits this rank computes."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None: ...

    def forward(
        self,
        batch: StepBatch,
        kv_caches: list[Any],
        backend: AttentionBackend,
        progress: Callable[[], None] = lambda: None,
    ) -> torch.Tensor: ...

    def empty_logits(self, num_rows: int) -> torch.Tensor: ...

    def logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, which: Which | None = None
    ) -> torch.Tensor: ...

    def gather_logits(self, out: torch.Tensor) -> None: ...

    def take_up(self, tokens: torch.Tensor, segments: Segments, kv_caches: list[Any]) -> None:
        """See hybrid.Hybrid.take_up; for models with recurrent layers."""
        ...

    def weight_groups(self) -> Iterator[WeightGroup]: ...

    def ignores(self, name: str) -> bool: ...

    def take_kv_scales(self, scales: Sequence[KVScales]) -> None: ...


class Sizes(NamedTuple):
    """Sizes of a model's tables and buffers, and settings of its linear layers."""

    max_model_len: int
    """Maximum number of positions of a sequence."""
    max_num_tokens: int
    """Maximum number of tokens of a step."""
    adapters: Adapters | None = None
    """Adapters with which linear layers register; None: no adapters are served."""
    exact_activations: bool = False
    """Whether products with quantized weights leave their input rows unrounded. Float32 models always do."""
    requantizes: bool = False
    """Whether `quantization` also applies to matrices that are quantized in the checkpoint, and to the LM head."""


def build(
    spec: ModelSpec,
    dtype: torch.dtype | str,
    device: torch.device | str,
    sizes: Sizes,
    quantization: Quantization | None = None,
    communicator: Communicator | None = None,
) -> Model:
    """Make the model that `spec` describes, or a rank's part of it, without its weights.

    `dtype` may be a name like "bfloat16". `quantization` applies to all matrix products, including the LM head; the
    embedding keeps the dtype. `communicator` connects the ranks that share the model; None: there is one rank.
    Raises ModelError for an architecture that is not in MODELS; ConfigError if `quantization` does not go with a
    quantized checkpoint, or the model cannot be split over the ranks or stages.
    """
    if spec.implementation == "native" and spec.architecture not in MODELS:
        raise ModelError(f"architecture {spec.architecture!r} is not supported; supported: {', '.join(MODELS)}")
    parts = make_parts(spec, dtype, device, sizes, quantization, communicator or SingleRank(torch.device(device)))
    return _model_class(spec)(parts, sizes.max_model_len, sizes.max_num_tokens)


def _model_class(spec: ModelSpec) -> type[Model]:
    """The class that computes the model."""
    found: type[Model] = resolve_name(MODELS[spec.architecture] if spec.implementation == "native" else TRANSFORMERS)
    return found


def make_parts(
    spec: ModelSpec,
    dtype: torch.dtype | str,
    device: torch.device | str,
    sizes: Sizes,
    quantization: Quantization | None,
    communicator: Communicator,
) -> Parts:
    """Make the factory of a model's layers. Raises as `build` does."""
    native = spec.implementation == "native"
    spec.check_tensor_parallel(communicator.shard)
    check_stages(spec, communicator.shard.stage)
    if not native:
        load_library()  # raises if it is missing
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    mixed = MixedForm.of(spec, quantization, torch.device(device).type)
    form = form_for(spec.quantization, quantization, mixed, again=sizes.requantizes)
    head = quantization if sizes.requantizes else head_form(quantization)
    parts = Parts(spec, torch_dtype, torch.device(device), communicator, form=form, head_quantization=head)
    if form != DENSE and (sizes.exact_activations or torch_dtype == torch.float32):
        parts = replace(parts, form=ExactForm(form), exact_rows=True)
    if sizes.adapters is not None:
        if not native:
            raise ConfigError(NO_ADAPTERS)
        sizes.adapters.stored_rows = partial(stored_rows, spec)
        parts = replace(parts, adapters=sizes.adapters)
    return parts


def examine(spec: ModelSpec, dtype: torch.dtype, max_model_len: int) -> ModelSpec:
    """Return `spec` completed by facts that only transformers' code has; a native model's spec is complete.

    For this, a model of transformers runs a step without weights. Raises ModelError, with its name, if it cannot be
    served, and ConfigError if transformers is not installed.
    """
    if spec.implementation == "native":
        return spec
    from vllm_lite.models.transformers.dry_run import as_observed

    sizes = Sizes(max_model_len, 1)
    model: Any = build(spec, dtype, "cpu", sizes)
    return as_observed(spec, model.seen)
