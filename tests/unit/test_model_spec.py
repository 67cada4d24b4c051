"""config.json in its old and new spelling gives one ModelSpec, and what is not supported is refused by name."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_lite.checkpoint.config_json import FAMILIES, load_spec, resolve_dtype
from vllm_lite.checkpoint.layer_specs.block_sparse import BlockSparse
from vllm_lite.checkpoint.layer_specs.rope import Llama3, Rope
from vllm_lite.checkpoint.model_spec import (
    AttentionSpec,
    LayerGroup,
    LayerSpec,
    ModelSpec,
    NormSpec,
    make_kv_groups,
)
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.tensor_names import canonical, is_ignored
from vllm_lite.errors import ConfigError, ModelError

QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"


def config(name: str = "llama_new") -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return raw


HEADS = AttentionSpec(32, 8, 128, scale=128**-0.5)


def stem(architecture: str) -> str:
    """Name of an architecture in a message, which has the endings of all of them once."""
    return re.sub("(ForConditionalGeneration|ForCausalLM|Model)$", "", architecture)


def group_of(layers, window=None, **heads):
    return LayerGroup(tuple(layers), msgspec.structs.replace(HEADS, window=window, **heads))


def layer_of(window, **heads):
    return LayerSpec(msgspec.structs.replace(HEADS, window=window, **heads), Rope(10000.0))


def load(folder: Path, raw: object, generation: object = None) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_spec(folder)


def refusal(folder: Path, raw: object) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, raw)
    assert str(folder / "config.json") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "qwen3_mixed"])
def test_old_and_new_spelling_mean_the_same(tmp_path, family):
    assert load(tmp_path, config(f"{family}_old")) == load(tmp_path, config(f"{family}_new"))


def test_llama(tmp_path):
    assert load(tmp_path, config("llama_old")) == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        layers=(LayerSpec(HEADS, Rope(500000.0, Llama3(8.0, 1.0, 4.0, 8192))),) * 32,
        norm=NormSpec(1e-5),
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        dtype="bfloat16",
        kv_groups=(group_of(range(32)),),
    )


def test_qwen3(tmp_path):
    spec = load(tmp_path, config("qwen3_new"))
    assert (spec.layers[0].attention.head_size, spec.qk_norm, spec.tie_word_embeddings) == (128, "head", True)
    assert {layer.rope for layer in spec.layers} == {Rope(1000000.0)}
    assert spec.eos_token_ids == (151645,)


def test_mistral_has_one_window(tmp_path):
    spec = load(tmp_path, config("mistral_new"))
    assert spec.qk_norm is None
    assert spec.kv_groups == (group_of(range(32), 4096),)
    whole = (group_of(range(32)),)
    assert load(tmp_path, config("mistral_new") | {"sliding_window": None}).kv_groups == whole
    raw = config("mistral_new")
    del raw["sliding_window"]
    assert load(tmp_path, raw).kv_groups == spec.kv_groups, "transformers' default"


def test_qwen3_may_have_a_window_in_some_layers(tmp_path):
    full, sliding = group_of(range(14), num_heads=16), group_of(range(14, 28), 4096, num_heads=16)
    spec = load(tmp_path, config("qwen3_mixed_old"))
    assert spec.kv_groups == (full, sliding)
    assert spec.kv_block_bytes(block_size=16, dtype_bytes=2) == 14 * 2 * 16 * 8 * 128 * 2
    everywhere = config("qwen3_mixed_old") | {"max_window_layers": 0}
    assert load(tmp_path, everywhere).kv_groups == (group_of(range(28), 4096, num_heads=16),)
    alternating = config("qwen3_mixed_new") | {"layer_types": ["sliding_attention", "full_attention"] * 14}
    groups = load(tmp_path, alternating).kv_groups
    assert [(group.kind, group.layers[:2]) for group in groups] == [("full", (1, 3)), ("sliding", (0, 2))]


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "sizes"),
    [
        (5, 0, [5]),
        (0, 5, [5]),
        (4, 4, [4, 4]),
        (3, 1, [1, 1, 1, 1]),
        (2, 1, [1, 1, 1]),
        (4, 22, [4, 4, 4, 4, 4, 4, 2]),
        (10, 9, [10, 9]),
        (1, 1, [1, 1]),
    ],
)
def test_layers_are_partitioned_so_that_little_is_padded(num_full, num_sliding, sizes):
    groups = make_kv_groups([layer_of(None)] * num_full + [layer_of(64)] * num_sliding)
    assert [len(group.layers) for group in groups] == sizes
    assert sorted(layer for group in groups for layer in group.layers) == list(range(num_full + num_sliding))
    assert [group.window for group in groups] == sorted((group.window for group in groups), key=lambda w: w or 0)
    for group in groups:
        assert group.kind == ("full" if group.window is None else "sliding")
        assert {layer < num_full for layer in group.layers} == {group.window is None}


def gemma4(num_layers, full, sliding):
    """Five sliding layers before each full one. `full`, `sliding`: heads, KV heads, head size."""
    names = ("num_heads", "num_kv_heads", "head_size")
    kinds = [
        layer_of(window, **dict(zip(names, heads, strict=True))) for window, heads in ((None, full), (1024, sliding))
    ]
    return [kinds[index % 6 != 5] for index in range(num_layers)]


GEMMA4 = {
    # 5 layers of 2 * 512 elements of K are 5120, of 8 * 256 are 10240: half of a full block is padding.
    "26B": (gemma4(30, (16, 2, 512), (16, 8, 256)), 1, [5] * 6, 10240),
    "26B over 2 ranks": (gemma4(30, (16, 2, 512), (16, 8, 256)), 2, [5] * 6, 5120),
    # Here a rank has 1 * 512 and 2 * 256: the same bytes.
    "26B over 4 ranks": (gemma4(30, (16, 2, 512), (16, 8, 256)), 4, [5] * 6, 2560),
    # 1 * 512 and 1 * 256: 13 sliding layers are 3328, the full ones 2560 of them.
    "26B over 8 ranks": (gemma4(30, (16, 2, 512), (16, 8, 256)), 8, [5, 13, 12], 3328),
    # 10 layers of 4 * 512 and 5 of 16 * 256 are 20480, without padding.
    "31B": (gemma4(60, (32, 4, 512), (32, 16, 256)), 1, [10] + [5] * 10, 20480),
    "31B over 8 ranks": (gemma4(60, (32, 4, 512), (32, 16, 256)), 8, [10] * 6, 5120),
}
"""Layers, ranks, layers of each group, elements of a token's K in a block."""


