"""Assistants of Gemma 4: checkpoints of few layers, without K and V, that draft for a larger model. No torch.

From the model's hidden state h of the token before the last, and the last token t, an assistant predicts the next one:

    x = pre_projection(concat(embedding of the model(t), h));  y = norm(layers(x));  logits = its own head of y

and post_projection(y) replaces h in the prediction of the one after. Each layer attends to the K and V of the model's
last layer of its kind, sliding or full, always from the position of t: drafts have neither K and V nor positions.
A sliding layer sees the model's window at that position without t. transformers lets it see two tokens more, whose
blocks may have been freed here.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vllm_lite.checkpoint.config_json import CONFIG_FILE
from vllm_lite.checkpoint.families.gemma4 import FAMILIES
from vllm_lite.checkpoint.gguf.files import gguf_files
from vllm_lite.checkpoint.model_spec import LayerGroup, LayerSpec, ModelSpec
from vllm_lite.checkpoint.typed_json import Size, convert, read_json
from vllm_lite.errors import ConfigError

ASSISTANTS = {
    "Gemma4AssistantForCausalLM": "Gemma4ForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM": "Gemma4UnifiedForCausalLM",
}
"""Architectures of assistants, and those with whose layers they are built."""


class _Raw(msgspec.Struct):
    text_config: dict[str, Any]
    backbone_hidden_size: Size = 1536


class AssistantSpec(NamedTuple):
    """An assistant as its checkpoint describes it."""

    spec: ModelSpec
    """The assistant's layers as a model."""
    model_size: int
    """Hidden size of the target model."""

    def shared_layers(self, model: ModelSpec) -> tuple[int, ...]:
        """For each layer, the layer of `model` whose K and V it attends to. Raises ConfigError for a model that does
        not fit."""
        if self.model_size != model.hidden_size or self.spec.vocab_size != model.vocab_size:
            raise ConfigError(
                f"the assistant is one of a model with hidden states of {self.model_size} and {self.spec.vocab_size} "
                f"tokens, and this one has {model.hidden_size} and {model.vocab_size}; give the assistant of this model"
            )
        last = {layer.attention.window is None: index for index, layer in enumerate(model.layers) if layer.keeps_kv}
        found = []
        for layer in self.spec.layers:
            index = last.get(layer.attention.window is None)
            own = None if index is None else model.layers[index].attention
            sizes = layer.attention.num_kv_heads, layer.attention.head_size
            if index is None or own is None or (own.num_kv_heads, own.head_size) != sizes:
                raise ConfigError(
                    f"the assistant has layers that attend to {sizes[0]} KV heads of {sizes[1]} elements "
                    f"({'a window' if layer.attention.window else 'full attention'}), and the model's last layer of "
                    "the kind has others; give the assistant of this model"
                )
            found.append(index)
        return tuple(found)


def is_assistant(folder: str) -> bool:
    """Whether the checkpoint in `folder` is an assistant; no GGUF file is. Raises ModelError for a damaged one."""
    if gguf_files(Path(folder)):
        return False

    def parse(raw: Any) -> bool:
        names = raw.get("architectures") if isinstance(raw, dict) else None
        return isinstance(names, list) and bool(names) and names[0] in ASSISTANTS

    return read_json(Path(folder) / CONFIG_FILE, parse)


def _over_kv(layer: LayerSpec, index: int) -> LayerSpec:
    """A layer without K and V, which attends to those of earlier tokens."""
    window = layer.attention.window
    attention = msgspec.structs.replace(layer.attention, window=window and max(1, window - 1))
    return msgspec.structs.replace(layer, attention=attention, kv_layer=index)


def read_assistant(folder: str) -> AssistantSpec:
    """Read the assistant in a folder. Raises ModelError for a damaged one."""

    def parse(raw: Any) -> AssistantSpec:
        own, architecture = convert(raw, _Raw), ASSISTANTS[raw["architectures"][0]]
        family = FAMILIES[architecture]
        text = own.text_config | {"num_kv_shared_layers": 0, "final_logit_softcapping": None}
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": None}
        spec = family.read(architecture, convert(text | {"tie_word_embeddings": True}, family.config))
        layers = tuple(_over_kv(layer, index) for index, layer in enumerate(spec.layers))
        kinds = dict.fromkeys(layer.attention for layer in layers)
        groups = tuple(
            LayerGroup(tuple(index for index, layer in enumerate(layers) if layer.attention == kind), kind)
            for kind in kinds
        )
        return AssistantSpec(msgspec.structs.replace(spec, layers=layers, kv_groups=groups), own.backbone_hidden_size)

    return read_json(Path(folder) / CONFIG_FILE, parse)
