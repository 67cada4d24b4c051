"""The config.json of families near Llama, also where it leaves something out, and the names of tensors."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.test_model_spec import config
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.layer_specs.rope import Dynamic, LongRope, Rope, Yarn
from vllm_lite.checkpoint.model_spec import ModelSpec, QueryGrowth
from vllm_lite.checkpoint.tensors.tensor_names import canonical, is_ignored
from vllm_lite.errors import ModelError

PLAIN = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}


def load(folder: Path, name: str, changes: dict[str, Any], missing: tuple[str, ...] = ()) -> ModelSpec:
    raw = config() | PLAIN | {"architectures": [name]} | changes
    for key in missing:
        del raw[key]
    (folder / "config.json").write_text(json.dumps(raw))
    return load_spec(folder)


def windows(spec: ModelSpec) -> set[int | None]:
    return {layer.attention.window for layer in spec.layers}


def test_qwen2_has_biases_that_its_config_does_not_mention(tmp_path: Path) -> None:
    spec = load(tmp_path, "Qwen2ForCausalLM", {"attention_bias": True, "sliding_window": 4096}, ("head_dim",))
    assert (spec.qkv_bias, spec.output_bias, spec.qk_norm, windows(spec)) == (True, False, None, {None})


def test_qwen2_with_yarn_is_as_long_as_it_was_extended_to(tmp_path: Path) -> None:
    """Its model card tells users to leave max_position_embeddings as it is."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    changes = {"max_position_embeddings": 32768, "rope_theta": 1e6, "rope_scaling": yarn}
    spec = load(tmp_path, "Qwen2ForCausalLM", changes, ("rope_parameters",))
    assert spec.max_position_embeddings == 131072
    assert spec.layers[0].rope is not None
    assert spec.layers[0].rope.scaling == Yarn(4.0, 32768)


def test_dynamic_rope_reaches_as_far_as_its_factor(tmp_path: Path) -> None:
    dynamic = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 6.0}
    spec = load(tmp_path, "LlamaForCausalLM", {"max_position_embeddings": 32768, "rope_parameters": dynamic})
    assert spec.max_position_embeddings == 6 * 32768
    assert {layer.rope and layer.rope.scaling for layer in spec.layers} == {Dynamic(6.0, 32768)}


def test_granite_without_its_factors_is_not_scaled(tmp_path: Path) -> None:
    spec = load(tmp_path, "GraniteForCausalLM", {})
    assert (spec.embedding_scale, spec.residual_scale, spec.logits_scale) == (1.0, 1.0, 1.0)
    assert spec.layers[0].attention.scale == 1.0


def test_smollm3_by_its_defaults(tmp_path: Path) -> None:
    missing = ("num_key_value_heads", "rope_parameters", "tie_word_embeddings")
    spec = load(tmp_path, "SmolLM3ForCausalLM", {"sliding_window": 100}, missing)
    assert spec.tie_word_embeddings
    assert (spec.layers[0].attention.num_kv_heads, windows(spec)) == (4, {None})
    assert [layer.rope is None for layer in spec.layers] == [False, False, False, True] * 8
    assert {layer.rope.theta for layer in spec.layers if layer.rope} == {2e6}


def test_smollm3_may_have_a_window_where_it_does_not_rotate(tmp_path: Path) -> None:
    spec = load(tmp_path, "SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 100})
    assert [layer.attention.window for layer in spec.layers] == [None, None, None, 100] * 8
    mixed = ["sliding_attention"] * 2 + ["full_attention"] * 30
    assert windows(load(tmp_path, "SmolLM3ForCausalLM", {"sliding_window": 100, "layer_types": mixed})) == {None}


def test_smollm3_with_too_few_layers_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no_rope_layers has 3 entries for 32 layers"):
        load(tmp_path, "SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 0]})


def longrope(kind: str, **others: Any) -> dict[str, Any]:
    return {"type": kind, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48} | others


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_has_one_longrope_by_three_names(tmp_path: Path, kind: str) -> None:
    changes = {"rope_scaling": longrope(kind), "partial_rotary_factor": 0.75, "sliding_window": 2047}
    changes |= {"max_position_embeddings": 131072}
    spec = load(tmp_path, "Phi3ForCausalLM", changes, ("rope_parameters",))
    (rope,) = {layer.rope for layer in spec.layers}
    assert rope is not None
    assert rope.scaling == LongRope((1.0,) * 48, (2.0,) * 48, 4096), "Phi-3's own, where config.json has none"
    assert (rope.rotary_size, windows(spec)) == (96, {2047})
    assert rope.attention_factor == pytest.approx(1.1902380714238083), "sqrt(1 + ln 32 / ln 4096)"
    assert windows(load(tmp_path, "Phi3ForCausalLM", {})) == {None}


def test_ministral3_by_its_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path, "Ministral3ForCausalLM", {"max_position_embeddings": 262144}, ("rope_parameters",))
    (layer,) = set(spec.layers)
    assert layer.query_growth == QueryGrowth(0.1, 16384)
    assert layer.rope is not None
    assert (layer.rope.scaling, layer.rope.attention_factor) == (Yarn(16.0, 16384), 1.0)
    assert windows(spec) == {None}


def test_ministral3_without_growth(tmp_path: Path) -> None:
    assert load(tmp_path, "Ministral3ForCausalLM", {}).layers[0].query_growth is None
    growth = {"rope_parameters": PLAIN["rope_parameters"] | {"llama_4_scaling_beta": "high"}}
    with pytest.raises(ModelError, match=r"rope_parameters\.llama_4_scaling_beta.*'high'"):
        load(tmp_path, "Ministral3ForCausalLM", growth)


def wrapped(folder: Path, outer: dict[str, Any], text: dict[str, Any]) -> ModelSpec:
    inner = config("mistral_new") | {"model_type": "mistral"} | text
    del inner["architectures"]
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": inner} | outer
    (folder / "config.json").write_text(json.dumps(raw))
    return load_spec(folder)


def test_null_means_no_window_in_mistral_small(tmp_path: Path) -> None:
    assert windows(wrapped(tmp_path, {}, {"sliding_window": None})) == {None}
    assert windows(wrapped(tmp_path, {}, {"sliding_window": 77})) == {77}


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, False, True), (False, True, False), (None, True, True)])
def test_the_outer_config_decides_whether_the_head_is_tied(tmp_path: Path, outer: Any, inner: bool, tied: bool) -> None:
    spec = wrapped(tmp_path, {"tie_word_embeddings": outer}, {"tie_word_embeddings": inner})
    assert spec.tie_word_embeddings == tied


