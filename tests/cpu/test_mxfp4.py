"""MXFP4 as gpt-oss stores its experts: against transformers' conversion, for each expert and each rank's part of it."""

from typing import Any

import pytest
import torch

from vllm_lite.checkpoint.quantization.read import read_quantization
from vllm_lite.checkpoint.quantization.spec import MxFp4
from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.layers.quantized import mxfp4
from vllm_lite.layers.quantized.select import form_for
from vllm_lite.layers.quantized.stored import QuantizedWeight
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape

EXPERTS, INNER, HIDDEN = 3, 64, 96
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    """All codes, and exponents from the least to the largest that leave products with 6 finite."""
    random = torch.Generator().manual_seed(2)
    found = {}
    for name, rows, inputs in ((GATE_UP, 2 * INNER, HIDDEN), (DOWN, HIDDEN, INNER)):
        shape = EXPERTS, rows, inputs // 32
        found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        found[f"{name}_scales"] = torch.randint(0, 252, shape, dtype=torch.uint8, generator=random)
    found[f"{DOWN}_scales"][0, 0, 0] = 0
    return found


def plain(stored: Tensors, name: str) -> torch.Tensor:
    """[experts, outputs, inputs] by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    dense: torch.Tensor = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return dense.transpose(1, 2)


def weight(names: tuple[str, ...], inputs: Split, rows: tuple[Split, ...], expert: int) -> QuantizedWeight:
    cpu = torch.device("cpu")
    shape = LinearShape(inputs, rows, torch.float32, cpu, stacked=(expert, EXPERTS))
    found = form_for(MxFp4(), None).stored(names, shape)
    assert isinstance(found, QuantizedWeight)
    return found


def read(form: QuantizedWeight, stored: Tensors) -> torch.Tensor:
    taken = []
    for stack in form.stacks:
        assert all(slot.fits(tuple(stored[slot.name].shape)) for slot in stack.slots)
        taken.append(torch.cat([slot.cut(stored[slot.name]) for slot in stack.slots]))
        assert tuple(taken[-1].shape) == stack.shape
    return form.dense(taken)


@pytest.mark.parametrize("world", [1, 2])
def test_gate_and_up_are_taken_apart_for_each_rank(world: int) -> None:
    """gpt-oss has them in turns: row 0 is the gate's first, row 1 up's."""
    stored = tensors()
    whole = plain(stored, GATE_UP)
    for rank in range(world):
        part = Split.even(INNER, Shard(rank, world))
        own = range(part.start, part.end)
        rows = tuple(Split.of(2 * INNER, [2 * row + which for row in own]) for which in (0, 1))
        for expert in range(EXPERTS):
            expected = torch.cat(
                [whole[expert, 0::2][part.start : part.end], whole[expert, 1::2][part.start : part.end]]
            )
            assert torch.equal(read(weight((GATE_UP, GATE_UP), Split.whole(HIDDEN), rows, expert), stored), expected)


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_take_whole_blocks_of_down(world: int) -> None:
    stored = tensors()
    whole = plain(stored, DOWN)
    for rank in range(world):
        inputs = Split.even(INNER, Shard(rank, world))
        form = weight((DOWN,), inputs, (Split.whole(HIDDEN),), 1)
        assert torch.equal(read(form, stored), whole[1, :, inputs.start : inputs.end])
    with pytest.raises(ConfigError, match="64 inputs in groups of 32 cannot be split so that a rank has 16 from 0 on"):
        weight((DOWN,), Split.even(INNER, Shard(0, 4)), (Split.whole(HIDDEN),), 1)


def of_one_block() -> QuantizedWeight:
    return weight(("w.experts.a",), Split.whole(32), (Split.whole(1),), 0)


def test_worked_example() -> None:
    """The low half of a byte is the first value, and the scale 124 means 1/8."""
    blocks = torch.full((1, 1, 16), 0xA3, dtype=torch.uint8)
    dense = of_one_block().dense([blocks, torch.tensor([[124]], dtype=torch.uint8)])
    assert dense[0, :4].tolist() == [0.1875, -0.125, 0.1875, -0.125]


def test_a_scale_that_is_no_number_is_refused() -> None:
    blocks, scales = torch.zeros(1, 1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"w\.experts\.a_scales: some are 255, which is not a number"):
        of_one_block().dense([blocks, scales])


def test_inputs_are_whole_blocks() -> None:
    with pytest.raises(ModelError, match="48 inputs are not whole blocks of 32"):
        weight((DOWN,), Split.whole(48), (Split.whole(1),), 0)


@pytest.mark.usefixtures("float_products")
def test_packed_mxfp4_is_multiplied_without_conversion() -> None:
    stored = tensors()
    stored[f"{DOWN}_scales"] = stored[f"{DOWN}_scales"] % 8 + 120
    form = weight((DOWN,), Split.whole(INNER), (Split.whole(HIDDEN),), 2)
    x = torch.randn(5, INNER, generator=torch.Generator().manual_seed(1))
    out = torch.empty(5, HIDDEN)
    taken = [stack.slots[0].cut(stored[stack.slots[0].name]) for stack in form.stacks]
    form.matmul(taken, None).forward(x, out)
    torch.testing.assert_close(out, x @ plain(stored, DOWN)[2].t(), rtol=1e-5, atol=1e-4)


def config(**others: Any) -> dict[str, Any]:
    return {"quant_method": "mxfp4", **others}


def test_only_experts_that_are_stored_together_are_in_this_form() -> None:
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    spec = read_quantization(config(modules_to_not_convert=dense))
    assert spec == MxFp4()
    names = ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]
    assert spec is not None
    assert all(map(spec.is_dense, names))
    assert not spec.is_dense(GATE_UP)
    shape = LinearShape(Split.whole(32), (Split.whole(4),), torch.float32, torch.device("cpu"))
    name = "model.layers.0.mlp.experts.0.up_proj"
    assert mxfp4.stored(MxFp4(), [name], shape) == DENSE.stored([name], shape)


def test_experts_that_are_dense_are_refused() -> None:
    with pytest.raises(ModelError, match=r"modules_to_not_convert 'model.layers.3.mlp.experts' is not supported"):
        read_quantization(config(modules_to_not_convert=["model.layers.3.mlp.experts"]))
