"""Models in GGUF files: their logits against transformers', and blocks against their dequantized values."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.families.all import VARIANTS
from tests.families.llama_like import llama
from tests.families.variant import Variant
from tests.gguf_files import write_gguf
from tests.paged import Oracle, Paged
from tests.thread_group import on_ranks
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.gguf.config import architecture_of
from vllm_lite.checkpoint.gguf.header import GgufHeader
from vllm_lite.checkpoint.quantization.spec import Gguf
from vllm_lite.checkpoint.tensors.rank_shapes import rank_shape
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.kernels import cpu
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
TESTED = (
    "llama-yarn",
    "qwen2-moe",
    "gemma2",
    "gemma3",
    "phi3-long-partial-tied",
    "gpt2",
    "glm4",
    "glm4-moe",
    "granite-moe",
    "ernie-moe",
    "bloom",
    "neox",
    "neox-in-turn",
    "falcon-one-kv-head",
    "falcon-two-norms",
    "falcon-one-norm",
    "deepseek-v2-groups",
    "deepseek-v3",
    "lfm2",
    "lfm2-moe",
    "lfm2-moe-no-bias",
    "ministral3",
    "granite-moe-shared",
    "granite-hybrid",
    "granite-hybrid-moe",
    "nemotron-h",
    "nemotron-h-moe",
    "qwen3.5",
    "qwen3.5-moe",
    "gpt-oss",
    "qwen3-next",
    "gemma4",
    "gemma4-moe",
    "gemma4-per-layer",
    "gemma4-unified-shared",
)
"""Each has something in its files that others have not."""
MAX_DIFFERENCE = 4e-4
"""Maximum difference of logits. Those of the qwen3-next checkpoint itself differ by 3.4e-4, and its GGUF file gives the
same ones."""
OWN = {"layers", "norm", "quantization", "qkv_layout", "splits_gate_up"}
"""The fields of ModelSpec in which a GGUF file may differ from the checkpoint that it was made of."""


def usual(variant: Variant) -> Variant:
    """Set the fields that GGUF files cannot express to the usual values: the scale of scores, the layers with experts,
    YaRN's single magnitude, and the size of MLPs in models without them."""
    settings = dict(variant.settings)
    if "query_pre_attn_scalar" in settings:
        settings["query_pre_attn_scalar"] = settings["head_dim"]
    if settings.pop("moe_layer_end_index", None) is not None:
        settings["moe_num_shared_experts"] = 1
    if "mscale_all_dim" in (rope := settings.get("rope_parameters", {})):
        settings["rope_parameters"] = rope | {"mscale": rope["mscale_all_dim"]}
    if "mlp" not in settings.get("layers_block_type", ["mlp"]):
        settings["intermediate_size"] = settings["moe_intermediate_size"]
    if variant.model == "Lfm2MoeForCausalLM":
        settings["tie_word_embeddings"] = True  # gguf-py 0.19 has no name for its head
    return replace(variant, settings=settings)


TESTED_VARIANTS = [*(usual(one) for one in VARIANTS if one.name in TESTED), llama("llama3", LLAMA3)]


@pytest.mark.parametrize("variant", TESTED_VARIANTS, ids=lambda one: one.name)
def test_a_family_is_the_same_in_a_gguf_file(tmp_path: Path, variant: Variant) -> None:
    folder = variant.make(tmp_path / "checkpoint")
    oracle = Oracle(folder, max_model_len=variant.max_model_len)
    file = write_gguf(tmp_path / "model.gguf", folder)
    model, spec = oracle.stored_as(file), load_spec(file)
    is_gemma4 = (
        spec.architecture == "Gemma4ForCausalLM"
    )  # one for all of the family, and towers are in files of their own
    own = OWN | ({"architecture", "vision", "extra_parameters"} if is_gemma4 else set())
    assert {key for key in spec.__struct_fields__ if getattr(spec, key) != getattr(oracle.spec, key)} <= own
    oracle.spec = spec  # attention by the file's config
    assert oracle.difference(Paged(oracle, model=model).run(oracle.tokens, 64)) < MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("architecture", "variant", "settings"),
    [
        ("qwen2vl", "qwen2-odd-tied", {}),
        ("qwen3vl", "qwen3", {}),
        ("qwen3vlmoe", "qwen3-moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
        ("mistral3", "llama", {}),
    ],
)
def test_vision_models_answer_texts_as_their_text_family(
    tmp_path: Path, architecture: str, variant: str, settings: dict[str, Any]
) -> None:
    """Positions of texts are the same on all three axes of their rope."""
    variants, folder = {one.name: one for one in VARIANTS}, tmp_path / "checkpoint"
    if found := variants.get(variant):
        replace(found, settings={**found.settings, **settings}).make(folder)
    else:
        make_checkpoint(folder, variant)
    oracle = Oracle(folder)
    axes: dict[str, Any] = {f"{architecture}.rope.dimension_sections": [2, 1, 1, 0]} if "vl" in architecture else {}
    file = write_gguf(tmp_path / "model.gguf", folder, more={"general.architecture": architecture} | axes)
    assert oracle.difference(oracle.logits_of(file)) < 3e-4
    assert load_spec(file).architecture == oracle.spec.architecture


