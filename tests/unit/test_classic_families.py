"""The published config.json of families before Llama, and the names of their tensors."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.families.bloom import alibi_slopes
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.tensors.tensor_names import canonical, is_ignored
from vllm_lite.errors import ModelError

SIZES = {"vocab_size": 384, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}


def load(folder: Path, name: str, **raw: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **raw}))
    return load_spec(folder)


def test_gpt2_as_on_the_hub(tmp_path: Path) -> None:
    spec = load(tmp_path, "GPT2LMHeadModel", vocab_size=384, n_embd=96, n_layer=3, n_head=6, n_positions=128)
    assert (spec.hidden_size, spec.num_layers, spec.intermediate_size) == (96, 3, 384)
    assert (spec.max_position_embeddings, spec.extra_parameters) == (128, 128 * 96)
    assert (spec.activation, spec.tie_word_embeddings, spec.eos_token_ids) == ("gelu_tanh", True, (50256,))
    assert spec.layers[0].rope is None


def test_bloom_is_as_long_as_it_was_trained(tmp_path: Path) -> None:
    names = {"vocab_size": 384, "n_embed": 96, "n_layer": 2, "num_attention_heads": 6}
    assert load(tmp_path, "BloomForCausalLM", **names).max_position_embeddings == 2048
    spec = load(tmp_path, "BloomForCausalLM", **names, seq_length=4096)
    assert spec.max_position_embeddings == 4096
    assert spec.layers[0].attention.alibi_slopes == alibi_slopes(6)


def test_pythia_turns_a_quarter_of_each_head(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        "GPTNeoXForCausalLM",
        **SIZES,
        intermediate_size=96,
        rotary_pct=0.5,
        rotary_emb_base=500,
        hidden_act="gelu",
    )
    rope = spec.layers[0].rope
    assert rope is not None
    assert (rope.rotary_size, rope.theta, spec.parallel_blocks, spec.tie_word_embeddings) == (8, 500.0, True, False)
    rope = load(tmp_path, "GPTNeoXForCausalLM", **SIZES, intermediate_size=96).layers[0].rope
    assert rope is not None
    assert rope.rotary_size == 4


def test_defaults_of_starcoder2(tmp_path: Path) -> None:
    spec = load(tmp_path, "Starcoder2ForCausalLM", **SIZES, intermediate_size=96)
    own = spec.layers[0].attention
    assert (own.num_kv_heads, own.window, spec.activation, spec.tie_word_embeddings) == (2, None, "gelu_tanh", True)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_kv_heads": 6}, (1, True, 1)),  # Falcon 7B's configuration, whose num_kv_heads transformers ignores
        ({"multi_query": False}, (6, True, 1)),
        ({"parallel_attn": False}, (1, False, 2)),
        (NEW, (2, True, 2)),
        (NEW | {"parallel_attn": False, "multi_query": False}, (2, True, 2)),
        (NEW | {"num_ln_in_parallel_attn": 1}, (2, True, 1)),
    ],
)
def test_the_kinds_of_falcon(tmp_path: Path, changes: dict[str, Any], expected: tuple[int, bool, int]) -> None:
    spec = load(tmp_path, "FalconForCausalLM", **SIZES, **changes)
    assert (spec.layers[0].attention.num_kv_heads, spec.parallel_blocks, spec.norms_per_layer) == expected


def test_falcon_scales_its_alibi(tmp_path: Path) -> None:
    attention = load(tmp_path, "FalconForCausalLM", **SIZES, alibi=True).layers[0].attention
    assert attention.alibi_slopes == tuple(slope * 0.25 for slope in alibi_slopes(6))


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (
            "GPT2LMHeadModel",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx: must be false",
        ),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention: must be false"),
        ("OPTForCausalLM", {"ffn_dim": 96, "do_layer_norm_before": False}, "do_layer_norm_before: must be true"),
        (
            "OPTForCausalLM",
            {"ffn_dim": 96, "_remove_final_layer_norm": True},
            "_remove_final_layer_norm: must be false",
        ),
        ("OPTForCausalLM", {"ffn_dim": 96, "layer_norm_elementwise_affine": False}, "elementwise_affine: must be true"),
        ("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 48}, "word_embed_proj_dim 48 .* hidden_size 96"),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "post_layernorm: must be false"),
        (
            "FalconForCausalLM",
            {"num_ln_in_parallel_attn": 3},
            "num_ln_in_parallel_attn: must be one of 1, 2, but it is 3",
        ),
    ],
)
def test_unsupported_variants_are_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        load(tmp_path, name, **SIZES, **changes)


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        ("wte.weight", "model.embed_tokens.weight"),
        ("transformer.wpe.weight", "model.embed_positions.weight"),
        ("transformer.h.0.attn.c_attn.weight", "h.0.attn.c_attn.weight"),
        ("decoder.layers.0.fc1.weight", "model.layers.0.fc1.weight"),
        ("model.decoder.embed_positions.weight", "model.embed_positions.weight"),
        ("word_embeddings_layernorm.bias", "word_embeddings_layernorm.bias"),
        ("gpt_neox.embed_in.weight", "model.embed_tokens.weight"),
        ("embed_out.weight", "lm_head.weight"),
    ],
)
def test_tensors_are_called_alike_wherever_they_come_from(stored: str, here: str) -> None:
    assert canonical(stored) == here


def test_masks_of_old_checkpoints_are_left_out_and_biases_are_not() -> None:
    assert is_ignored(canonical("gpt_neox.layers.0.attention.bias"), tied=False)
    assert is_ignored("h.0.attn.bias", tied=True)
    assert not is_ignored("h.0.attn.c_attn.bias", tied=True)
    assert not is_ignored(canonical("gpt_neox.layers.0.attention.dense.bias"), tied=False)
