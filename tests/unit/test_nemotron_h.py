"""The published config.json of Nemotron-H: their meaning, the names of tensors, and refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.errors import ConfigError, ModelError

PUBLISHED = json.loads((Path(__file__).parents[1] / "fixtures" / "published.json").read_text())
NANO: dict[str, Any] = PUBLISHED["nemotron-3-nano-30b-a3b"]["config"]


def load(folder: Path, raw: dict[str, Any] | str) -> ModelSpec:
    (folder / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return load_spec(folder)


def test_each_layer_is_one_block(tmp_path: Path) -> None:
    spec = load(tmp_path, NANO)
    kinds = "".join(
        ("M" if own.recurrent else "*") if own.attends else ("E" if own.experts else "-") for own in spec.layers
    )
    assert kinds == NANO["hybrid_override_pattern"]
    assert {own.recurrent for own in spec.layers} == {None, MambaSpec(64, 64, 128, 4, num_groups=8)}
    assert (spec.activation, spec.gated_mlp, spec.num_parameters() // 10**6) == ("relu2", False, 31577)
    assert spec.active_parameters() // 10**6 == 3580
    assert [group.layers for group in spec.kv_groups] == [(5, 12, 19, 26, 33, 42)]


def test_older_names_of_kinds_and_limits_mean_the_same(tmp_path: Path) -> None:
    names = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    raw = NANO | {"layers_block_type": [names[letter] for letter in NANO["hybrid_override_pattern"]]}
    del raw["hybrid_override_pattern"]
    infinite = json.dumps(raw | {"time_step_limit": [0.0, math.inf]})
    assert "Infinity" in infinite
    assert load(tmp_path, infinite) == load(tmp_path, NANO)
    limited = load(tmp_path, NANO | {"time_step_limit": [0.01, 0.5]}).layers[0].recurrent
    assert isinstance(limited, MambaSpec)
    assert limited.step_limits == (0.01, 0.5)


def test_ranks_share_groups(tmp_path: Path) -> None:
    spec = load(tmp_path, PUBLISHED["nemotron-h-8b"]["config"])
    own = spec.per_rank(Shard(3, 4)).layers[0].recurrent
    assert isinstance(own, MambaSpec)
    assert (own.num_heads, own.num_groups, own.conv_channels) == (32, 2, 32 * 64 + 2 * 2 * 128)
    with pytest.raises(ConfigError, match=r"128 heads of recurrent layers in 8 groups, .* fit 1, 2, 4 or 8"):
        spec.check_tensor_parallel(Shard(0, 16))


def test_tensor_names_tell_a_blocks_kind() -> None:
    for stored, here in {
        "backbone.embeddings.weight": "model.embed_tokens.weight",
        "backbone.norm_f.weight": "model.norm.weight",
        "backbone.layers.7.norm.weight": "model.layers.7.input_layernorm.weight",
        "backbone.layers.7.mixer.A_log": "model.layers.7.mamba.A_log",
        "backbone.layers.7.mixer.norm.weight": "model.layers.7.mamba.norm.weight",
        "model.layers.7.mixer.q_proj": "model.layers.7.self_attn.q_proj",
        "backbone.layers.7.mixer.experts.3.up_proj.weight": "model.layers.7.mlp.experts.3.up_proj.weight",
        "backbone.layers.7.mixer.gate.e_score_correction_bias": "model.layers.7.mlp.gate.e_score_correction_bias",
    }.items():
        assert canonical(stored) == here


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hybrid_override_pattern": "M-X*"}, "hybrid_override_pattern has X; known: M, *, -, E"),
        ({"hybrid_override_pattern": "M-ME"}, "no full_attention; at least one layer must keep KV"),
        ({"hybrid_override_pattern": None}, "layers_block_type or hybrid_override_pattern must give"),
        ({"layers_block_type": ["mamba", "odd"]}, "layer_types odd not supported"),
        ({"n_groups": 7}, "n_groups 7 does not divide mamba_num_heads 64"),
        ({"moe_latent_size": 512}, "moe_latent_size: Expected `null`, got `int`, but it is 512"),
        ({"attention_bias": True}, "attention_bias: must be false, but it is True"),
        ({"mlp_bias": True}, "mlp_bias true is not supported in a model with experts"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit 0.5 to 0.1 leaves no time step"),
    ],
)
def test_refusals_name_the_key_and_the_value(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load(tmp_path, NANO | change)
    assert words in str(caught.value)
