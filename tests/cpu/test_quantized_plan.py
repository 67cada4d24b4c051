"""Plan of a quantized checkpoint's weights, against the bytes that the kernels keep."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.families.all import VARIANTS
from tests.gguf_files import write_gguf
from tests.paged import Oracle
from tests.quantized_tensors import FORMATS, LARGE, quantized
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.gguf.kinds import BY_NAME, READ
from vllm_lite.checkpoint.quantization.memory import BLOCK_BITS, GPU_BLOCK_BITS, kept_on_gpu, tensor_bytes
from vllm_lite.checkpoint.quantization.spec import (
    Awq,
    BitsAndBytes4,
    BitsAndBytes8,
    BlockScaled,
    Gptq,
    GptqLayers,
    Mixed,
    MxFp4,
    PackedInts,
    QuantizationSpec,
)
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.headers import Tensor, read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear
from vllm_lite.kernels.cuda.weights.packed_weight import GpuPackedWeight
from vllm_lite.kernels.gguf_blocks import BlockRows, take_apart
from vllm_lite.layers.weights.matmul import DenseMatmul
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights


def planned(path: Path, dtype_bytes: int = 4, **others: Any) -> int:
    return weights_bytes(Checkpoint(load_spec(path), read_headers(path)), dtype_bytes, **others)


@pytest.mark.parametrize("name", FORMATS)
def test_a_plan_has_the_bytes_that_kernels_keep(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    made = PackedWeight.__init__

    def count(self: PackedWeight, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        kept.append(self.num_bytes)

    path = quantized(tmp_path / "m", *FORMATS[name])
    monkeypatch.setattr(PackedWeight, "__init__", count)
    oracle = Oracle(make_checkpoint(tmp_path / "dense", **LARGE))
    kept.clear()
    oracle.stored_as(path)
    spec = load_spec(path)
    table = 4 * spec.vocab_size * spec.hidden_size
    others = sum(4 * each.num_elements for key, each in read_headers(path).items() if "norm" in key)
    assert planned(path) == pytest.approx(sum(kept) + table + others, rel=0.03)  # the head is one of `kept`


@pytest.mark.parametrize("kind", READ)
def test_blocks_of_gguf(kind: str) -> None:
    block = BY_NAME[kind]
    size = 1024 // block.elements * block.num_bytes
    kept = PackedWeight(BlockRows(kind, torch.randint(0, 120, (256, size), dtype=torch.uint8))).num_bytes
    assert BLOCK_BITS[kind] == pytest.approx(8 * kept / (256 * 1024), rel=0.01)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_plan_has_the_bytes_that_kernels_of_a_gpu_keep(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    packed, dense = PackedLinear.__init__, DenseMatmul.__init__

    def of_packed(self: PackedLinear, *args: Any) -> None:
        packed(self, *args)
        kept.append(self.weight.num_bytes)

    def of_dense(self: DenseMatmul, *args: Any) -> None:
        dense(self, *args)
        kept.append(self.weight.nbytes)

    path = quantized(tmp_path / "m", *FORMATS[name])
    monkeypatch.setattr(PackedLinear, "__init__", of_packed)
    monkeypatch.setattr(DenseMatmul, "__init__", of_dense)
    spec = load_spec(path)
    load_weights(build(spec, "bfloat16", "cpu", Sizes(64, 8)), path)
    table = 2 * spec.vocab_size * spec.hidden_size
    others = sum(2 * each.num_elements for key, each in read_headers(path).items() if "norm" in key)
    # Zero points that are all the same are not kept, and others are numbers of 2 bytes.
    assert planned(path, 2, device="cuda") == pytest.approx(sum(kept) + table + others, rel=0.04)


@pytest.mark.parametrize("kind", READ)
def test_blocks_of_gguf_on_a_gpu(kind: str) -> None:
    block = BY_NAME[kind]
    blocks = torch.randint(0, 120, (256, 1024 // block.elements * block.num_bytes), dtype=torch.uint8)
    weight = take_apart(BlockRows(kind, blocks))
    stays = GpuPackedWeight.takes(weight)
    assert stays == (kind in GPU_BLOCK_BITS)
    if stays:
        bits = 8 * GpuPackedWeight.of(weight, torch.device("cpu")).num_bytes / (256 * 1024)
        assert GPU_BLOCK_BITS[kind] == pytest.approx(bits, rel=0.01)


EXPERT, LAYER = "model.layers.0.mlp.experts.3.up_proj.qweight", "model.layers.0.mlp.up_proj.qweight"


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (Gptq(bits=4, group_size=32), True),
        (Gptq(bits=4, group_size=48), False),
        (Gptq(bits=4, group_size=48, layers=(GptqLayers(pattern="up_proj", bits=8, group_size=64),)), True),
        (Awq(group_size=None), True),
        (PackedInts(bits=8, group_size=16), False),
        (BlockScaled(numbers="float8", block=(1, None), scale="s"), True),
        (BlockScaled(numbers="int8", block=(1, 8), scale="s"), False),
        (BitsAndBytes8(), True),
        (BitsAndBytes4(table="nf4"), False),
        (Mixed(parts=(PackedInts(bits=4, group_size=24), PackedInts(bits=4, group_size=32))), False),
        (MxFp4(), True),
    ],
)
def test_weights_that_a_gpu_keeps_packed(spec: QuantizationSpec, kept: bool) -> None:
    tensor = Tensor("I32", (8, 8))
    assert kept_on_gpu(LAYER, tensor, spec, 2) is kept
    assert not kept_on_gpu(LAYER, tensor, spec, 4), "rows of 32 bits have no kernel"
    assert kept_on_gpu(EXPERT, tensor, spec, 2) is kept


def test_experts_with_sorted_columns_become_dense() -> None:
    """Each expert has its own order of columns, for which a step would have to gather the rows once more."""
    for spec in (
        Gptq(bits=4, group_size=32, sorted_columns=True),
        PackedInts(bits=4, group_size=32, sorted_columns=True),
    ):
        assert kept_on_gpu(LAYER, Tensor("I32", (8, 8)), spec, 2)
        assert not kept_on_gpu(EXPERT, Tensor("I32", (8, 8)), spec, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_other_devices_keep_dense_weights(tmp_path: Path, name: str) -> None:
    path = quantized(tmp_path, *FORMATS[name])
    assert planned(path, device="cuda") == 4 * load_spec(path).num_parameters()


def test_blocks_of_gguf_are_dense_on_other_devices(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", make_checkpoint(tmp_path / "dense", **LARGE), lambda _: "Q8_0")
    assert planned(file, device="cuda") == 4 * load_spec(file).num_parameters()


def test_stored_floats_are_of_the_dtype(tmp_path: Path) -> None:
    path = quantized(tmp_path, *FORMATS["gptq"])
    tensors = dict(read_headers(path))
    floats = sum(one.num_elements for name, one in tensors.items() if name.endswith(".weight"))
    spec = load_spec(path)
    assert spec.quantization is not None
    assert tensor_bytes("a.other", Tensor("F64", (3,)), spec.quantization, 4, "cpu") == 24
    one, two = (weights_bytes(Checkpoint(spec, tensors), dtype_bytes) for dtype_bytes in (2, 4))
    assert two - one == 2 * floats


def test_ranks_share_experts_by_their_own_size(tmp_path: Path) -> None:
    """A plan counts each of two ranks' part of experts, whose width differs from that of a dense MLP."""
    variant = next(one for one in VARIANTS if one.name == "qwen2-moe")
    file = write_gguf(tmp_path / "m.gguf", variant.make(tmp_path / "dense"), lambda _: "F16")
    spec = load_spec(file)
    shape = read_headers(file)["model.layers.0.mlp.experts.0.gate_proj.weight"].shape
    for rank in range(2):
        own = weights_bytes(Checkpoint(spec, read_headers(file)), 4, shard=Shard(rank, 2))
        dense = weights_bytes(
            Checkpoint(msgspec.structs.replace(spec, quantization=None), read_headers(file)), 4, shard=Shard(rank, 2)
        )
        assert own == pytest.approx(dense, rel=1e-6), shape


def test_ranks_share_quantized_weights(tmp_path: Path) -> None:
    path = quantized(tmp_path, *FORMATS["gptq"])
    whole, two = planned(path), [planned(path, shard=Shard(rank, 2)) for rank in range(2)]
    assert sum(two) == pytest.approx(whole, rel=0.03)