@pytest.mark.parametrize("name", GEMMA4)
def test_groups_of_layers_that_differ_in_heads_and_head_size(tmp_path, name):
    layers, world, sizes, elements = GEMMA4[name]
    whole = msgspec.structs.replace(load(tmp_path, config()), layers=tuple(layers), kv_groups=make_kv_groups(layers))
    spec = whole.shared_by(world)
    assert [len(group.layers) for group in spec.kv_groups] == sizes
    assert sorted(layer for group in spec.kv_groups for layer in group.layers) == list(range(len(layers)))
    assert all(layers[layer].attention == group.attention for group in spec.kv_groups for layer in group.layers)
    for block_size in (1, 16):
        assert whole.kv_block_bytes(block_size, 2, world) == 2 * elements * block_size * 2
        for rank in range(world):
            own = spec.per_rank(Shard(rank, world))
            assert own.kv_block_bytes(block_size, 2) == 2 * elements * block_size * 2
            assert [group.layers for group in own.kv_groups] == [group.layers for group in spec.kv_groups]
    assert whole.shared_by(1) == whole


def test_a_spec_survives_the_wire(tmp_path):
    spec = load(tmp_path, config("qwen3_mixed_new"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama_old", 8.030261248), ("mistral_old", 7.241732096), ("qwen3_old", 0.596049920)],
    ids=["llama-3.1-8b", "mistral-7b", "qwen3-0.6b"],
)
def test_num_parameters_of_known_models(tmp_path, name, billions):
    assert load(tmp_path, config(name)).num_parameters() == round(billions * 1e9)


def test_defaults_of_keys_that_older_configs_lack(tmp_path):
    raw = config("llama_old")
    for key in ("num_key_value_heads", "rope_theta", "rope_scaling", "torch_dtype", "tie_word_embeddings", "mlp_bias"):
        del raw[key]
    spec = load(tmp_path, raw)
    assert (spec.layers[0], spec.dtype) == (layer_of(None, num_kv_heads=32), "float32")
    assert not spec.tie_word_embeddings


def test_rope_scaling_in_its_oldest_form_has_the_key_type(tmp_path):
    raw = config("llama_old")
    raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    assert {layer.rope and type(layer.rope.scaling) for layer in load(tmp_path, raw).layers} == {Llama3}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (7,)),
        ({}, (7,)),
        ({"eos_token_id": None}, (7,)),
        ({"eos_token_id": 8}, (8, 7)),
        ({"eos_token_id": [8, 9]}, (8, 9, 7)),
        ({"eos_token_id": [8, 7, 8]}, (8, 7)),
    ],
)
def test_eos_ids_of_generation_config_come_before_those_of_config(tmp_path, generation, expected):
    assert load(tmp_path, config() | {"eos_token_id": 7}, generation).eos_token_ids == expected


