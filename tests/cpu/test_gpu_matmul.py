"""Quantized weights on a GPU, with kernels in the emulator: formats that stay packed, and models' outputs."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.kernels import emulator
from tests.paged import Oracle, Paged
from tests.quantized_tensors import Tensors, awq_tensors, gptq_config, gptq_tensors, nf4_tensors, say_quantized
from tests.rows import random
from vllm_lite.checkpoint.gguf.kinds import BY_NAME
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.quantization.spec import Gptq
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.kernels.cuda import cupy_launcher
from vllm_lite.kernels.cuda.weights import many_rows
from vllm_lite.kernels.cuda.weights.many_rows import Float8Products, WidenedProducts
from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear
from vllm_lite.kernels.gguf_blocks import BlockRows, take_apart
from vllm_lite.kernels.grouped import E4M3, INT4, INT8, GroupedChunks, GroupedWeight, dequantize
from vllm_lite.layers.quantized.select import QuantizedForm
from vllm_lite.layers.weights import gpu_matmul, matmul, weight_form
from vllm_lite.layers.weights.gpu_matmul import packed_matmul
from vllm_lite.layers.weights.matmul import DenseMatmul, make_grouped_matmul, make_matmul
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape, RemadeWeight, WidenedForm

pytestmark = pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")
BF16, CPU = torch.bfloat16, torch.device("cpu")
SIZES: Any = {"hidden_size": 64, "intermediate_size": 160}


# ---- which stay packed


def grouped(values: torch.Tensor, group_size: int) -> GroupedWeight:
    codes = torch.randint(len(values), (40, 192), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    scales = torch.full((40, -(-192 // group_size)), 0.25)
    return GroupedWeight(codes, values, scales, group_size)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_weights_with_a_kernel_stay_packed() -> None:
    kept = grouped(INT4, 32), grouped(INT4, 96), grouped(INT8, 192), grouped(INT8, 64)
    for weight in kept:
        bias, x, out = random(40, dtype=BF16), random(3, 192, dtype=BF16), torch.empty(3, 40)
        made = make_grouped_matmul(weight, bias, BF16, CPU)
        assert isinstance(made, PackedLinear)
        made.forward(x, out)
        torch.testing.assert_close(out, x.float() @ dequantize(weight).t() + bias.float(), rtol=1e-5, atol=1e-4)
    assert isinstance(make_grouped_matmul(kept[0], None, torch.float32, CPU), DenseMatmul)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"])
def test_blocks_of_gguf_are_packed_some_rows_after_others(kind: str) -> None:
    block, generator = BY_NAME[kind], torch.Generator().manual_seed(1)
    size = 512 // block.elements * block.num_bytes
    blocks = torch.randint(0, 120, (72, size), generator=generator, dtype=torch.uint8)
    weight = GroupedChunks((72, 512), 32, lambda rows: take_apart(BlockRows(kind, blocks[rows])))
    made = packed_matmul(weight, None, BF16, CPU)
    assert isinstance(made, PackedLinear)
    x, out = random(2, 512, dtype=BF16), torch.empty(2, 72)
    made.forward(x, out)
    exact = dequantize(take_apart(BlockRows(kind, blocks)))
    assert float((out - x.float() @ exact.t()).abs().max()) < 1e-5 * float(exact.abs().max()) * 512


@pytest.mark.usefixtures("as_on_a_gpu")
def test_weights_without_a_kernel_become_dense_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    matmul.say_dense.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            made = make_grouped_matmul(grouped(INT4, 48), None, torch.float16, CPU)
    assert isinstance(made, DenseMatmul)
    assert caplog.messages == ["weights of 4 bits in groups of 48 become float16: cpu has no kernel for them"]


def test_launchers_are_for_rows_of_16_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = emulator.EmulatorLauncher()
    monkeypatch.setattr(cupy_launcher, "default_launcher", lambda: launcher)
    gpu = torch.device("cuda", 0)
    assert gpu_matmul.launcher_for(BF16, gpu) is gpu_matmul.launcher_for(torch.float16, gpu) is launcher
    assert gpu_matmul.launcher_for(torch.float32, gpu) is gpu_matmul.launcher_for(BF16, CPU) is None


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("quantization", "groups", "most"),
    [("int8", 6, 0.008), ("fp8", 2, 0.04), ("int4", 2, 0.11), ("int4_g32", 6, 0.1)],
)
def test_dense_weights_are_packed_some_rows_after_others(
    quantization: Quantization, groups: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the codes that all have together."""
    weight, x = random(75, 192, dtype=BF16), random(4, 192, dtype=BF16)
    made = make_matmul(weight, None, quantization)
    monkeypatch.setattr(gpu_matmul, "ELEMENTS_AT_ONCE", 1)
    again = make_matmul(weight, None, quantization)
    assert isinstance(made, PackedLinear)
    assert isinstance(again, PackedLinear)
    assert torch.equal(made.weight.codes, again.weight.codes)
    assert torch.equal(made.weight.scales, again.weight.scales)
    assert len(made.weight.scales) == groups
    out, expected = torch.empty(4, 75), x.float() @ weight.float().t()
    made.forward(x, out)
    assert 0 < (out - expected).norm() < most * expected.norm()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_weight_without_outputs_gives_none() -> None:
    """As on a rank that has none of the experts."""
    kinds: tuple[Quantization, ...] = ("int8", "int4", "fp8")
    for quantization in kinds:
        made = make_matmul(torch.empty(0, 64, dtype=BF16), None, quantization)
        made.forward(torch.ones(3, 64, dtype=BF16), torch.empty(3, 0, dtype=BF16))


# ---- experts


