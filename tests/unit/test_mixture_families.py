"""The config.json of models with experts, and numbers in it that do not go together."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.families.mixture import routing_of
from vllm_lite.checkpoint.layer_specs.experts import RoutingSpec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.tensors.tensor_names import canonical, is_ignored
from vllm_lite.errors import ModelError

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "published.json").read_text())
MIXTRAL, QWEN2, QWEN3, GLM, GRANITE = (
    PUBLISHED[name]["config"]
    for name in ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "glm-4.5-air", "granite-3.0-1b-a400m")
)


def load(folder: Path, raw: Mapping[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(raw))
    return load_spec(folder)


def sparse(spec: ModelSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if layer.experts is not None]


@pytest.mark.parametrize(
    ("raw", "routing"),
    [
        (MIXTRAL, RoutingSpec(8, 2, renormalize=True)),
        (QWEN2, RoutingSpec(60, 4)),
        (QWEN3, RoutingSpec(128, 8, renormalize=True)),
        (PUBLISHED["olmoe-1b-7b"]["config"], RoutingSpec(64, 8)),
        (GRANITE, RoutingSpec(32, 8, renormalize=True)),
        (
            GLM,
            RoutingSpec(128, 8, "sigmoid", renormalize=True, epsilon=1e-20, choice_bias=True, group_score="top two"),
        ),
    ],
    ids=["mixtral", "qwen2", "qwen3", "olmoe", "granite", "glm"],
)
def test_the_routing_of_each_family(raw: Mapping[str, Any], routing: RoutingSpec, tmp_path: Path) -> None:
    spec = load(tmp_path, raw)
    assert spec.experts is not None
    assert spec.experts.routing == routing


def test_layers_with_experts_and_without_are_mixed(tmp_path: Path) -> None:
    changes = {"decoder_sparse_step": 3, "mlp_only_layers": [2, 8], "num_hidden_layers": 12}
    assert sparse(load(tmp_path, QWEN2 | changes)) == [5, 11]
    assert sparse(load(tmp_path, GLM | {"first_k_dense_replace": 3, "num_hidden_layers": 6})) == [3, 4, 5]


def test_windows_of_qwen2_moe_are_on_every_second_of_the_first_layers(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 3, "num_hidden_layers": 5}
    spec = load(tmp_path, QWEN2 | changes)
    assert [layer.attention.window for layer in spec.layers] == [100, None, 100, None, None]


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    unread = load(tmp_path, GLM).unread_layers
    assert is_ignored("model.layers.46.mlp.experts.0.up_proj.weight", tied=False, unread_layers=unread)
    assert not is_ignored("model.layers.45.mlp.experts.0.up_proj.weight", tied=False, unread_layers=unread)
    assert not is_ignored("model.layers.47.eh_proj.weight", tied=False, unread_layers=unread)


def test_zero_experts_per_token_are_refused() -> None:
    """A hybrid Granite without experts has 0 of them for a token, so its own config cannot refuse that."""
    with pytest.raises(ModelError, match="0 experts of 8; it must be at least one"):
        routing_of(8, 0)


HOSTILE = {
    "no experts": (MIXTRAL | {"num_local_experts": 0}, "num_local_experts: Expected `int` >= 1"),
    "a million experts": (QWEN3 | {"num_experts": 10**6}, "num_experts: Expected `int` <= 16384"),
    "more than there are": (QWEN3 | {"num_experts_per_tok": 129}, "cannot go to 129 experts of 128"),
    "a negative number": (GRANITE | {"shared_intermediate_size": -1}, "shared_intermediate_size: Expected `int` >= 0"),
    "uneven groups": (GLM | {"n_group": 3}, "128 experts cannot be in 3 groups"),
    "more groups than there are": (GLM | {"n_group": 2, "topk_group": 3}, "from 3 groups of 2"),
    "groups that are too small": (GLM | {"n_group": 32}, "8 experts of the 4 that are in 1 of 32 groups"),
    "groups of one": (GLM | {"n_group": 128, "topk_group": 8}, "no two that could score a group"),
    "an endless scale": (GLM | {"routed_scaling_factor": -1.0}, "routed_scaling_factor: Expected `float` > 0"),
    "an endless list": (QWEN2 | {"mlp_only_layers": [-1] * 10**5}, "mlp_only_layers"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_config_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    raw, reason = HOSTILE[name]
    with pytest.raises(ModelError) as error:
        load(tmp_path, raw)
    assert reason in str(error.value)
    assert len(str(error.value)) < 2500


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ("block_sparse_moe.experts.7.w1.weight", "mlp.experts.7.gate_proj.weight"),
        ("block_sparse_moe.experts.7.w2.weight", "mlp.experts.7.down_proj.weight"),
        ("block_sparse_moe.experts.7.w3.weight", "mlp.experts.7.up_proj.weight"),
        ("block_sparse_moe.router.layer.weight", "mlp.gate.weight"),
        ("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "mlp.experts.down_proj"),
        ("shared_mlp.input_linear.weight", "mlp.shared_experts.gate_up_proj.weight"),
        ("mlp.shared_expert.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
        ("mlp.shared_expert_gate.weight", "mlp.shared_expert_gate.weight"),
        ("mlp.moe_statics.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("feed_forward.w1.weight", "feed_forward.w1.weight"),
    ],
)
def test_the_parts_of_experts_are_called_alike(stored: str, here: str) -> None:
    assert canonical(f"model.layers.3.{stored}") == f"model.layers.3.{here}"


def test_glm_turns_half_of_each_head_where_nothing_is_said(tmp_path: Path) -> None:
    ropes = {layer.rope for layer in load(tmp_path, {**GLM, "partial_rotary_factor": None}).layers}
    assert {rope.rotary_size for rope in ropes if rope is not None} == {64}
