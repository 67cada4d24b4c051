"""Quantized checkpoints of families whose stored tensors are converted at loading: rows in another order, several
matrices in one tensor, transposed matrices, experts under several names."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.variant import Variant
from tests.mxfp4_files import as_mxfp4
from tests.paged import Oracle
from tests.quantized_tensors import awq_tensors, gptq_config, gptq_tensors, nf4_tensors, quantized_pair, say_quantized
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.memory import share
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE

GPTQ = gptq_config(sym=False)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
HALF_A_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MIXTURE = SIZES | HEADS | {"num_experts_per_tok": 2}
QWEN3 = MIXTURE | {"num_experts": 4, "moe_intermediate_size": 64}
GPT2 = {"n_embd": 64, "n_inner": 128, "n_head": 4, "n_layer": 2, "tie_word_embeddings": True}
PHI3 = SIZES | HEADS | {"rope_parameters": HALF_A_ROPE}
VARIANTS = [
    Variant("glm", "GlmConfig", "GlmForCausalLM", SIZES | HEADS | {"attention_bias": True}),
    Variant("phi3", "Phi3Config", "Phi3ForCausalLM", {key: PHI3[key] for key in PHI3 if key != "head_dim"}),
    Variant("gpt2", "GPT2Config", "GPT2LMHeadModel", GPT2),
    Variant("qwen3-moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3),
    Variant("mixtral", "MixtralConfig", "MixtralForCausalLM", MIXTURE | {"num_local_experts": 4}),
]
GPT_OSS = Variant("gpt-oss", "GptOssConfig", "GptOssForCausalLM", MIXTURE | {"num_local_experts": 4})
WRITERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gptq": (gptq_tensors, GPTQ),
    "awq": (awq_tensors, AWQ),
    "nf4": (nf4_tensors, NF4),
}


def quantized(
    folder: Path, variant: Variant, write: Callable[..., Any], config: dict[str, Any], dense_part: str = "none"
) -> tuple[Path, Path]:
    """A checkpoint of the family with dequantized weights, and the same one quantized, except for tensors with
    `dense_part` in their names."""
    dense, packed = variant.make(folder / "dense"), variant.make(folder / "packed")
    shapes = {name: tensor.shape for name, tensor in load_file(dense / SINGLE_FILE).items()}

    def chosen(name: str) -> bool:
        routes = name.endswith((".mlp.gate.weight", "block_sparse_moe.gate.weight"))
        of_layer = any(part in name for part in (".layers.", "h.0.", "h.1."))
        return len(shapes[name]) == 2 and of_layer and not routes and dense_part not in name

    return quantized_pair(dense, packed, write, config, chosen, turned=variant.name == "gpt2")


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_quantized_models_agree_with_their_dequantized_weights(tmp_path: Path, variant: Variant, writer: str) -> None:
    dense, packed = quantized(tmp_path, variant, *WRITERS[writer])
    oracle = Oracle(dense)
    most = 1e-4 * max(1.0, float(oracle.logits.abs().max()))
    for logits in (oracle.logits_of(packed), *oracle.logits_on_two_ranks(packed)):
        assert oracle.difference(logits) < most


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("variant", VARIANTS[-2:], ids=lambda variant: variant.name)
def test_bitsandbytes_may_have_left_experts_dense(tmp_path: Path, variant: Variant) -> None:
    """As with transformers 5, which has experts in one tensor in memory; config.json is the same as that of
    transformers 4."""
    oracle = Oracle((paths := quantized(tmp_path, variant, nf4_tensors, NF4, ".experts."))[0])
    assert oracle.difference(oracle.logits_of(paths[1])) < 1e-3


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["split", "expert parallel"])
def test_gpt_oss_agrees_with_its_dense_model(tmp_path: Path, *, expert_parallel: bool) -> None:
    """As published: experts in MXFP4, all else dense."""
    made, published = (GPT_OSS.make(tmp_path / name) for name in ("dense", "packed"))
    as_mxfp4(published, made)
    oracle = Oracle(made)
    most = 1e-4 * max(1.0, float(oracle.logits.abs().max()))
    assert oracle.difference(oracle.logits_of(published)) < most
    options = {"expert_parallel": expert_parallel}
    for logits in oracle.logits_on_two_ranks(published, **options):
        assert oracle.difference(logits) < 2 * most
    spec = load_spec(published)
    names = {"gate_up_proj_blocks": (2, 2), "down_proj_scales": (2, 2), "gate_up_proj_bias": (2, 2)}
    for name, parts in (names | {"down_proj_bias": (2, 2) if expert_parallel else (1, 0)}).items():
        shards = [Shard(rank, 2, expert_parallel) for rank in range(2)]
        shares = [share(f"model.layers.0.mlp.experts.{name}", spec, shard) for shard in shards]
        assert shares == [Fraction(1, part) if part else 0 for part in parts], name


def test_experts_of_mxfp4_are_in_one_tensor(tmp_path: Path) -> None:
    path = VARIANTS[-1].make(tmp_path)
    blocks = {"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(1, dtype=torch.uint8)}
    save_file(blocks, path / SINGLE_FILE)
    say_quantized(path, {"quant_method": "mxfp4"})
    experts = load_spec(path).experts
    assert experts is not None
    assert experts.stored == "fused"