def test_a_model_without_eos_has_none(tmp_path):
    assert load(tmp_path, config() | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MPNetForMaskedLM"]}, ["MPNetForMaskedLM", "ForCausalLM"]),
        ({"architectures": None}, ["architectures", *map(stem, FAMILIES)]),
        ({"architectures": [3]}, ["architectures", *map(stem, FAMILIES)]),
        ({"hidden_size": "4096"}, ["hidden_size", "'4096'", "int"]),
        ({"hidden_size": 0}, ["hidden_size", "0", ">= 1"]),
        ({"hidden_size": True}, ["hidden_size", "True", "int"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers", "10000"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ({"num_key_value_heads": 5}, ["num_key_value_heads 5", "32"]),
        ({"head_dim": 127}, ["head_dim 127", "even"]),
        ({"head_dim": None, "hidden_size": 4097}, ["hidden_size 4097", "num_attention_heads 32"]),
        ({"hidden_act": "mish"}, ["hidden_act", "'mish'", "silu"]),
        ({"dtype": "int8"}, ["dtype", "'int8'", "bfloat16"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "hqq"]),
        ({"sliding_window": 4096}, ["sliding_window 4096", "full attention"]),
        ({"sliding_window": 4096, "use_sliding_window": True}, ["sliding_window 4096"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0.5}, ["sliding_window", "float"]),
        (QWEN3 | {"layer_types": ["chunked_attention"]}, ["layer_types", "chunked_attention", "sliding_attention"]),
        (QWEN3 | {"layer_types": ["full_attention"]}, ["layer_types has 1 entries for 32 layers"]),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 32}, ["layer_types", "use_sliding_window"]),
        (QWEN3 | {"max_window_layers": -1}, ["max_window_layers", "-1"]),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 4.0}}, ["rope_parameters.rope_type", "'ntk'", "llama3"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, ["low_freq_factor"]),
        ({"rope_parameters": {"factor": "4"}}, ["rope_parameters.factor", "'4'", "float"]),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor", "1.5"]),
        ({"rope_parameters": {"chunked": {"rope_theta": 1e4}}}, ["rope_parameters", "layer type", "chunked"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals_name_the_key_the_value_and_a_valid_one(tmp_path, changes, words):
    message = refusal(tmp_path, config() | changes)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize("low", [4.0, 5.0])
def test_llama3_blend_needs_a_rising_range(tmp_path, low):
    raw = config()
    raw["rope_parameters"]["low_freq_factor"] = low
    assert "high_freq_factor 4.0 must be greater" in refusal(tmp_path, raw)


def test_a_missing_key_is_named(tmp_path):
    raw = config()
    del raw["vocab_size"]
    assert "vocab_size" in refusal(tmp_path, raw)


DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b'{"a": }', DEEP])
def test_damaged_json(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        load_spec(tmp_path)


@pytest.mark.parametrize("raw", [[], None, "llama", 3])
def test_json_that_is_no_object(tmp_path, raw):
    assert "architectures" in refusal(tmp_path, raw)


def test_damaged_generation_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"generation_config\.json.*eos_token_id"):
        load(tmp_path, config(), {"eos_token_id": "x"})