KINDS_OF_PARTS = {
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",
    "attn_output": "Q8_0",
    "ffn_gate": "Q4_0",
    "ffn_up": "F16",
    "ffn_down": "Q5_1",
    "token_embd": "Q4_K",
    "output": "Q6_K",
}


SMALL_KINDS_OF_PARTS = KINDS_OF_PARTS | {
    "attn_q": "IQ2_XXS",
    "attn_k": "IQ3_S",
    "attn_v": "IQ1_S",
    "attn_output": "TQ1_0",
    "ffn_gate": "TQ2_0",
    "ffn_up": "NVFP4",
    "ffn_down": "IQ3_S",
    "token_embd": "IQ3_S",
}


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize(
    ("kinds", "label"),
    [
        (KINDS_OF_PARTS, "GGUF Q4_0, Q4_K, Q5_1, Q6_K, Q8_0"),
        (SMALL_KINDS_OF_PARTS, "GGUF IQ1_S, IQ2_XXS, IQ3_S, NVFP4, Q6_K, TQ1_0, TQ2_0"),
    ],
    ids=["large", "small"],
)
def test_blocks_multiply_as_their_dequantized_floats(tmp_path: Path, kinds: dict[str, str], label: str) -> None:
    """Q and K are of one type and V of another, gate is in blocks and up is not."""

    def kind_of(name: str) -> str:
        return kinds[name.split(".")[-2]]

    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    folder = make_checkpoint(tmp_path / "checkpoint", "llama", head_dim=32, initializer_range=0.05, **sizes)
    blocks = write_gguf(tmp_path / "blocks.gguf", folder, kind_of)
    floats = write_gguf(tmp_path / "floats.gguf", folder, kind_of, dense=True)
    oracle = Oracle(folder)
    one, other = (oracle.logits_of(file) for file in (blocks, floats))
    # Products of Q and K differ by 2e-5; scores of random blocks are large, and the softmax makes that a thousandth.
    assert (one - other).abs().max() < 3e-3
    if cpu.available():
        embedding: Any = oracle.stored_as(blocks).embedding  # type: ignore[attr-defined]
        assert not hasattr(embedding, "weight"), "there is no dense table"
    quantization = load_spec(blocks).quantization
    assert quantization is not None
    assert quantization.label == label
    assert load_spec(blocks).dtype == "bfloat16"
    assert load_spec(floats).dtype == "float32"


@pytest.mark.usefixtures("float_products")
def test_ranks_share_blocks(tmp_path: Path) -> None:
    """The head is the table of token vectors. Blocks that two ranks cannot share are refused."""
    folder = make_checkpoint(tmp_path / "checkpoint", "qwen3", tie_word_embeddings=True, intermediate_size=128)
    blocks = write_gguf(tmp_path / "blocks.gguf", folder, lambda _: "Q8_0")
    oracle = Oracle(folder)
    floats = oracle.stored_as(write_gguf(tmp_path / "floats.gguf", folder, lambda _: "Q8_0", dense=True))
    expected = Paged(oracle, model=floats).run(oracle.tokens, 64)
    for logits in oracle.logits_on_two_ranks(blocks):
        assert (logits - expected).abs().max() < 3e-4
    if cpu.available():
        model: Any = oracle.stored_as(blocks)
        assert model.embedding.packed is model.lm_head.matmul.packed, "one table in blocks serves both"
    narrow = make_checkpoint(tmp_path / "narrow", "qwen3", intermediate_size=96)
    file = write_gguf(tmp_path / "narrow.gguf", narrow, lambda _: "Q8_0")
    with pytest.raises(ConfigError, match="96 inputs in groups of 32 cannot be split so that a rank has 48 from 0 on"):
        on_ranks(2, lambda rank: oracle.stored_as(file, rank))


LATENT: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}


@pytest.mark.usefixtures("float_products")
def test_ranks_share_heads_with_separate_matrices(tmp_path: Path) -> None:
    """The matrices that make K and V of a latent: each rank has some of their heads."""
    variant = next(usual(one) for one in VARIANTS if one.name == "deepseek-v3")
    folder = replace(variant, settings={**variant.settings, **LATENT}).make(tmp_path / "checkpoint")
    blocks = write_gguf(tmp_path / "blocks.gguf", folder, lambda _: "Q8_0")
    oracle = Oracle(folder)
    dense = write_gguf(tmp_path / "floats.gguf", folder, lambda _: "Q8_0", dense=True)
    expected = oracle.logits_of(dense)
    quantization = load_spec(blocks).quantization
    assert isinstance(quantization, Gguf)
    assert quantization.kind("model.layers.1.self_attn.k_b_proj.3") == "Q8_0"
    whole = oracle.logits_of(blocks)
    assert (whole - expected).abs().max() < 3e-4
    for logits in oracle.logits_on_two_ranks(blocks):
        assert (logits - expected).abs().max() < 3e-4
    for planned, held in on_ranks(2, lambda rank: parts_of(oracle.stored_as(dense, rank), "_b_proj.")):
        assert planned == held
        assert sum(map(prod, held)) == 3 * 2 * 2 * 32 * 32


