"""EAGLE-3 heads: checkpoints of one layer that drafts for another model and reads its hidden states. No torch.

From the residual stream after three layers of the model, a, b and c, and the next token t, a head predicts the token
after t:

    g = fc(concat(a, b, c));  x = g + attention(concat(norm(embedding(t)), norm(g)));  y = x + mlp(norm(x))
    logits of the tokens i + d2t[i] = head(norm(y))

and y replaces g in the prediction of the next token. A head may be limited to `draft_vocab_size` frequent tokens, which
d2t maps to the model's. https://arxiv.org/abs/2503.01840 describes the method.
"""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.config_json import CONFIG_FILE
from vllm_lite.checkpoint.families.llama import FAMILIES
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.checkpoint.typed_json import Size, convert, read_json
from vllm_lite.errors import ConfigError

KIND, LLAMA = "Eagle3", "LlamaForCausalLM"
OLDER, NEWER = "midlayer.", "model.layers.0."
"""Prefixes of the names of the layer's tensors."""


class _Raw(msgspec.Struct):
    draft_vocab_size: Size | None = None
    eagle_aux_hidden_state_layer_ids: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(max_length=64)] | None = None
    norm_before_residual: bool = False


class EagleSpec(NamedTuple):
    """A head as its checkpoint describes it."""

    spec: ModelSpec
    """The layer as a model. Its vocabulary is the target model's."""
    num_tokens: int
    """Number of tokens that the head can draft."""
    layers: tuple[int, ...] | None
    """Layers of the model before which the residual stream is read; None: the usual ones."""

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Layers of a model with `num_layers` after which the residual stream is read. Raises ConfigError for too few
        layers."""
        before = self.layers or (2, num_layers // 2, num_layers - 3)
        if len(before) != 3 or not all(1 <= layer <= num_layers for layer in before):
            raise ConfigError(
                f"the EAGLE-3 head reads what goes into layers {', '.join(map(str, before))} of the model, which has "
                f"{num_layers} layers; it is one of another model"
            )
        return tuple(layer - 1 for layer in before)


def read_eagle(folder: str) -> EagleSpec:
    """Read the head in a folder. Raises ModelError for a damaged one, ConfigError for a model that is not an EAGLE-3
    head."""

    def parse(raw: Any) -> EagleSpec:
        names = raw.get("architectures") if isinstance(raw, dict) else None
        if not (isinstance(names, list) and names and KIND in str(names[0]) and "Llama" in str(names[0])):
            raise ConfigError(
                f"speculative_config: method eagle3 drafts with a head of EAGLE-3, and {folder} has architectures "
                f"{names!r}; known: {LLAMA}{KIND}; a smaller model drafts by method draft_model"
            )
        own, family = convert(raw, _Raw), FAMILIES[LLAMA]
        if own.norm_before_residual:
            raise ConfigError("norm_before_residual true is not supported in an EAGLE-3 head; it must be false")
        spec = family.read(LLAMA, convert(raw | {"num_hidden_layers": 1, "tie_word_embeddings": False}, family.config))
        layers = own.eagle_aux_hidden_state_layer_ids
        return EagleSpec(spec, own.draft_vocab_size or spec.vocab_size, None if layers is None else tuple(layers))

    return read_json(Path(folder) / CONFIG_FILE, parse)


def layer_name(folder: str) -> str:
    """Prefix of the canonical names of the layer's tensors."""
    return OLDER if any(canonical(name).startswith(OLDER) for name in read_headers(Path(folder))) else NEWER


def check_eagle(eagle: EagleSpec, spec: ModelSpec) -> None:
    """Raise ConfigError if a head does not fit the model that verifies its drafts."""
    if eagle.spec.hidden_size != spec.hidden_size:
        raise ConfigError(
            f"the EAGLE-3 head has hidden states of {eagle.spec.hidden_size} and the model of {spec.hidden_size}; it "
            "is one of another model"
        )
    if spec.implementation != "native" or spec.encoder is not None:
        raise ConfigError(f"method eagle3 drafts for decoders of this package, and {spec.architecture} is none")
    eagle.taps(spec.num_layers)
