"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is one block: Mamba-2 with groups, attention without rope, an
MLP with squared relu, or experts with such MLPs.

`time_step_limit` bounds time steps, in prompts and in decode steps. transformers uses `time_step_min` as the lower
bound in prompts and none in decode steps; the models' own code, used in training, has no bounds.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.common import FULL, Family, RawConfig, attention_of, decoder, layer_types_of
from vllm_lite.checkpoint.families.mixture import V3_ROUTING, NumExperts, grouped_routing_of
from vllm_lite.checkpoint.families.state_space import ConvSize, Limits, step_limits
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

MAMBA, MLP, MOE = "linear_attention", "mlp", "moe"
OLDER = {"mamba": MAMBA, "attention": FULL}
LETTERS = {"M": MAMBA, "*": FULL, "-": MLP, "E": MOE}
"""Letters of `hybrid_override_pattern` for the kinds of layers."""


class NemotronHConfig(RawConfig, kw_only=True):
    num_hidden_layers: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    """Unused default: the list of kinds determines the number of layers."""
    hybrid_override_pattern: Annotated[str, Meta(max_length=10_000)] | None = None
    hidden_act: str = "relu2"
    head_dim: Size | None = 128
    intermediate_size: Size = 21504
    layer_norm_epsilon: Positive = 1e-5
    attention_bias: Literal[False] = False
    mlp_bias: bool = False
    use_bias: Literal[False] = False
    use_conv_bias: Literal[True] = True
    mamba_hidden_act: Literal["silu"] = "silu"
    mamba_num_heads: Size = 128
    mamba_head_dim: Size = 64
    ssm_state_size: Size = 128
    n_groups: Size = 8
    conv_kernel: ConvSize = 4
    time_step_limit: Limits = None
    n_routed_experts: NumExperts = 8
    num_experts_per_tok: NumExperts = 2
    moe_intermediate_size: Size = 7688
    moe_shared_expert_intermediate_size: Size = 7688
    moe_latent_size: None = None
    routed_scaling_factor: Positive = 1.0
    n_group: NumExperts = 1
    topk_group: NumExperts = 1
    norm_topk_prob: bool = True


def _kinds(raw: NemotronHConfig) -> list[str]:
    if raw.layer_types is None and raw.hybrid_override_pattern is None:
        raise ModelError("layers_block_type or hybrid_override_pattern must give the kind of each layer")
    if raw.layer_types is not None:
        kinds = [OLDER.get(kind, kind) for kind in raw.layer_types]
    else:
        letters = raw.hybrid_override_pattern or ""
        unknown = sorted(set(letters) - set(LETTERS))
        if unknown:
            raise ModelError(f"hybrid_override_pattern has {', '.join(unknown)}; known: {', '.join(LETTERS)}")
        kinds = [LETTERS[letter] for letter in letters]
    known = (*LETTERS.values(),)
    return layer_types_of(msgspec.structs.replace(raw, layer_types=kinds, num_hidden_layers=len(kinds)), known=known)


def _mamba(raw: NemotronHConfig) -> MambaSpec:
    if raw.mamba_num_heads % raw.n_groups:
        raise ModelError(f"n_groups {raw.n_groups} does not divide mamba_num_heads {raw.mamba_num_heads}")
    return MambaSpec(
        raw.mamba_num_heads,
        raw.mamba_head_dim,
        raw.ssm_state_size,
        raw.conv_kernel,
        step_limits(raw.time_step_limit),
        raw.n_groups,
    )


def _experts(raw: NemotronHConfig) -> ExpertsSpec:
    routing = grouped_routing_of(raw, **V3_ROUTING)
    return ExpertsSpec(routing, raw.moe_intermediate_size, raw.moe_shared_expert_intermediate_size, gated=False)


def _nemotron(architecture: str, raw: NemotronHConfig) -> ModelSpec:
    attention, kinds = attention_of(raw), _kinds(raw)
    both = LayerSpec(attention, None)
    layers = {
        FULL: msgspec.structs.replace(both, only="attention"),
        MAMBA: msgspec.structs.replace(both, only="attention", recurrent=_mamba(raw)),
        MLP: msgspec.structs.replace(both, only="MLP"),
    }
    if MOE in kinds:
        if raw.mlp_bias:
            raise ModelError("mlp_bias true is not supported in a model with experts; it must be false")
        layers[MOE] = msgspec.structs.replace(both, only="MLP", experts=_experts(raw))
    return decoder(
        architecture,
        raw,
        tuple(layers[kind] for kind in kinds),
        NormSpec(raw.layer_norm_epsilon, "wide rms"),
        raw.intermediate_size,
        gated_mlp=False,
        mlp_bias=raw.mlp_bias,
        norms_per_layer=1,
    )


ALIASES = {"layers_block_type": "layer_types", "mlp_hidden_act": "hidden_act", "attention_head_dim": "head_dim"}
FAMILIES = {"NemotronHForCausalLM": Family(NemotronHConfig, _nemotron, ALIASES)}
