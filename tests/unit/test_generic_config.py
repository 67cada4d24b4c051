"""The config.json of an architecture that has no reader of its own: usual keys, their other names, and refusals."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ConfigError, ModelError

USUAL = {
    "architectures": ["NovelForCausalLM"],
    "model_type": "novel",
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "hidden_act": "something new",
    "rope_scaling": {"rope_type": "something newer"},
    "dtype": "bfloat16",
    "eos_token_id": [3, 4],
}


def read(folder: Path, model_impl: str = "auto", /, **changes: Any) -> ModelSpec:
    """The spec of a checkpoint with these keys; what is None is left out."""
    config = {key: value for key, value in (USUAL | changes).items() if value is not None}
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return load_spec(folder, model_impl)


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def test_usual_keys(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert (spec.implementation, spec.folder, spec.architecture) == ("transformers", str(tmp_path), "NovelForCausalLM")
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (8, 8, 8)
    assert (spec.num_layers, spec.vocab_size, spec.dtype, spec.eos_token_ids) == (4, 500, "bfloat16", (3, 4))
    assert [layer.rope for layer in spec.layers] == [None] * 4
    assert spec.intermediate_size == 256


def test_other_names(tmp_path: Path) -> None:
    old = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"))
    names = {"n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 64, "n_inner": 200, "num_kv_heads": 2}
    spec = read(tmp_path, **old, **names, kv_channels=32)
    attention = spec.layers[0].attention
    assert (spec.hidden_size, spec.num_layers, spec.max_position_embeddings) == (96, 2, 64)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (6, 2, 32)
    assert spec.intermediate_size == 200


def test_the_usual_name_wins(tmp_path: Path) -> None:
    assert read(tmp_path, n_layer=9).num_layers == 4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [None] * 4),
        ({"sliding_window": 32}, [32] * 4),
        ({"sliding_window": 32, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 0}, [None] * 4),
        ({"sliding_window": 32, "max_window_layers": 3}, [None, None, None, 32]),
        ({"sliding_window": 32, "sliding_window_pattern": 2}, [32, None, 32, None]),
        ({"sliding_window": 32, "sliding_window_pattern": "LLG"}, [32, 32, None, 32]),
        (
            {"sliding_window": 32, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
            [None, 32, 32, 32],
        ),
    ],
)
def test_windows(tmp_path: Path, keys: dict[str, Any], expected: list[int | None]) -> None:
    spec = read(tmp_path, **keys)
    assert windows(spec) == expected
    assert len(spec.kv_groups) == (1 if len(set(expected)) == 1 else len(spec.kv_groups))


def test_the_part_that_writes_text_is_read(tmp_path: Path) -> None:
    inner = {key: USUAL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    names = dict.fromkeys(inner)
    outer = {"architectures": ["NovelForConditionalGeneration"], "text_config": inner | {"model_type": "novel_text"}}
    with pytest.raises(ModelError, match=r"'novel_text'.: has none of vocab_size"):
        read(tmp_path, **names, **outer)
    inner |= {"vocab_size": 7, "max_position_embeddings": 9}
    assert read(tmp_path, **names, **outer | {"text_config": inner}).vocab_size == 7


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "T5.* an encoder and a decoder",
        ),
        ({"architectures": ["MPNetForMaskedLM"]}, "MPNetForMaskedLM .* does not write text"),
        (
            {"architectures": ["MambaForCausalLM"], "num_attention_heads": None},
            "Mamba.* none of num_attention_heads, n_h",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "'novel'. has linear_attention layers; supported are",
        ),
        ({"kv_lora_rank": 512}, "latent attention .kv_lora_rank."),
        ({"num_attention_heads": "many"}, "num_attention_heads: Expected `int`"),
        ({"num_key_value_heads": [1, 2, 3, 4]}, "num_key_value_heads"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is not set"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq' is not supported for a model that"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{reason}"):
        read(tmp_path, **changes)


def test_the_model_impl_setting_selects_the_implementation(tmp_path: Path) -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 96, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    llama |= {"rope_scaling": None, "num_attention_heads": 4}
    for chosen, expected in (("auto", "native"), ("native", "native"), ("transformers", "transformers")):
        assert read(tmp_path, chosen, **llama).implementation == expected
    refusal = r"architectures .'NovelForCausalLM'. is not supported; supported: .* Llama .*each ForCausalLM"
    with pytest.raises(ModelError, match=refusal):
        read(tmp_path, "native")


def test_deterministic_needs_a_native_one(tmp_path: Path) -> None:
    from vllm_lite.client.engines.launch import resolve
    from vllm_lite.config import EngineConfig

    read(tmp_path)
    config = EngineConfig.check({"model": str(tmp_path), "deterministic": True, "device": "cpu"})
    with pytest.raises(ConfigError, match="deterministic needs a native implementation"):
        resolve(config)
