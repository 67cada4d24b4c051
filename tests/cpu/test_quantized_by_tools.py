"""Weights that tools wrote, and the same weights dequantized by these tools: GPTQModel 7.7, AutoRound 0.16 and AutoAWQ
0.2.9.

`fixtures/quantized/written_by_tools.safetensors` has for each case the tensors of a few outputs of one layer, which a
tool quantized, and `expected`, float32 [outputs, inputs], by that tool's own dequantization.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_lite.checkpoint.quantization.read import read_quantization
from vllm_lite.checkpoint.quantization.spec import Awq, Gptq
from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ModelError
from vllm_lite.layers.quantized.select import form_for
from vllm_lite.layers.quantized.stored import QuantizedWeight
from vllm_lite.layers.weights.weight_form import LinearShape

WRITTEN = Path(__file__).parents[1] / "fixtures" / "quantized" / "written_by_tools.safetensors"
NAME = "model.layers.0.mlp.down_proj"

GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq", "group_size": 32, "sym": True, "lm_head": False}
AUTO_ROUND = {
    "autoround_version": "0.16.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "group_size": 32,
    "quant_method": "auto-round",
    "sym": True,
}
DYNAMIC = {
    r"-:model\.layers\.1\.mlp.*": {},
    r"+:model\.layers\.0\.mlp\.down.*": {"bits": 8, "group_size": 64},
}
CONFIGS = {
    "g4": GPTQ | {"bits": 4, "desc_act": True},
    "g4a": GPTQ | {"bits": 4, "sym": False},
    "g4v2": GPTQ | {"bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
    "b3": GPTQ | {"bits": 3},
    "dyn": GPTQ | {"bits": 4, "dynamic": DYNAMIC},
    "ar": AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"},
    "ar_awq": AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_weights_agree_with_those_of_their_tool(case: str) -> None:
    stored = {
        key.removeprefix(f"{case}."): tensor for key, tensor in load_file(WRITTEN).items() if key.startswith(f"{case}.")
    }
    expected = stored.pop("expected")
    rows, inputs = expected.shape
    shape = LinearShape(Split.whole(inputs), (Split.whole(rows),), torch.float32, torch.device("cpu"))
    weight = form_for(read_quantization(CONFIGS[case]), None).stored([NAME], shape)
    assert isinstance(weight, QuantizedWeight)
    tensors = []
    for stack in weight.stacks:
        tensor = stored.pop(stack.slots[0].name.removeprefix(f"{NAME}."))
        assert stack.slots[0].fits(tuple(tensor.shape))
        tensors.append(tensor.to(stack.dtype))
    assert not stored
    assert torch.equal(weight.dense(tensors), expected)


def auto_round(**others: Any) -> dict[str, Any]:
    return AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"} | others


def test_auto_round_may_have_layers_that_differ() -> None:
    """A name counts before an expression; 16 bits are none."""
    spec = read_quantization(
        auto_round(
            extra_config={
                r".*k_proj": {"bits": 16, "data_type": "float"},
                "model.layers.0.self_attn.k_proj": {"bits": 8, "group_size": -1},
                "model.language_model.layers.1.mlp": {"bits": 16},
            }
        )
    )
    assert isinstance(spec, Gptq)
    assert spec.of("model.layers.0.self_attn.k_proj").bits == 8
    assert spec.of("model.layers.0.self_attn.k_proj").group_size is None
    assert spec.of("model.layers.0.self_attn.q_proj").bits == 4
    names = ["model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"]
    assert [spec.is_dense(name) for name in [*names, "lm_head", "model.embed_tokens"]] == [
        False,
        True,
        True,
        True,
        True,
    ]
    headed = read_quantization(auto_round(extra_config={"lm_head": {"bits": 8}}))
    assert headed is not None
    assert not headed.is_dense("lm_head")


def test_auto_rounds_packing_format_selects_how_zeros_are_stored() -> None:
    stored = [read_quantization(auto_round(packing_format=name)) for name in ("auto_round", "auto_round:gptq")]
    assert [isinstance(spec, Gptq) and spec.zeros_less_one for spec in stored] == [False, True]
    dense = {"model.layers.1.mlp": {"bits": 16}}
    awq = read_quantization(auto_round(packing_format="auto_round:auto_awq", extra_config=dense))
    assert isinstance(awq, Awq)
    assert awq.is_dense("model.layers.1.mlp.up_proj")
    assert not awq.is_dense("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        (
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format 'auto_round:llm_compressor' is not supported",
        ),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp' with act_bits None is not supported for 'auto-round'"),
        ({"act_bits": 8}, "'int' with act_bits 8 is not supported"),
        ({"bits": 5}, "bits 5 is not supported"),
        ({"extra_config": {"mlp": {"bits": 4, "data_type": "mx_fp"}}}, "extra_config data_type 'mx_fp'"),
        ({"extra_config": {"(a+": {"bits": 8}}}, r"extra_config: '\(a\+' is not a regular expression"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "is not supported for 8 bits"),
        (
            {"packing_format": "auto_round:auto_awq", "extra_config": {"mlp": {"bits": 8}}},
            r"extra_config for \['mlp'\]; supported: 4 bits in one group_size",
        ),
    ],
)
def test_further_settings_of_auto_round_are_refused_by_name(others: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        read_quantization(auto_round(**others))


def test_only_some_layers_of_a_block_may_be_quantized() -> None:
    """optimum's modules_in_block_to_quantize."""
    listed = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    spec = read_quantization(GPTQ | {"bits": 4, "lm_head": True, "modules_in_block_to_quantize": listed})
    assert spec is not None
    names = ["self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.up_proj"]
    assert [spec.is_dense(f"model.layers.1.{name}") for name in names] == [False, True, False, True]
    assert not spec.is_dense("lm_head")


def test_a_format_may_be_called_by_its_newer_key() -> None:
    older = read_quantization(GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"})
    assert read_quantization(GPTQ | {"bits": 4, "checkpoint_format": None, "format": "gptq_v2"}) == older


def test_the_first_expression_that_fits_counts() -> None:
    spec = read_quantization(GPTQ | {"bits": 4, "dynamic": {".*down": {"bits": 8}, "-:.*mlp": {}}})
    assert isinstance(spec, Gptq)
    assert not spec.is_dense("model.layers.0.mlp.down_proj")
    assert spec.of("model.layers.0.mlp.down_proj").bits == 8
    assert spec.is_dense("model.layers.0.mlp.up_proj")


def test_one_product_is_quantized_in_one_way() -> None:
    spec = read_quantization(GPTQ | {"bits": 4, "dynamic": {".*up_proj": {"bits": 8}}})
    names = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    shape = LinearShape(Split.whole(32), (Split.whole(32),) * 2, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match="up_proj: they are quantized in different ways; they are one product here"):
        form_for(spec, None).stored(names, shape)


def test_a_skipped_name_ends_with_a_whole_word() -> None:
    """Mixtral's checkpoints of AWQ skip "gate", and have quantized w1, which is gate_proj here."""
    spec = read_quantization(CONFIGS["awq"] | {"modules_to_not_convert": ["gate", "visual"]})
    assert spec is not None
    names = ["mlp.gate", "mlp.experts.0.gate_proj", "mlp.shared_experts.gate_proj"]
    assert [spec.is_dense(f"model.layers.0.{name}") for name in names] == [True, False, False]
    with pytest.raises(ModelError, match=r"modules_to_not_convert: 'a\*' is not the name of a module"):
        read_quantization(CONFIGS["awq"] | {"modules_to_not_convert": ["a*"]})
