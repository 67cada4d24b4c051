"""MTP heads: further layers of a checkpoint, which predict one more token from a hidden state. No torch.

From the hidden state h of a token after the model's last norm, and the next token t, a head predicts the one after t:

    x = fc(concat(norm(embedding(t)), norm(h)));  y = norm(layer(x));  logits = the model's own head of y

and y replaces h in the prediction of the next one. The layer has full attention like the model's, with its own K and V;
if the model's layers have one block each, it is two layers, attention and an MLP. Described for DeepSeek V3
(https://arxiv.org/abs/2412.19437, section 2.2); other families have other names.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.errors import ConfigError


class MTPNames(NamedTuple):
    """A checkpoint's tensor names for the parts of a head."""

    embedding_norm: str
    hidden_norm: str
    fc: str
    norm: str
    layers: tuple[str, ...]
    """Prefixes of the names of the layers' tensors."""


OF_QWEN = MTPNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", ("mtp.layers.0.",))
OF_NEMOTRON = MTPNames(
    "mtp.layers.0.enorm",
    "mtp.layers.0.hnorm",
    "mtp.layers.0.eh_proj",
    "mtp.layers.1.final_layernorm",
    ("mtp.layers.0.", "mtp.layers.1."),
)
OF_DEEPSEEK = MTPNames("enorm", "hnorm", "eh_proj", "shared_head.norm", ("",))
"""Names below that of the layer after the last one. Its `embed_tokens` and `shared_head.head` are copies of the
model's."""
FAMILIES = {
    "DeepseekV3ForCausalLM": OF_DEEPSEEK,
    "Glm4MoeForCausalLM": OF_DEEPSEEK,
    "Glm4MoeLiteForCausalLM": OF_DEEPSEEK,
    "LlamaForCausalLM": OF_QWEN,
    "NemotronHForCausalLM": OF_NEMOTRON,
    "Qwen3NextForCausalLM": OF_QWEN,
    "Qwen3_5ForCausalLM": OF_QWEN,
    "Qwen3_5ForConditionalGeneration": OF_QWEN,
    "Qwen3_5MoeForCausalLM": OF_QWEN,
    "Qwen3_5MoeForConditionalGeneration": OF_QWEN,
}
"""Architectures with supported heads. Llama's own checkpoints have none: those trained by
examples/demo_model/train_head.py have Qwen's names."""


def head_names(spec: ModelSpec) -> MTPNames:
    """Tensor names of the head for `spec`. Raises ConfigError for an architecture without one."""
    if spec.architecture not in FAMILIES or spec.implementation != "native":
        raise ConfigError(
            f"speculative_config: method mtp drafts with a head that the checkpoint has, and none is known of "
            f"{spec.architecture}; known: {', '.join(FAMILIES)}; use method suffix, or a draft model"
        )
    names = FAMILIES[spec.architecture]
    if names is not OF_DEEPSEEK:
        return names
    at = f"model.layers.{spec.num_layers}."
    embedding_norm, hidden_norm, fc, norm = (f"{at}{name}" for name in names[:-1])
    return MTPNames(embedding_norm, hidden_norm, fc, norm, (at,))


def head_layers(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Layers of the head: one like the model's last attention layer and, if that has no MLP, one like its last MLP or
    experts layer. Raises ConfigError for a model without a head."""
    names = head_names(spec)
    attending = next(layer for layer in reversed(spec.layers) if layer.recurrent is None and layer.keeps_kv)
    if len(names.layers) == 1:
        return (attending,)
    plain = [layer for layer in spec.layers if not layer.attends]
    if not plain:
        raise ConfigError(
            f"speculative_config: method mtp drafts with a head of attention and an MLP, and this {spec.architecture} "
            "has no MLP; use method suffix, or a draft model"
        )
    return attending, ([layer for layer in plain if layer.experts is not None] or plain)[-1]


def head_spec(spec: ModelSpec) -> ModelSpec:
    """The head as a model of its layers, without the vision tower. Raises ConfigError for an architecture without
    one."""
    return msgspec.structs.replace(spec, layers=head_layers(spec), draft_layers=(), kv_groups=(), vision=None)


def head_tensors(spec: ModelSpec, names: Iterable[str]) -> list[str]:
    """The tensors of `names` that belong to the head. Raises ConfigError if there is no head."""
    of = head_names(spec)
    if f"{of.fc}.weight" not in (names := list(names)):
        raise ConfigError(
            f"speculative_config: method mtp drafts with a head that the checkpoint has, and this one has none "
            f"({of.fc}.weight is missing); use method suffix, or a draft model"
        )
    shared = tuple(f"{layer}{part}" for layer in of.layers for part in ("embed_tokens.", "shared_head.head."))
    own = (*(f"{name}." for name in (of.embedding_norm, of.hidden_norm, of.fc, of.norm)), *of.layers)
    return [name for name in names if name.startswith(own) and not name.startswith(shared)]
