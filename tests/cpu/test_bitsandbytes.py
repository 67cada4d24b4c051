"""Checkpoints of bitsandbytes: written by the library itself, multiplied as the dense weights it makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.paged import Oracle
from tests.quantized_tensors import check_refused, int8_tensors, is_projection, nf4_tensors, quantized_pair
from vllm_lite.checkpoint.quantization.bitsandbytes import read_bitsandbytes
from vllm_lite.checkpoint.quantization.spec import BitsAndBytes4
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.errors import ModelError
from vllm_lite.kernels.grouped import dequantize
from vllm_lite.layers.quantized import bitsandbytes, bitsandbytes8
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
FP4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
INT8 = {"load_in_8bit": True}
SKIPPED = "model.layers.1.self_attn"


def checkpoints(folder: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """A checkpoint with dequantized weights, and the same one quantized, except for a part of a layer."""
    dense, packed = make_checkpoint(folder / "dense"), make_checkpoint(folder / "packed")
    write = int8_tensors if "load_in_8bit" in config else nf4_tensors
    config = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head", SKIPPED], **config}
    return quantized_pair(
        dense, packed, write, config, lambda name: is_projection(name) and not name.startswith(SKIPPED)
    )


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("config", [NF4, FP4, INT8], ids=["nf4 nested", "fp4", "int8"])
def test_quantized_models_agree_with_their_dequantized_weights(tmp_path: Path, config: dict[str, Any]) -> None:
    """Blocks of 64 continue from row to row if rows have 96 inputs, of which each of two ranks has 48."""
    dense, packed = checkpoints(tmp_path, config)
    oracle = Oracle(dense)
    for logits in (oracle.logits_of(packed), *oracle.logits_on_two_ranks(packed)):
        assert oracle.difference(logits) < 3e-4


def shape_of(rows: Split, inputs: Split) -> LinearShape:
    return LinearShape(inputs, (rows,), torch.float32, torch.device("cpu"))


def part(weight: torch.Tensor, config: dict[str, Any], rows: Split, inputs: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of a matrix as it is read, and as bitsandbytes has it."""
    tensors, dense = nf4_tensors("w", weight, config)
    stored = bitsandbytes.stored(read_bitsandbytes(config), ["w"], shape_of(rows, inputs))  # type: ignore[arg-type]
    read = [stack.slots[0].cut(tensors[stack.slots[0].name]) for stack in stored.stacks]
    assert all(stack.slots[0].fits(tuple(tensors[stack.slots[0].name].shape)) for stack in stored.stacks)
    own = list(rows.order or range(rows.start, rows.end))
    return stored.dense(read), dense[own, inputs.start : inputs.end]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("shape", "rows", "inputs"),
    [
        ((20, 128), Split.whole(20), Split.whole(128)),
        ((20, 128), Split(20, 5, 10), Split.whole(128)),
        ((20, 128), Split(20, 0, 3, (7, 2, 19)), Split.whole(128)),
        ((20, 128), Split.whole(20), Split(128, 32, 64)),
        ((6, 72), Split(6, 3, 2), Split(72, 24, 12)),
        ((3, 11), Split(3, 1, 1), Split.whole(11)),
    ],
)
def test_each_rank_reads_its_part_bit_for_bit(
    table: str, nested: bool, shape: tuple[int, int], rows: Split, inputs: Split
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": table, "bnb_4bit_use_double_quant": nested}
    ours, theirs = part(weight, config, rows, inputs)
    if table == "nf4":
        assert torch.equal(ours, theirs)
    else:  # of which their table has 7 digits
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def text(content: str) -> torch.Tensor:
    padded = content.encode().ljust(bitsandbytes.MAX_STATE_BYTES, b"\0")
    return torch.tensor(list(padded), dtype=torch.uint8)


def test_worked_example() -> None:
    """Two codes in a byte, the first in its high half."""
    weight = bitsandbytes.stored(BitsAndBytes4(table="nf4"), ["w"], shape_of(Split.whole(1), Split.whole(2)))
    state = text('{"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [1, 2]}')
    byte = torch.tensor([[0x7F]], dtype=torch.uint8)
    made = weight.take(byte, torch.tensor([0.05]), bitsandbytes.TABLES["nf4"], state)  # type: ignore[attr-defined]
    assert dequantize(made).tolist() == torch.tensor([[0.0, 0.05]]).tolist()


STATE = {"quant_type": "nf4", "blocksize": 64, "shape": [1, 2]}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("{", "w.weight.quant_state: not the JSON"),
        ("\xff", "w.weight.quant_state: not the JSON"),
        ("[" * 900, "w.weight.quant_state: not the JSON"),
        (json.dumps(STATE | {"blocksize": 128}), "nf4 in blocks of 128 of"),
        (json.dumps(STATE | {"shape": [2, 1]}), r"64 of \[2, 1\] is not supported here; supported: nf4"),
        (json.dumps(STATE | {"quant_type": "fp4"}), "fp4 in blocks of 64"),
        (json.dumps(STATE | {"nested_offset": 0.5, "nested_blocksize": 256}), "nested_blocksize 256 with nested_off"),
    ],
)
def test_a_quantization_state_that_differs_is_refused(state: str, problem: str) -> None:
    weight = bitsandbytes.stored(BitsAndBytes4(table="nf4"), ["w"], shape_of(Split.whole(1), Split.whole(2)))
    byte = torch.tensor([[0x7F]], dtype=torch.uint8)
    with pytest.raises(ModelError, match=problem):
        weight.dense([byte, torch.tensor([0.05]), bitsandbytes.TABLES["nf4"], text(state)])


