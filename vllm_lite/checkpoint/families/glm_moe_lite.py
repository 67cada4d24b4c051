"""GLM-4.7-Flash: DeepSeek V3's latent attention and experts, with a list of sparse layers."""

from typing import Literal

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.deepseek import DeepseekV3Config, read_v3
from vllm_lite.checkpoint.families.mixture import Index
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Positive
from vllm_lite.errors import ModelError


class Glm4MoeLiteConfig(DeepseekV3Config, kw_only=True):
    rms_norm_eps: Positive = 1e-5
    first_k_dense_replace: Index = 1
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    """Kind of each layer; overrides the number of dense layers."""


def read_kinds(architecture: str, raw: Glm4MoeLiteConfig) -> ModelSpec:
    """Read a DeepSeek V3, or a similar model, with a list of sparse layers."""
    kinds = raw.mlp_layer_types
    if kinds is not None and len(kinds) != raw.num_hidden_layers:
        raise ModelError(f"mlp_layer_types has {len(kinds)} entries for {raw.num_hidden_layers} layers")
    return read_v3(architecture, raw, None if kinds is None else [kind == "sparse" for kind in kinds])


FAMILIES = {"Glm4MoeLiteForCausalLM": Family(Glm4MoeLiteConfig, read_kinds, {"num_local_experts": "n_routed_experts"})}