def test_quantized_experts_become_dense_without_kernels_for_them(caplog: pytest.LogCaptureFixture) -> None:
    weight_form.say_widened.cache_clear()
    spec = Gptq(bits=4, group_size=32, dense=("model.layers.0.mlp.experts.1",))
    form = WidenedForm(QuantizedForm(spec), "experts")
    shape = LinearShape(Split.whole(64), (Split.whole(32),), BF16, CPU)
    tensors, exact = gptq_tensors("e", random(32, 64), gptq_config(group_size=32))
    with caplog.at_level(logging.INFO):
        stored = [form.stored((f"model.layers.0.mlp.experts.{index}.up_proj",), shape) for index in (0, 1, 2)]
    assert [isinstance(each, RemadeWeight) for each in stored] == [True, False, True]
    assert caplog.messages == ["quantized experts become bfloat16: cpu has kernels for dense ones alone"]
    given = [tensors[f"e.{stack.slots[0].name.rpartition('.')[2]}"].to(stack.dtype) for stack in stored[0].stacks]
    torch.testing.assert_close(stored[0].dense(given).float(), exact, rtol=8e-3, atol=0)
    assert not isinstance(WidenedForm(DENSE, "experts").stored(("some",), shape), RemadeWeight)


# ---- models


def write(folder: Path, writer: Callable[..., tuple[Tensors, torch.Tensor]], config: dict[str, Any]) -> Path:
    """Write a quantized checkpoint, and a dense one with the same values."""
    path, exact = (make_checkpoint(folder / name, **SIZES) for name in ("quantized", "exact"))
    stored: Tensors = {}
    dense = load_file(path / SINGLE_FILE)
    for name, weight in list(dense.items()):
        if name.endswith("_proj.weight"):
            tensors, dense[name] = writer(name.removesuffix(".weight"), weight.float(), config)
            stored |= tensors
        else:
            stored[name] = weight
    save_file(stored, path / SINGLE_FILE)
    save_file({name: weight.contiguous() for name, weight in dense.items()}, exact / SINGLE_FILE)
    say_quantized(path, config)
    return path


def linears(model: Any) -> list[Any]:
    found = [layer.mlp.gate_up for layer in model.layers] + [layer.mlp.down for layer in model.layers]
    return [linear.matmul for linear in found]


CHECKPOINTS: dict[str, tuple[Callable[..., Any], dict[str, Any], bool]] = {
    "gptq": (gptq_tensors, gptq_config(group_size=32), True),
    "gptq, 8 bits, zero points": (gptq_tensors, gptq_config(bits=8, sym=False), True),
    "gptq, sorted columns": (gptq_tensors, gptq_config(group_size=32, desc_act=True), True),
    "awq": (awq_tensors, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, True),
    "nf4": (nf4_tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, False),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_quantized_model_agrees_with_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    writer, config, stays = CHECKPOINTS[name]
    path = write(tmp_path, writer, config)
    oracle = Oracle(tmp_path / "exact")
    oracle.dtype = "bfloat16"
    model, exact = oracle.stored_as(path), oracle.logits[:12]
    assert all(isinstance(each, PackedLinear) == stays for each in linears(model))
    ours, dense = (Paged(oracle, model=each).run(oracle.tokens[:12], 9).float() for each in (model, oracle.load()))
    assert (ours - exact).norm() < 1.2 * (dense - exact).norm() < 0.06 * exact.norm()


def float8_tensors(name: str, weight: torch.Tensor, _: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """With one scale a matrix."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale.view(1)}, codes.float() * scale


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}
TENSORS = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}


def scheme(**rows: Any) -> dict[str, Any]:
    return TENSORS | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, **rows}}}


@pytest.mark.parametrize(
    ("config", "has_product", "kind"),
    [
        ({"quant_method": "fp8"}, True, Float8Products),
        ({"quant_method": "fp8"}, False, WidenedProducts),
        (scheme(input_activations=WEIGHTS | {"dynamic": True}), True, Float8Products),
        (scheme(), True, WidenedProducts),
    ],
    ids=["fp8", "no product", "fp8 rows", "weights only"],
)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_rows_become_float8_if_the_checkpoint_asks_for_it_and_the_device_has_it(
    config: dict[str, Any], has_product: bool, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 150 tokens at once, which is many rows."""
    monkeypatch.setattr(many_rows, "multiplies_float8", lambda _: has_product)
    path = write(tmp_path, float8_tensors, config)
    oracle = Oracle(tmp_path / "exact")
    oracle.dtype = "bfloat16"
    model = oracle.stored_as(path)
    assert {type(each.many_rows) for each in linears(model)} == {kind}
    ours, dense = (Paged(oracle, model=each).run(oracle.tokens, 150).float() for each in (model, oracle.load()))
    error = (ours - oracle.logits).norm() / oracle.logits.norm()
    assert (0.1 < error < 0.3) if kind is Float8Products else torch.equal(ours, dense)


def test_a_device_multiplies_float8_from_8_9_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, has in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert many_rows.multiplies_float8(torch.device("cuda", 0)) is has
        assert not many_rows.multiplies_float8(CPU)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_weights_of_float8_with_several_scales_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rows, "multiplies_float8", lambda _: True)
    for weight, kind in ((grouped(E4M3, 192), Float8Products), (grouped(E4M3, 64), WidenedProducts)):
        made = make_grouped_matmul(weight, None, BF16, CPU, float8_rows=True)
        assert isinstance(made, PackedLinear)
        assert type(made.many_rows) is kind
    for other in (grouped(INT8, 192), grouped(E4M3, 192)._replace(minima=torch.ones(40, 1))):
        made = make_grouped_matmul(other, None, BF16, CPU, float8_rows=True)
        assert isinstance(made, PackedLinear)
        assert type(made.many_rows) is WidenedProducts
