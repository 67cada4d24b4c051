"""The description of one GGUF architecture: its config.json and its tensors."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm_lite.checkpoint.gguf.changes import Change
from vllm_lite.checkpoint.gguf.metadata import Metadata

Changes = Mapping[str, tuple[Change, ...]]
"""By a tensor's name within its layer, like "ssm_a"."""


def _nothing(_: Metadata) -> dict[str, Any]:
    return {}


def _unchanged(_: Metadata) -> Changes:
    return {}


class Architecture(NamedTuple):
    """Rules that make a config.json and its tensors of one architecture's files."""

    name: str
    """The architecture of config.json."""
    own: Callable[[Metadata], dict[str, Any]] = _nothing
    """The keys of config.json that others have not, or have otherwise."""
    names: Mapping[str, str] = {}
    """As `names.name_here` wants."""
    changes: Callable[[Metadata], Changes] = _unchanged
    """The tensors that differ by more than their names."""
    is_interleaved: bool = False
    """Whether llama.cpp turns element 2 i of a head with 2 i + 1, and the rows of Q and K are in that order, where the
    family's own checkpoints have halves."""
    plus_one: bool = False
    """Whether norms are stored with the 1 that the family's own checkpoints leave out."""
    stacks_qkv: bool = False
    """Whether Q, K and V lie behind one another, where the family's own checkpoints have them head by head."""
    splits_gate_up: bool = False
    """Whether gate and up are two tensors where the family's own checkpoints have one."""
    has_latents: bool = False
    """Whether its attention is latent, with the matrices of each head by themselves."""
    yarn: Mapping[str, Any] = {}
    """What its rope_parameters say of YaRN beside what files do."""
    by_layer: tuple[str, ...] = ()
    """Keys that have a number for each layer, not one for all: `own` makes something of them."""


def experts(of: Metadata) -> dict[str, Any]:
    """Number and sizes of experts."""
    count, used = of.integer("expert_count"), of.integer("expert_used_count")
    inner = of.integer("expert_feed_forward_length", None) or of.same("feed_forward_length")
    own = {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": inner}
    # a layer without an MLP may have no number for it
    return own | {"intermediate_size": of.same("feed_forward_length", inner)}


def granite_factors(of: Metadata) -> dict[str, Any]:
    """The four of Granite."""
    return {
        "embedding_multiplier": of.number("embedding_scale", 1.0),
        "residual_multiplier": of.number("residual_scale", 1.0),
        "attention_multiplier": of.number("attention.scale", of.head_size**-0.5),
        "logits_scaling": of.number("logit_scale", 1.0),
    }