def test_missing_folder_and_file(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_spec(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        load_spec(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"model\.safetensors: no GGUF file; a checkpoint is the folder"):
        load_spec(tmp_path / "model.safetensors")


def test_kv_block_bytes_of_the_founding_documents(tmp_path):
    raw = config() | {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    spec = load(tmp_path, raw)
    assert spec.kv_block_bytes(block_size=4, dtype_bytes=2) == 65536
    assert [spec.kv_block_bytes(4, 2, tp) for tp in (2, 4, 8)] == [32768, 16384, 8192]


def test_kv_heads_are_split_or_replicated(tmp_path):
    spec = load(tmp_path, config() | {"num_key_value_heads": 2})
    heads = spec.layers[0].attention
    assert [heads.per_rank(Shard(0, tp)).num_kv_heads for tp in (1, 2, 4, 8)] == [2, 1, 1, 1]
    assert [heads.per_rank(Shard(0, tp)).num_heads for tp in (1, 2, 4, 8)] == [32, 16, 8, 4]
    with pytest.raises(ConfigError, match="tensor_parallel_size 3"):
        heads.per_rank(Shard(0, 3))


def test_a_rank_has_the_slopes_and_the_pattern_of_its_heads():
    def patterns(spec):
        return [rank.block_sparse.tp_rank for rank in map(spec.per_rank, Shard(0, 4).all_ranks)]

    slopes, by_head = tuple(map(float, range(8))), BlockSparse(4, 8, 64, head_step=1)
    spec = AttentionSpec(8, 2, 16, 1.0, alibi_slopes=slopes, block_sparse=by_head)
    ranks = [spec.per_rank(shard) for shard in Shard(0, 4).all_ranks]
    assert [rank.alibi_slopes for rank in ranks] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert patterns(spec) == [0, 1, 2, 3]
    by_kv_head = msgspec.structs.replace(spec, block_sparse=BlockSparse(4, 8, 64, head_step=-1))
    assert patterns(by_kv_head) == [0, 0, 1, 1], "a KV head that two ranks hold is the same one"
    uneven = AttentionSpec(5, 1, 16, 1.0, alibi_slopes=slopes[:5])
    assert [uneven.per_rank(shard).alibi_slopes for shard in Shard(0, 2).all_ranks] == [(0, 1, 2), (3, 4)]
    uneven = msgspec.structs.replace(uneven, block_sparse=by_head)
    for rank in range(2):
        with pytest.raises(
            ConfigError, match="tensor_parallel_size 2 does not fit 5 heads with 1 KV heads, which fit 1 or 5"
        ):
            uneven.per_rank(Shard(rank, 2))


@pytest.mark.parametrize(
    ("changes", "tp", "says"),
    [
        ({"num_key_value_heads": 8}, 3, "32 heads with 8 KV heads, .* fit 1, 2, 4, 8, 16 or 32"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 90}, 4, " fit 1, 3 or 6"),
        ({"intermediate_size": 12}, 8, "intermediate_size 12 and .* fit 1, 2 or 4"),
        ({"intermediate_size": 11, "num_key_value_heads": 8}, 2, " fit 1"),
        ({"vocab_size": 3}, 4, "vocabulary of 3 fit 1 or 2"),
    ],
)
def test_refusals_of_a_tensor_parallel_size_name_valid_ones(tmp_path, changes, tp, says):
    spec = load(tmp_path, config() | {"head_dim": 128} | changes)
    with pytest.raises(ConfigError, match=rf"^tensor_parallel_size {tp} does not fit this model, whose .*{says}$"):
        spec.check_tensor_parallel(Shard(0, tp))
    spec.check_tensor_parallel(Shard())


def test_resolve_dtype(tmp_path):
    spec = load(tmp_path, config())
    assert resolve_dtype("auto", spec) == "bfloat16"
    assert resolve_dtype("float32", spec) == "float32"
    with pytest.raises(ConfigError, match="'fp8'"):
        resolve_dtype("fp8", spec)


def test_no_torch_is_imported():
    code = "import sys, vllm_lite.checkpoint.model_spec; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_granite_with_windows_sees_everything_in_every_fourth_layer(tmp_path):
    raw = config() | {
        "architectures": ["GraniteSWAForCausalLM"],
        "num_hidden_layers": 5,
        "layer_rope_theta": [0, 1, 2, 3, 4],
    }
    spec = load(tmp_path, raw)
    assert [layer.attention.window for layer in spec.layers] == [None, 128, 128, 128, None]
    assert [layer.rope and layer.rope.theta for layer in spec.layers] == [None, 1, 2, 3, 4]
    assert "layer_rope_theta has 1 entries for 5 layers" in refusal(tmp_path, raw | {"layer_rope_theta": [0]})


def test_which_layers_have_an_index_is_said_in_three_ways(tmp_path):
    raw = config() | LATENT | {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 6}
    ways: list[dict[str, Any]] = [
        {"index_topk_freq": 2},
        {"index_topk_pattern": "FFSFSF"},
        {"indexer_types": ["full", "full", "shared", "full", "shared", "full"]},
    ]
    for way in ways:
        layers = load(tmp_path, raw | way).layers
        indices = [layer.latent and layer.latent.index for layer in layers]
        assert [index and index.is_shared for index in indices] == [False, False, True, False, True, False]
        assert [layer.attention.index_size for layer in layers] == [128, 128, 0, 128, 0, 128]


LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "rope_scaling": None,
}
"""Numbers of a model with latent attention and experts."""


def test_kimi_is_read_as_it_is_published_and_as_transformers_writes_it(tmp_path):
    text = config() | LATENT | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    specs = [
        load(tmp_path, {"architectures": [name], "model_type": "kimi_k25", "text_config": text})
        for name in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
    ]
    assert specs[0].layers == specs[1].layers == load(tmp_path, text).layers
    stored = (
        "language_model.model.layers.3.mlp.down_proj.weight",
        "language_model.model.blocks.3.mlp.down_proj.weight",
    )
    assert {canonical(name) for name in stored} == {"model.layers.3.mlp.down_proj.weight"}
    assert is_ignored(canonical("mm_projector.proj.0.weight"), tied=False)


@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        ("ApertusForCausalLM", {"hidden_act": "silu"}, "hidden_act: must be xielu, but it is 'silu'"),
        ("ApertusForCausalLM", {"hidden_act": "xielu", "post_norm": True}, "post_norm: must be false, but it is True"),
        ("DeepseekV32ForCausalLM", LATENT | {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("DeepseekV32ForCausalLM", LATENT | {"index_head_dim": 6}, "index_head_dim 6 is less than qk_rope_head_dim 8"),
        ("FalconH1ForCausalLM", {"mamba_rms_norm": True}, "mamba_norm_before_gate true is not supported"),
        ("FalconH1ForCausalLM", {"mamba_n_heads": 7}, "mamba_n_heads 7 of 146 elements are not mamba_d_ssm 1024"),
        ("FalconH1ForCausalLM", {"mamba_n_groups": 3}, "mamba_n_groups 3 does not divide mamba_n_heads 128"),
        ("FalconH1ForCausalLM", {"projectors_bias": True}, "projectors_bias: must be false, but it is True"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        ("GlmMoeDsaForCausalLM", LATENT | {"indexer_types": ["full"]}, "indexer_types full must have full or shared"),
        ("GlmMoeDsaForCausalLM", LATENT | {"index_topk_pattern": "SF" * 16}, "and full for the first"),
        ("GlmMoeDsaForCausalLM", LATENT | {"index_topk_pattern": "FX" * 16}, "indexer_types full, X"),
        ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}, "use_qk_norm: must be true, but it is False"),
        (
            "HunYuanDenseV1ForCausalLM",
            {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "alpha": 10.0}},
            "head_dim 2 is too small",
        ),
        ("Mistral3ForConditionalGeneration", {"model_type": "llama"}, "mistral, ministral3, mistral4"),
        (
            "MiniMaxM2ForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 130},
            "rotary_dim 130 is more than head_dim 128",
        ),
        ("Lfm3ForCausalLM", {"use_sandwich_norm": False}, "use_sandwich_norm: must be true, but it is False"),
        ("Lfm3ForCausalLM", {"num_hidden_layers": 1, "layer_types": ["mamba"]}, "layer_types mamba not supported"),
        ("Mamba2ForCausalLM", {"num_heads": 32, "n_groups": 8}, "n_groups 8"),
        ("Mamba2ForCausalLM", {"num_heads": 3, "n_groups": 1}, "3 num_heads of 128 are not expand"),
        ("MuseGlimmerForConditionalGeneration", {"layer_rope_theta": [0]}, "layer_rope_theta has 1 entries for 32"),
        ("MuseGlimmerForConditionalGeneration", {"layer_rope_theta": [0, 5] * 16}, "layer_rope_theta 5.0 is not"),
        (
            "MuseGlimmerForConditionalGeneration",
            {"attention_bias": True},
            "attention_bias: must be false, but it is True",
        ),
    ],
)
def test_newer_families_refuse_by_name(tmp_path, architecture, changes, says):
    raw = config() | {"hidden_act": "silu", "head_dim": 128, "architectures": [architecture]} | changes
    assert says in refusal(tmp_path, raw)


@pytest.mark.parametrize(
    ("name", "odd", "usual"),
    [
        ("mistral_new", {"sliding_window": 0}, {"sliding_window": None}),
        ("mistral_new", {"sliding_window": -1}, {"sliding_window": None}),
        ("llama_new", {"dtype": "auto"}, {"dtype": None}),
        ("llama_new", {"dtype": None, "torch_dtype": "auto"}, {"dtype": None}),
        ("llama_new", {"bos_token_id": -1}, {"bos_token_id": None}),
        ("llama_new", {"eos_token_id": -1}, {"eos_token_id": None}),
        ("llama_new", {"eos_token_id": [7, -1]}, {"eos_token_id": [7]}),
    ],
)
def test_values_that_say_there_is_none_are_none(
    tmp_path: Path, name: str, odd: dict[str, Any], usual: dict[str, Any]
) -> None:
    assert load(tmp_path, config(name) | odd) == load(tmp_path, config(name) | usual)


def test_an_end_token_of_minus_one_in_generation_config_is_none(tmp_path: Path) -> None:
    given = config() | {"eos_token_id": 5}
    assert load(tmp_path, given, {"eos_token_id": -1}) == load(tmp_path, given, {})
