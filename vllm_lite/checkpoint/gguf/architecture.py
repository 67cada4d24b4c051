"""Architecture: rules for one GGUF architecture, to derive a config.json and tensors from its files."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm_lite.checkpoint.gguf.changes import Change
from vllm_lite.checkpoint.gguf.metadata import Metadata

Changes = Mapping[str, tuple[Change, ...]]
"""Changes by a tensor's name within its layer, like "ssm_a"."""


def _nothing(_: Metadata) -> dict[str, Any]:
    return {}


class Architecture(NamedTuple):
    """Rules that derive a config.json and tensors from the files of one architecture."""

    name: str
    """Architecture in config.json."""
    own: Callable[[Metadata], dict[str, Any]] = _nothing
    """Keys of config.json that are specific to the architecture."""
    names: Mapping[str, str] = {}
    """Tensor names, as for `names.name_here`."""
    changes: Callable[[Metadata], Changes] = _nothing
    """Tensors that differ by more than their names."""
    is_interleaved: bool = False
    """Whether llama.cpp rotates element 2 i of a head with 2 i + 1, with the rows of Q and K in that order, while the
    family's own checkpoints use halves."""
    plus_one: bool = False
    """Whether norm weights include the 1 that the family's own checkpoints leave out."""
    stacks_qkv: bool = False
    """Whether Q, K and V are stacked, while the family's own checkpoints store them head by head."""
    splits_gate_up: bool = False
    """Whether gate and up are two tensors, while the family's own checkpoints have one."""
    has_latents: bool = False
    """Whether attention is latent, with separate matrices for each head."""
    yarn: Mapping[str, Any] = {}
    """Keys of YaRN's rope_parameters that files lack."""
    by_layer: tuple[str, ...] = ()
    """Keys with a number per layer, which `own` converts."""


def experts(of: Metadata) -> dict[str, Any]:
    """Number and sizes of experts."""
    count, used = of.integer("expert_count"), of.integer("expert_used_count")
    inner = of.integer("expert_feed_forward_length", None) or of.same("feed_forward_length")
    own = {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": inner}
    # layers without an MLP may lack the number
    return own | {"intermediate_size": of.same("feed_forward_length", inner)}


def granite_factors(of: Metadata) -> dict[str, Any]:
    """Granite's four multipliers."""
    return {
        "embedding_multiplier": of.number("embedding_scale", 1.0),
        "residual_multiplier": of.number("residual_scale", 1.0),
        "attention_multiplier": of.number("attention.scale", of.head_size**-0.5),
        "logits_scaling": of.number("logit_scale", 1.0),
    }
