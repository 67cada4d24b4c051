"""MiniMax M2: Llama with rope on a part of each head, norms over all heads, and sigmoid routing."""

from typing import Literal

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_layers, llama_like
from vllm_lite.checkpoint.families.mixture import NumExperts, routing_of, with_experts
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Size
from vllm_lite.errors import ModelError

THETA, HEAD_DIM = 5e6, 128
"""Default theta and head size."""


class MiniMaxM2Config(LlamaConfig, kw_only=True):
    num_local_experts: NumExperts
    num_experts_per_tok: NumExperts
    rotary_dim: Size | None = None
    """Number of rotated elements of each head."""
    use_qk_norm: Literal[True] = True
    use_routing_bias: Literal[True] = True
    scoring_func: Literal["sigmoid"] = "sigmoid"


def _minimax(architecture: str, raw: MiniMaxM2Config) -> ModelSpec:
    size = raw.head_dim or HEAD_DIM
    if raw.rotary_dim is not None and raw.rotary_dim > size:
        raise ModelError(f"rotary_dim {raw.rotary_dim} is more than head_dim {size}")
    share = (raw.rotary_dim or size) / size
    layers = llama_layers(raw, full_attention(raw), head_dim=HEAD_DIM, theta=THETA, partial_rotary_factor=share)
    given = {"scoring": "sigmoid", "choice_bias": True, "renormalize": True}
    experts = ExpertsSpec(routing_of(raw.num_local_experts, raw.num_experts_per_tok, **given), raw.intermediate_size)
    return llama_like(architecture, raw, with_experts(layers, experts), qk_norm="all heads")


FAMILIES = {"MiniMaxM2ForCausalLM": Family(MiniMaxM2Config, _minimax, {"num_experts": "num_local_experts"})}
