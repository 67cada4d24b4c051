"""Quantized experts as a GPU has them, by its kernels in the emulator: packed and in one tensor where a kernel takes
them."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.test_quantized_families import AWQ, GPT_OSS, GPTQ, VARIANTS, quantized
from tests.mxfp4_files import as_mxfp4
from tests.paged import Oracle, Paged
from tests.quantized_tensors import awq_tensors, gptq_config, gptq_tensors, nf4_tensors
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.memory import tensor_bytes
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.quantization.spec import MxFp4
from vllm_lite.checkpoint.tensors.headers import Tensor, read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cuda.moe.experts import StackedExperts
from vllm_lite.kernels.cuda.moe.packed_experts import GpuPackedExperts
from vllm_lite.layers.moe import experts as experts_module
from vllm_lite.layers.moe.expert_matmul import LoopedExperts
from vllm_lite.layers.moe.experts import SparseMLP
from vllm_lite.layers.weights import gpu_matmul, matmul
from vllm_lite.layers.weights.matmul import DenseMatmul
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")
QWEN3 = next(variant for variant in VARIANTS if variant.name == "qwen3-moe")


def sparse(model: Any) -> list[SparseMLP]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMLP)]


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Median error of the rows, relative to their length: bfloat16 sends some to other experts than float32 does."""
    exact = exact[: len(logits)]
    return float(((logits.float() - exact).norm(dim=1) / exact.norm(dim=1)).median())


def made(model: Any) -> list[Any]:
    return [mlp.experts.matmul for mlp in sparse(model)]


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Path]:
    """gpt-oss as it is published, with experts in MXFP4, and the same model with dequantized experts."""
    dense, packed = (GPT_OSS.make(tmp_path / name) for name in ("dense", "packed"))
    as_mxfp4(packed, dense)
    return packed, dense


def test_gpt_oss_keeps_its_bytes_and_answers_as_transformers(published: tuple[Path, Path]) -> None:
    """Weights have 4.5 bits, as in the plan; steps have few rows or many."""
    packed, dense = published
    oracle = Oracle(dense)
    oracle.dtype = "bfloat16"
    model = oracle.stored_as(packed)
    experts, spec = made(model), oracle.spec.experts
    assert spec is not None
    assert all(isinstance(each, GpuPackedExperts) for each in experts)
    count = 4 * 3 * spec.intermediate_size * oracle.spec.hidden_size
    assert [each.num_bytes for each in experts] == [count * 4.5 / 8] * len(experts)
    own = load_spec(packed)
    headers = {name: each for name, each in read_headers(packed).items() if name.endswith(("_blocks", "_scales"))}
    assert sum(each.num_bytes for each in experts) == sum(
        weights_bytes(Checkpoint(own, {name: each}), 2, device="cuda") for name, each in headers.items()
    )
    rounded = Paged(oracle, model=oracle.load()).run(oracle.tokens, 64)
    for rows in (3, 64, 150):
        logits = Paged(oracle, model=model).run(oracle.tokens, rows)
        assert error(logits, rounded.float()) < 0.02, rows
        assert error(logits, oracle.logits) < 1.1 * error(rounded, oracle.logits) < 0.06, rows


def test_a_layer_has_its_codes_once(published: tuple[Path, Path]) -> None:
    """The codes stay in one place from when they are loaded; no Linear keeps a weight beside them."""
    model: Any = build(load_spec(published[0]), "bfloat16", "cpu", Sizes(64, 64))
    load_weights(model, published[0])
    for mlp in sparse(model):
        assert not any(hasattr(linear, "matmul") for linear in (*mlp.experts.gate_up, *mlp.experts.down))
        memories: Any = mlp.experts.memories
        codes, made_of = [memory._codes for memory in memories], mlp.experts.matmul
        assert isinstance(made_of, GpuPackedExperts)
        stacks = made_of._stacks
        assert [each.codes.data_ptr() for each in stacks[:2]] == [each.data_ptr() for each in codes if each is not None]
        assert [memory._codes for memory in memories] == [None, None]


@pytest.mark.parametrize(
    ("writer", "config", "stays"),
    [
        (gptq_tensors, GPTQ, True),
        (awq_tensors, AWQ, True),
        (nf4_tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, False),
        (gptq_tensors, gptq_config(group_size=32, desc_act=True), False),
    ],
    ids=["gptq", "awq", "nf4", "gptq, sorted columns"],
)
def test_experts_of_separate_tensors(writer: Any, config: dict[str, Any], stays: bool, tmp_path: Path) -> None:
    dense, packed = quantized(tmp_path, QWEN3, writer, config)
    oracle = Oracle(dense)
    oracle.dtype = "bfloat16"
    model = oracle.stored_as(packed)
    logits = Paged(oracle, model=model).run(oracle.tokens[:40], 7)
    assert all(isinstance(each, GpuPackedExperts) == stays for each in made(model))
    assert error(logits, oracle.logits) < 0.02


