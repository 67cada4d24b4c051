"""The published config.json of Gemma, GLM-4, OLMo and Cohere 2: their meaning, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.families.gemma_like_configs import (
    COMMAND_R7B,
    GEMMA_2_2B,
    GEMMA_2B,
    GEMMA_3_1B,
    GEMMA_3_4B,
    GLM_4_9B,
    OLMO_2_7B,
    OLMO_3_7B,
)
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.layer_specs.rope import LinearScaling, Rope, Yarn
from vllm_lite.checkpoint.model_spec import ModelSpec, NormSpec
from vllm_lite.errors import ModelError


def load(folder: Path, raw: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(raw))
    return load_spec(folder)


@pytest.mark.parametrize(
    ("raw", "num_parameters"),
    [
        (GEMMA_2B, 2_506_172_416),
        (GEMMA_2_2B, 2_614_341_888),
        (GEMMA_3_1B, 999_885_952),
        (GEMMA_3_4B, 4_300_079_472),
        (GLM_4_9B, 9_400_279_040),
        (OLMO_2_7B, 7_298_617_344),
        (OLMO_3_7B, 7_298_011_136),
        (COMMAND_R7B, 8_028_033_024),
    ],
)
def test_known_models_have_their_weights(tmp_path: Path, raw: dict[str, Any], num_parameters: int) -> None:
    """The same numbers as transformers', without vision towers."""
    assert load(tmp_path, raw).num_parameters() == num_parameters


def test_gelu_of_gemma_1_is_the_tanh_form(tmp_path: Path) -> None:
    spec = load(tmp_path, GEMMA_2B)
    assert (spec.activation, spec.tie_word_embeddings, spec.embedding_scale) == ("gelu_tanh", True, 2048**0.5)
    assert spec.norm.plus_one


def test_gemma_2_alternates(tmp_path: Path) -> None:
    spec = load(tmp_path, GEMMA_2_2B | {"query_pre_attn_scalar": 144})
    assert [layer.attention.window for layer in spec.layers] == [4096, None] * 13
    assert {(layer.attention.scale, layer.attention.soft_cap) for layer in spec.layers} == {(1 / 12, 50.0)}
    assert (spec.logits_soft_cap, spec.eos_token_ids) == (30.0, (1, 107))
    uncapped = load(tmp_path, GEMMA_2_2B | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (uncapped.layers[0].attention.soft_cap, uncapped.logits_soft_cap) == (0.0, 0.0)


def test_gemma_3_turns_by_layer_type(tmp_path: Path) -> None:
    """The text part leaves out default values, and inherits the whole model's end tokens."""
    spec = load(tmp_path, GEMMA_3_4B)
    assert [layer.attention.window for layer in spec.layers[:7]] == [1024] * 5 + [None] + [1024]
    assert {layer.rope for layer in spec.layers if layer.attention.window} == {Rope(1e4)}
    assert {layer.rope for layer in spec.layers if not layer.attention.window} == {Rope(1e6, LinearScaling(8.0))}
    assert (spec.eos_token_ids, spec.tie_word_embeddings, spec.dtype) == ((1, 106), True, "bfloat16")
    nested = GEMMA_3_4B["text_config"] | {"eos_token_id": 1, "tie_word_embeddings": False}
    outer = GEMMA_3_4B | {"text_config": nested, "tie_word_embeddings": True}
    assert load(tmp_path, outer) == spec, "what transformers writes into the text part"


def test_sliding_layers_of_gemma_3_have_a_theta_of_their_own(tmp_path: Path) -> None:
    spec = load(tmp_path, GEMMA_3_1B | {"rope_local_base_freq": 5000.0, "rope_theta": 7000.0, "layer_types": None})
    assert [spec.layers[index].rope for index in (4, 5)] == [Rope(5000.0), Rope(7000.0)]


def test_olmo_3_scales_the_rope_of_full_attention_alone(tmp_path: Path) -> None:
    spec = load(tmp_path, OLMO_3_7B)
    sliding, full = (spec.layers[index] for index in (2, 3))
    assert (sliding.attention.window, sliding.rope) == (4096, Rope(5e5))
    assert full.attention.window is None
    assert full.rope is not None
    assert full.rope.scaling == Yarn(8.0, 8192)
    assert full.rope.attention_factor == pytest.approx(1.2079441541679836)
    raw = {key: value for key, value in OLMO_3_7B.items() if key not in ("layer_types", "rope_theta")}
    assert load(tmp_path, raw) == spec, "its defaults"


def test_olmo_rounds_its_norms_once(tmp_path: Path) -> None:
    assert {load(tmp_path, raw).norm for raw in (OLMO_2_7B, OLMO_3_7B)} == {NormSpec(1e-6, "wide rms")}


def test_cohere_2_rotates_sliding_layers_alone(tmp_path: Path) -> None:
    spec = load(tmp_path, COMMAND_R7B)
    assert [layer.attention.window for layer in spec.layers[:4]] == [4096, 4096, 4096, None]
    assert [layer.rope for layer in spec.layers[2:4]] == [Rope(5e4, interleaved=True), None]
    assert (spec.logits_scale, spec.tie_word_embeddings, spec.norm.kind) == (0.25, True, "layer")


def test_glm_turns_half_of_each_head(tmp_path: Path) -> None:
    spec = load(tmp_path, GLM_4_9B)
    assert {layer.rope for layer in spec.layers} == {Rope(1e4, rotary_size=64, interleaved=True)}
    assert (spec.qkv_bias, spec.output_bias, spec.norms_per_layer) == (True, False, 4)
    older = GLM_4_9B | {"architectures": ["GlmForCausalLM"], "eos_token_id": None}
    del older["partial_rotary_factor"]
    assert load(tmp_path, older).layers == spec.layers
    assert load(tmp_path, older).norms_per_layer == 2
    assert load(tmp_path, older).eos_token_ids == (151329, 151336, 151338)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (GEMMA_2_2B | {"hidden_activation": "mish"}, "hidden_activation 'mish' is not supported; supported: silu"),
        (
            GEMMA_3_1B | {"use_bidirectional_attention": True},
            "use_bidirectional_attention: must be false, but it is True",
        ),
        (GEMMA_2_2B | {"sliding_window": None}, "layer_types has sliding_attention, but sliding_window is not set"),
        (GEMMA_2B | {"layer_types": ["sliding_attention"] * 18}, "sliding_attention, but sliding_window is not set"),
        (GEMMA_3_1B | {"sliding_window_pattern": 0}, "sliding_window_pattern: Expected `int` >= 1, but it is 0"),
        (GEMMA_3_1B | {"rope_scaling": {"rope_type": "odd"}}, "rope_scaling.rope_type 'odd' is not supported"),
        (
            GEMMA_3_1B | {"rope_parameters": {"full_attention": {}, "sliding_attention": 3}},
            "rope_parameters.sliding_attention 3 is not an object of rope parameters",
        ),
        (
            OLMO_3_7B | {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            "rope_parameters.full_attention of type linear needs factor",
        ),
        (COMMAND_R7B | {"logit_scale": 0}, "logit_scale: Expected `float` > 0"),
        (GLM_4_9B | {"head_dim": 127}, "head_dim 127 is odd"),
    ],
)
def test_refusals_name_the_key_and_the_value(tmp_path: Path, raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(tmp_path, raw)
    assert words in str(caught.value)
