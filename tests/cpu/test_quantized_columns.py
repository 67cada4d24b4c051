"""GPTQ and AWQ checkpoints, written here by their formulas, give the same products as their dequantized weights."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.paged import Oracle
from tests.quantized_tensors import (
    awq_tensors,
    check_refused,
    gptq_config,
    gptq_tensors,
    quantized_pair,
    say_quantized,
    words,
    zeros_less_one,
)
from tests.thread_group import on_ranks
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.spec import Awq, Gptq
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.kernels.grouped import dequantize
from vllm_lite.layers.quantized import awq, gptq
from vllm_lite.layers.weights.weight_form import LinearShape


def checkpoints(folder: Path, write: Callable[..., Any], config: dict[str, Any], inner: int = 128) -> tuple[Path, Path]:
    """A checkpoint with dequantized weights, and the same one quantized."""
    dense, packed = (make_checkpoint(folder / name, intermediate_size=inner) for name in ("dense", "packed"))
    return quantized_pair(dense, packed, write, config)


def configs() -> Iterator[Any]:
    yield pytest.param(gptq_tensors, gptq_config(), id="gptq")
    yield pytest.param(gptq_tensors, gptq_config(sym=False), id="gptq with zeros")
    yield pytest.param(gptq_tensors, gptq_config(sym=False, checkpoint_format="gptq_v2"), id="gptq_v2 with zeros")
    yield pytest.param(gptq_tensors, gptq_config(desc_act=True, sym=False), id="gptq sorted")
    yield pytest.param(gptq_tensors, gptq_config(bits=8, group_size=-1), id="gptq 8 bits")
    yield pytest.param(gptq_tensors, gptq_config(bits=3, sym=False), id="gptq 3 bits")
    yield pytest.param(gptq_tensors, gptq_config(bits=2, sym=False), id="gptq 2 bits")
    dynamic = {r"-:.*\.1\.(?:mlp|no).*": {}, r"+:.*self_attn": {"bits": 8, "sym": False}}
    yield pytest.param(gptq_tensors, gptq_config(dynamic=dynamic), id="gptq dynamic")
    awq_config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    yield pytest.param(awq_tensors, awq_config, id="awq")


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize(("write", "config"), list(configs()))
def test_quantized_models_agree_with_their_dequantized_weights(
    tmp_path: Path, write: Callable[..., Any], config: dict[str, Any]
) -> None:
    dense, packed = checkpoints(tmp_path, write, config)
    oracle = Oracle(dense)
    assert oracle.difference(oracle.logits_of(packed)) < 3e-4
    if config.get("group_size") == -1:
        return
    for logits in oracle.logits_on_two_ranks(packed):
        assert oracle.difference(logits) < 3e-4


def shape_of(outputs: int, inputs: int) -> LinearShape:
    return LinearShape(Split.whole(inputs), (Split.whole(outputs),), torch.float32, torch.device("cpu"))


def test_worked_examples() -> None:
    """A word of each format, as their documents have it."""
    own = torch.ones(1, 8)
    word = torch.tensor([0x8C3F9870 - (1 << 32)], dtype=torch.int64).to(torch.int32)
    weight = gptq.stored(Gptq(bits=4, group_size=8), ["w"], shape_of(8, 8))
    zeros = torch.full((1, 1), 0x77777777, dtype=torch.int32)
    made = weight.take(word.expand(1, 8).contiguous(), zeros, own, torch.zeros(8, dtype=torch.int32))
    assert dequantize(made)[0].tolist() == [-8, -1, 0, 1, 7, -5, 4, 0]
    weight = awq.stored(Awq(group_size=1), ["w"], shape_of(8, 1))
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    made = weight.take(word, torch.zeros(1, 1, dtype=torch.int32), own)
    assert dequantize(made)[:, 0].tolist() == list(range(8))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_of_0_has_borrowed_from_the_next(bits: int) -> None:
    """The format subtracts one from whole words, so that a zero point of 0 borrows from the next."""
    zeros = torch.tensor([[0, 2, 0, 0, 3, 1, 2, 0]]).repeat(1, 4)
    weight = gptq.stored(Gptq(bits=bits, group_size=32, has_indices=False), ["w"], shape_of(32, 32))
    made = weight.take(words(torch.zeros(32, 32), bits, 0), zeros_less_one(zeros, bits), torch.ones(1, 32))
    assert torch.equal(dequantize(made)[:, 0], -zeros[0].float())


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (gptq_config(bits=5), "bits 5 is not supported for 'gptq'; supported: 2, 3, 4, 8"),
        (gptq_config(checkpoint_format="marlin"), "'marlin' with pack_dtype 'int32' is not supported; supported: gptq"),
        (gptq_config(checkpoint_format=None, format="gptq_p"), "checkpoint_format 'gptq_p' with"),
        (gptq_config(pack_dtype="int16"), "'gptq' with pack_dtype 'int16' is not supported; .* with int32"),
        (gptq_config(dynamic={"-:(a*": {}}), r"dynamic: '\(a\*' is not a regular expression"),
        (gptq_config(dynamic={"mlp": {"bits": 5}}), "bits 5 is not supported"),
        (gptq_config(dynamic={"mlp": {"bits": "4"}}), "quantization_config.dynamic.bits: Expected `int`"),
        (gptq_config(group_size=0), "group_size 0 must be"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "format": "gemv_fast"}, "version 'gemv_fast'"),
        ({"quant_method": "awq", "version": "gemm", "backend": "llm-awq"}, "version 'llm-awq'"),
        ({"quant_method": "awq", "group_size": 0}, "group_size 0 must be"),
        ({"quant_method": "awq", "bits": "4"}, "quantization_config.bits: Expected `int`"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    check_refused(tmp_path, config, problem)


def test_ranks_do_not_share_a_group(tmp_path: Path) -> None:
    dense, packed = checkpoints(tmp_path, gptq_tensors, gptq_config(), inner=96)
    oracle = Oracle(dense)
    with pytest.raises(ConfigError, match="96 inputs in groups of 32 cannot be split so that a rank has 48 from 0 on"):
        on_ranks(2, lambda rank: oracle.stored_as(packed, rank))


def test_ranks_refuse_groups_out_of_range(tmp_path: Path) -> None:
    dense, packed = checkpoints(tmp_path, gptq_tensors, gptq_config(desc_act=True))
    tensors = load_file(packed / SINGLE_FILE)
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name][3] = 4
    save_file(tensors, packed / SINGLE_FILE)
    oracle = Oracle(dense)
    with pytest.raises(ModelError, match=f"{name}: some groups are not among the 4 that there are"):
        on_ranks(2, lambda rank: oracle.stored_as(packed, rank))


def test_groups_that_are_none_are_refused(tmp_path: Path) -> None:
    _, packed = checkpoints(tmp_path, gptq_tensors, gptq_config())
    tensors = load_file(packed / SINGLE_FILE)
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name][3] = 2
    save_file(tensors, packed / SINGLE_FILE)
    with pytest.raises(ModelError, match=f"{name}: its groups are not of 32 inputs each"):
        Oracle(tmp_path / "dense").stored_as(packed)


def test_zero_biases_that_the_model_lacks_are_ignored(tmp_path: Path) -> None:
    """AutoGPTQ wrote biases of zeros for every layer. Others are unexpected."""
    dense, packed = checkpoints(tmp_path, gptq_tensors, gptq_config())
    tensors = load_file(packed / SINGLE_FILE)
    name = "model.layers.0.mlp.down_proj.bias"
    tensors[name] = torch.zeros(64, dtype=torch.float16)
    save_file(tensors, packed / SINGLE_FILE)
    oracle = Oracle(dense)
    oracle.stored_as(packed)
    tensors[name][7] = 0.5
    save_file(tensors, packed / SINGLE_FILE)
    with pytest.raises(ModelError, match=f"1 unexpected: {name}"):
        oracle.stored_as(packed)
    tensors["lm_head.bias"] = tensors.pop(name).zero_()
    save_file(tensors, packed / SINGLE_FILE)
    with pytest.raises(ModelError, match=r"1 unexpected: lm_head\.bias"):
        oracle.stored_as(packed)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": True}, Gptq),
        ("quant_config.json", {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}, Awq),
    ],
)
def test_older_tools_have_a_file_beside_config_json(
    tmp_path: Path, name: str, content: dict[str, Any], expected: type[Gptq | Awq]
) -> None:
    path = make_checkpoint(tmp_path)
    (path / name).write_text(json.dumps(content))
    found = load_spec(path).quantization
    assert isinstance(found, expected)
    assert found.group_size == 64
    say_quantized(path, gptq_config(group_size=32))
    found = load_spec(path).quantization
    assert isinstance(found, Gptq)
    assert found.group_size == 32
    (path / name).write_text("[]")
    with pytest.raises(ModelError, match=f"{name}: it holds list; it must be an object"):
        load_spec(path)