def test_all_or_none_of_a_layers_experts_stay_packed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one expert has another shape or form, or is dense, the others of the layer become dense, too, with the same
    values."""
    matmul.say_dense.cache_clear()
    dense, packed = quantized(tmp_path, QWEN3, gptq_tensors, GPTQ)
    oracle = Oracle(dense)
    oracle.dtype = "bfloat16"
    whole, mixed = oracle.stored_as(packed), oracle.stored_as(packed)
    launcher = gpu_matmul.launcher_for(torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(experts_module, "default_launcher", lambda: launcher)
    own, other = sparse(mixed)[0].experts, sparse(oracle.load())[0].experts
    memories: Any = own.memories
    exact: Any = other.down[2].matmul
    left, weight = memories[1]._parts.pop(2), exact.weight
    own.down[2].matmul = DenseMatmul(weight, left.bias)
    with caplog.at_level(logging.INFO):
        mixed_logits = Paged(oracle, model=mixed).run(oracle.tokens[:20], 20).float()
    logits = Paged(oracle, model=whole).run(oracle.tokens[:20], 20).float()
    assert not isinstance(own.matmul, GpuPackedExperts)
    assert isinstance(made(mixed)[1], GpuPackedExperts)
    assert any("some packed experts of a layer become bfloat16" in message for message in caplog.messages)
    assert error(mixed_logits, logits) < 0.02
    for linears, others in ((own.gate_up, other.gate_up), (own.down, other.down)):
        for ours, theirs in zip(linears, others, strict=True):
            assert isinstance(ours.matmul, DenseMatmul)
            assert isinstance(theirs.matmul, DenseMatmul)
            torch.testing.assert_close(ours.matmul.weight, theirs.matmul.weight, rtol=8e-3, atol=0)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.04), ("int4_g32", 0.15), ("fp8", 0.02)])
def test_dense_experts_that_are_quantized_on_load_are_packed_together(
    quantization: Quantization, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kernel they are a loop, which waits for the device at each expert. For int8 and int4_g32 the loop has
    the scales and minima of a CPU, which differ from a GPU's."""
    oracle = Oracle(QWEN3.make(tmp_path / "dense"))
    oracle.dtype = "bfloat16"
    model = oracle.load(quantization=quantization)
    logits = Paged(oracle, model=model).run(oracle.tokens[:40], 40)
    monkeypatch.setattr(gpu_matmul, "launcher_for", lambda *_: None)
    looped = oracle.load(quantization=quantization)
    assert all(isinstance(each, GpuPackedExperts) for each in made(model))
    assert all(isinstance(each, LoopedExperts) for each in made(looped))
    if cpu.isa() == "amx":  # with which torch's own products of the loop round elsewhere: 0.0217 of fp8
        most = max(most, 0.03)
    assert error(logits, Paged(oracle, model=looped).run(oracle.tokens[:40], 40).float()) < most


def test_rows_of_32_bits_have_dense_experts(published: tuple[Path, Path]) -> None:
    oracle = Oracle(published[1])
    model = oracle.stored_as(published[0])
    assert not any(isinstance(each, GpuPackedExperts | StackedExperts) for each in made(model))
    assert oracle.difference(Paged(oracle, model=model).run(oracle.tokens[:20], 20)) < 1e-3


def test_a_plan_of_gpt_oss_120b_fits_one_large_gpu() -> None:
    """The published codes fit, by the sizes of its config.json; as bfloat16 they would take 2.9 times as much."""
    hidden = inner = 2880
    tensors = {}
    for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        tensors[f"{name}_blocks"] = Tensor("U8", (128, outputs, inputs // 32, 16))
        tensors[f"{name}_scales"] = Tensor("U8", (128, outputs, inputs // 32))
    whole = sum(
        36 * tensor_bytes(f"model.layers.0.mlp.experts.{name}", each, MxFp4(), 2, "cuda")
        for name, each in tensors.items()
    )
    wide = 36 * 128 * 3 * hidden * inner * 2
    assert whole == wide * 4.5 / 16
    assert whole < 65e9
    assert wide > 229e9