def test_another_table_is_refused() -> None:
    weight = bitsandbytes.stored(BitsAndBytes4(table="nf4"), ["w"], shape_of(Split.whole(1), Split.whole(2)))
    byte = torch.tensor([[0x7F]], dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"quant_map: \[0.0.* is not nf4's table"):
        weight.dense([byte, torch.ones(1), bitsandbytes.TABLES["fp4"], text(json.dumps(STATE))])


def test_integers_in_another_order_are_refused() -> None:
    weight = bitsandbytes8.stored(read_bitsandbytes(INT8), ["w"], shape_of(Split.whole(2), Split.whole(2)))  # type: ignore[arg-type]
    tensors = [torch.ones(2, 2, dtype=torch.int8), torch.ones(2), torch.tensor(1, dtype=torch.uint8)]
    with pytest.raises(ModelError, match=r"w\.weight_format: 1 is not supported; supported: 0"):
        weight.dense(tensors)


@pytest.mark.parametrize("form", [bitsandbytes.stored, bitsandbytes8.stored])
def test_experts_that_are_stored_together_are_dense(form: Callable[..., Any]) -> None:
    """bitsandbytes quantizes layers, and these are parameters."""
    shape = shape_of(Split.whole(4), Split.whole(4))._replace(stacked=(0, 2))
    spec = read_bitsandbytes(NF4)
    assert form(spec, ["w"], shape) == DENSE.stored(["w"], shape)


@pytest.mark.parametrize(
    ("skipped", "dense"),
    [
        (None, ["lm_head"]),
        ([], []),
        (["model.layers.1"], ["model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate"]),
        (["layers.1.mlp.gate", "mlp.gate", "lm_head"], ["lm_head", "model.layers.1.mlp.gate"]),
        (["model.language_model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (["mlp.gate"], ["model.layers.1.mlp.gate"]),
    ],
)
def test_skipped_modules_are_dense(skipped: list[str] | None, dense: list[str]) -> None:
    spec = read_bitsandbytes(NF4 | {"llm_int8_skip_modules": skipped})
    names = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate", "model.layers.11.mlp.gate_proj"]
    assert [name for name in names if spec.is_dense(name)] == dense
    assert spec.is_dense("model.embed_tokens")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "load_in_4bit and load_in_8bit are both False; one must be true"),
        (NF4 | {"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type 'nf3' is not supported; supported: nf4, fp4"),
        (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "storage 'bfloat16' is not supported; supported: 'uint8'"),
        (INT8 | {"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight is not supported"),
        (NF4 | {"llm_int8_skip_modules": ["(a*)*"]}, r"'\(a\*\)\*' is not the name of a module"),
        (NF4 | {"load_in_4bit": "yes"}, "quantization_config.load_in_4bit: Expected `bool`"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    check_refused(tmp_path, {"quant_method": "bitsandbytes", **config}, problem)


def test_a_state_that_is_too_long_is_refused(tmp_path: Path) -> None:
    _, packed = checkpoints(tmp_path, NF4)
    tensors = load_file(packed / SINGLE_FILE)
    name = "model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
    tensors[name] = torch.full((bitsandbytes.MAX_STATE_BYTES + 1,), 32, dtype=torch.uint8)
    save_file(tensors, packed / SINGLE_FILE)
    with pytest.raises(ModelError, match=rf"1 of another shape: {name} \(1025,\), not \(1024,\)"):
        Oracle(tmp_path / "dense").stored_as(packed)