def test_another_text_model_within_mistral_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"text_config\.model_type 'mamba' is not supported; .*: mistral, ministral3"):
        wrapped(tmp_path, {}, {"model_type": "mamba"})


def test_seed_oss_has_biases_of_its_own(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        "SeedOssForCausalLM",
        {"attention_out_bias": False, "hidden_size": 5120},
        ("attention_bias", "head_dim"),
    )
    assert (spec.qkv_bias, spec.output_bias, spec.layers[0].attention.head_size) == (True, False, 128)


def test_internlm3_calls_biases_otherwise(tmp_path: Path) -> None:
    changes = {"qkv_bias": True, "bias": True, "hidden_size": 5120}
    spec = load(tmp_path, "InternLM3ForCausalLM", changes, ("head_dim", "attention_bias", "mlp_bias"))
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.layers[0].attention.head_size) == (True,) * 3 + (128,)


def test_ernie_by_its_defaults(tmp_path: Path) -> None:
    missing = ("head_dim", "num_key_value_heads", "rope_parameters", "tie_word_embeddings")
    spec = load(tmp_path, "Ernie4_5ForCausalLM", {"hidden_size": 5120}, missing)
    (layer,) = set(spec.layers)
    assert (layer.attention.head_size, layer.attention.num_kv_heads, spec.tie_word_embeddings) == (128, 2, True)
    assert layer.rope == Rope(500000.0, interleaved=True)
    assert (spec.qkv_bias, spec.mlp_bias) == (False, False)


def test_exaone4_by_its_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path, "Exaone4ForCausalLM", {})
    assert [layer.attention.window for layer in spec.layers] == [4096, 4096, 4096, None] * 8
    assert [layer.rope is None for layer in spec.layers] == [False, False, False, True] * 8
    full = load(tmp_path, "Exaone4ForCausalLM", {"sliding_window": None})
    assert (windows(full), {layer.rope for layer in full.layers}) == ({None}, {Rope(10000.0)})
    with pytest.raises(ModelError, match="sliding_window_pattern 'LLLG' is not supported without layer_types"):
        load(tmp_path, "Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"})


@pytest.mark.parametrize("kind", ["mrope", "default", None])
def test_qwen_vl_turns_text_as_qwen_does(tmp_path: Path, kind: str | None) -> None:
    """Flat, as its checkpoints are, and by the oldest name of its rope."""
    changes = {"rope_theta": 1e6, "rope_scaling": {"type": kind, "mrope_section": [16, 24, 24]}}
    spec = load(tmp_path, "Qwen2_5_VLForConditionalGeneration", changes, ("rope_parameters",))
    (rope,) = {layer.rope for layer in spec.layers}
    assert rope is not None
    assert msgspec.structs.replace(rope, axes=None) == Rope(1e6)
    assert rope.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert spec.qkv_bias


@pytest.mark.parametrize(
    "stored_as",
    [
        "model.layers.1.mlp.up_proj.weight",
        "language_model.model.layers.1.mlp.up_proj.weight",
        "model.language_model.layers.1.mlp.up_proj.weight",
    ],
)
def test_a_text_part_is_called_alike_whatever_it_is_in(stored_as: str) -> None:
    assert canonical(stored_as) == "model.layers.1.mlp.up_proj.weight"
    assert not is_ignored(canonical(stored_as), tied=True)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("part", ["vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight"])
def test_weights_of_vision_are_not_loaded(prefix: str, part: str) -> None:
    assert is_ignored(canonical(prefix + part), tied=False)


@pytest.mark.parametrize("stored_as", ["lm_head.weight", "language_model.lm_head.weight"])
def test_a_copy_of_a_tied_head_is_not_loaded(stored_as: str) -> None:
    assert is_ignored(canonical(stored_as), tied=True)
    assert not is_ignored(canonical(stored_as), tied=False)