def parts_of(model: Any, part: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The shapes that a plan gives to the tensors of single heads or experts, and those that the model wants."""
    slots = [slot for group in model.weight_groups() for slot in group.slots if part in slot.name]
    slots = [slot for slot in slots if any(each.isdecimal() for each in slot.name.split(".")[3:])]
    assert slots
    shard = model.communicator.shard
    return [rank_shape(slot.name, slot.shape, model.spec, shard) for slot in slots], [slot.size for slot in slots]


def test_keys_missing_in_files_of_old_converters_are_named(tmp_path: Path) -> None:
    variant = next(usual(one) for one in VARIANTS if one.name == "deepseek-v2-lite")
    file = write_gguf(tmp_path / "model.gguf", variant.make(tmp_path / "checkpoint"))
    assert load_spec(file).architecture == "DeepseekV2ForCausalLM"
    file.write_bytes(file.read_bytes().replace(b"attention.key_length_mla", b"attention.key_length_old"))
    with pytest.raises(ModelError, match=r"deepseek2.attention.key_length_mla is missing: files that converters"):
        load_spec(file)


@pytest.mark.parametrize("name", ["mamba", "llama with experts", 7])
def test_an_architecture_that_is_not_supported_is_named(name: Any) -> None:
    with pytest.raises(ModelError, match=rf"general.architecture {name!r} is not supported in GGUF files; .* bloom"):
        architecture_of(GgufHeader({"general.architecture": name}, {}))


def test_random_weights_are_for_floats(tmp_path: Path) -> None:
    """Also for floats in a GGUF file, but not for blocks, nor for codes of other formats."""
    folder = make_checkpoint(tmp_path / "checkpoint", "qwen3", num_hidden_layers=1)
    floats = write_gguf(tmp_path / "floats.gguf", folder)
    blocks = write_gguf(tmp_path / "blocks.gguf", folder, lambda _: "Q8_0")
    load_weights(build(load_spec(floats), "float32", "cpu", Sizes(64, 64)), floats, "dummy")
    with pytest.raises(ConfigError, match=r"--load-format dummy is for dense checkpoints, and this one is GGUF Q8_0;"):
        load_weights(build(load_spec(blocks), "float32", "cpu", Sizes(64, 64)), blocks, "dummy")


def test_a_tensor_that_is_missing_or_not_asked_for_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "qwen3", num_hidden_layers=1)
    file = write_gguf(tmp_path / "model.gguf", folder)
    data = file.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight")
    file.write_bytes(data)
    model = build(load_spec(file), "float32", "cpu", Sizes(64, 64))
    with pytest.raises(ModelError, match=r"1 missing: model.layers.0.mlp.up_proj.weight. 1 unexpected: blk.0.ffn_xx"):
        load_weights(model, file)


def test_a_file_names_the_attention_layers_of_lfm2(tmp_path: Path) -> None:
    folder = next(one for one in VARIANTS if one.name == "lfm2").make(tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", folder, more={"lfm2.attention.head_count_kv": 2})
    with pytest.raises(ModelError, match=r"lfm2.attention.head_count_kv must be a number for each layer, and it is 2"):
        load_spec(file)


@pytest.mark.usefixtures("float_products")
def test_experts_of_gpt_oss_are_blocks_with_biases(tmp_path: Path) -> None:
    """Like the original files: MXFP4, a bias for each matrix, and ranks that divide each expert."""
    variant = next(one for one in VARIANTS if one.name == "gpt-oss")
    settings = {**variant.settings, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    oracle = Oracle(replace(variant, settings=settings).make(tmp_path / "checkpoint"))
    blocks, floats = (
        write_gguf(
            tmp_path / f"{dense}.gguf",
            oracle.path,
            lambda name: "MXFP4" if name.endswith("_exps.weight") else "F32",
            dense=dense,
        )
        for dense in (False, True)
    )
    for planned, held in on_ranks(2, lambda rank: parts_of(oracle.stored_as(floats, rank), ".experts.")):
        assert planned == held
    expected = oracle.logits_of(floats)
    assert (oracle.logits_of(blocks) - expected).abs().max() < 3e-4
    for logits in oracle.logits_on_two_ranks(blocks):
        assert (logits - expected).abs().max() < 3e-4
