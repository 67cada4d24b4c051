"""MTP heads: layers that a checkpoint has behind its own, which predict a further token from a hidden state. No torch.

From the hidden state h of a token behind the model's last norm, and the next token t, a head predicts the one after t:

    x = fc(concat(norm(embedding(t)), norm(h)));  y = norm(layer(x));  logits = the model's own head of y

and y stands for h in the prediction of the next one. The layer is one of full attention as the model's own, with K and
V of its own; where the model's layers are of one block each, it is two of them, attention and an MLP. DeepSeek V3
(https://arxiv.org/abs/2412.19437, section 2.2) describes it; other families have other names.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.errors import ConfigError


class MTPNames(NamedTuple):
    """A checkpoint's names for the parts of a head."""

    embedding_norm: str
    hidden_norm: str
    fc: str
    norm: str
    layers: tuple[str, ...]
    """Beginnings of the names of the layers' parts."""


OF_QWEN = MTPNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", ("mtp.layers.0.",))
OF_NEMOTRON = MTPNames(
    "mtp.layers.0.enorm",
    "mtp.layers.0.hnorm",
    "mtp.layers.0.eh_proj",
    "mtp.layers.1.final_layernorm",
    ("mtp.layers.0.", "mtp.layers.1."),
)
OF_DEEPSEEK = MTPNames("enorm", "hnorm", "eh_proj", "shared_head.norm", ("",))
"""Under the name of the layer behind the last one. Its `embed_tokens` and `shared_head.head` are the model's own."""
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
"""Architectures whose heads are served. Llama has none by itself: those that examples/demo_model/train_head.py trains
are named as Qwen's."""


def head_names(spec: ModelSpec) -> MTPNames:
    """The names of the tensors of the head of `spec`. Raises ConfigError for an architecture that has none."""
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
    """The layers of the head: one as the last of the model's own with attention, and where that has no MLP, one as the
    last that is an MLP, of experts if there are some. Raises ConfigError for a model that has none."""
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
    """The head as a model of its layers. Raises ConfigError for an architecture that has none."""
    return msgspec.structs.replace(spec, layers=head_layers(spec), draft_layers=(), kv_groups=())


def head_tensors(spec: ModelSpec, names: Iterable[str]) -> list[str]:
    """The tensors among `names` that the head has for itself. Raises ConfigError if there is no head among them."""
    of = head_names(spec)
    if f"{of.fc}.weight" not in (names := list(names)):
        raise ConfigError(
            f"speculative_config: method mtp drafts with a head that the checkpoint has, and this one has none "
            f"({of.fc}.weight is missing); use method suffix, or a draft model"
        )
    shared = tuple(f"{layer}{part}" for layer in of.layers for part in ("embed_tokens.", "shared_head.head."))
    own = (*(f"{name}." for name in (of.embedding_norm, of.hidden_norm, of.fc, of.norm)), *of.layers)
    return [name for name in names if name.startswith(own) and not name.startswith(shared)]
