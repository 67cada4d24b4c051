"""Seams for new families and checkpoints: heads that differ by layer, packed weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.paged import Oracle, Paged
from tests.thread_group import ThreadGroup, on_ranks
from vllm_lite.attention.select import select_backend
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.layer_specs.block_sparse import BlockSparse
from vllm_lite.checkpoint.model_spec import AttentionSpec, LayerSpec, make_kv_groups
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.matmul import DenseMatmul, Matmul
from vllm_lite.layers.weights.weight_form import LinearShape, StoredWeight
from vllm_lite.layers.weights.weight_slot import WeightSlot, WeightStack
from vllm_lite.models.llama import Llama
from vllm_lite.models.registry import Model, Sizes, build
from vllm_lite.models.weights import load_weights
from vllm_lite.parallel.communicator import Communicator, SingleRank

# ---- layers with different heads


class Mixed(Oracle):
    """A random model: two layers have few wide heads; two have many narrow ones, with a window and sinks, and one of
    these without rotation."""

    def __init__(self, path: Path) -> None:
        spec = load_spec(path)
        wide, rope = LayerSpec(AttentionSpec(4, 2, 32, scale=0.2), spec.layers[0].rope), spec.layers[0].rope
        narrow = LayerSpec(AttentionSpec(8, 8, 8, scale=0.3, window=11, soft_cap=20.0, sinks=True), None)
        turned = LayerSpec(narrow.attention, rope)
        layers = (wide, narrow, wide, turned)
        self.spec = msgspec.structs.replace(spec, layers=layers, kv_groups=make_kv_groups(layers))
        self.path = path
        self.model = self.load()
        self.tokens = torch.randint(3, 384, (150,), generator=torch.Generator().manual_seed(7))

    def load(self, communicator: Communicator | None = None, quantization: Quantization | None = None) -> Model:
        model = build(self.spec, "float32", "cpu", Sizes(256, 512), quantization, communicator)
        load_weights(model, self.path, load_format="dummy", seed=3)
        return model


@pytest.fixture
def mixed(tmp_path: Path) -> Mixed:
    return Mixed(make_checkpoint(tmp_path))


def test_groups_may_differ_in_heads(mixed: Mixed) -> None:
    """The logits are the same however the prompt is divided, and with every backend."""
    assert [group.layers for group in mixed.spec.kv_groups] == [(0, 2), (1, 3)]
    assert [group.kv_shape(8) for group in mixed.spec.kv_groups] == [(2, 2, 2, 8, 32), (2, 2, 8, 8, 8)]
    assert mixed.spec.kv_block_bytes(8, 4) == 2 * 2 * 64 * 8 * 4
    paged = Paged(mixed)
    assert [tuple(view.shape[2:]) for view in paged.kv] == [(2, 8, 32), (8, 8, 8), (2, 8, 32), (8, 8, 8)]
    logits = paged.run(mixed.tokens, 1000)
    for chunk in (1, 7):
        assert (Paged(mixed).run(mixed.tokens, chunk) - logits).abs().max() < 1e-4
    reference = Paged(mixed)
    reference.backend = select_backend(reference.shape, "reference")
    assert (reference.run(mixed.tokens, 7) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_heads_of_each_kind(mixed: Mixed, world: int) -> None:
    """Over 4 ranks one kind of layer has its 2 KV heads twice, and the other its 8 KV heads once."""
    logits = Paged(mixed).run(mixed.tokens, 7)
    ranks = on_ranks(world, lambda rank: Paged(mixed, model=mixed.load(rank)).run(mixed.tokens, 7))
    for rank in ranks:
        assert (rank - logits).abs().max() < 1e-4


@pytest.mark.parametrize("change", [{"window": None}, {"scale": 0.31}, {"soft_cap": 0.0}])
def test_each_group_has_its_own_numbers(mixed: Mixed, change: dict[str, Any]) -> None:
    """The control: a backend that took another group's number would show."""
    logits = Paged(mixed).run(mixed.tokens, 1000)
    paged = Paged(mixed)
    full, sliding = paged.shape.groups
    groups = (full, msgspec.structs.replace(sliding, **change))
    paged.backend = select_backend(type(paged.shape)(groups, 8, paged.dtype, torch.device("cpu")))
    assert (paged.run(mixed.tokens, 1000) - logits).abs().max() > 1e-3


def test_sinks_take_part_of_the_weights(mixed: Mixed) -> None:
    """A random model has 1 in each of them. The control: without weight they are the same as none."""
    logits = Paged(mixed).run(mixed.tokens, 1000)
    for layer in mixed.model.layers:  # type: ignore[attr-defined]
        if layer.attention.sinks is not None:
            layer.attention.sinks.fill_(-100.0)
    assert (Paged(mixed).run(mixed.tokens, 1000) - logits).abs().max() > 1e-3


def test_layers_with_more_bytes_make_smaller_groups() -> None:
    """Blocks have equal bytes: two layers with 4 KV heads take as many as four layers with 2."""
    big, small = (LayerSpec(AttentionSpec(8, n, 16, 1.0, window), None) for n, window in ((4, None), (2, 9)))
    groups = make_kv_groups((big, small, small) * 4)
    assert [len(group.layers) for group in groups] == [4, 8]
    assert {group.kv_shape(16)[0] * group.attention.num_kv_heads for group in groups} == {16}


def test_layers_without_kernels_are_refused_by_name(mixed: Mixed) -> None:
    paged = Paged(mixed)
    sparse = msgspec.structs.replace(paged.shape.groups[0], block_sparse=BlockSparse(1, 1, 8))
    groups = (*paged.shape.groups, sparse)
    with pytest.raises(ConfigError, match=r"cpu: it has no block-sparse attention, .*; reference: it has no"):
        select_backend(type(paged.shape)(groups, 8, paged.dtype, torch.device("cpu")))


# ---- a checkpoint with packed matrices


class PackedForm:
    """Four int8 in an int32, along the inputs, and a scale for each output: `<name>.packed` and `<name>.scales`."""

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        packed, scales = [], []
        for name, rows in zip(names, shape.outputs, strict=True):
            at, width = (rows.start, shape.inputs.start // 4), (rows.size, shape.inputs.size // 4)
            packed.append(WeightSlot(f"{name}.packed", (rows.total, shape.inputs.total // 4), at, width))
            scales.append(WeightSlot(f"{name}.scales", (rows.total,), at[:1], width[:1]))
        lent = WeightStack(tuple(packed), torch.int32, shape.device, lent=True)
        return PackedWeights((lent, WeightStack(tuple(scales), shape.dtype, shape.device)))

    def quantizes(self, name: str) -> bool:
        return name.endswith("_proj")


@dataclass(frozen=True)
class PackedWeights:
    stacks: tuple[WeightStack, ...]

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        return DenseMatmul(self.dense(tensors), bias)

    def dense(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        packed, scales = tensors
        return packed.contiguous().view(torch.int8) * scales[:, None]


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with matrices of small integers times a scale, and the same one with packed matrices."""
    plain, packed = make_checkpoint(tmp_path / "plain", attention_bias=True), make_checkpoint(tmp_path / "packed")
    dense, small = load_file(plain / SINGLE_FILE), {}
    for name, tensor in list(dense.items()):
        if not name.endswith("_proj.weight"):
            small[name] = tensor
            continue
        scales = tensor.abs().amax(1) / 127
        integers = (tensor / scales[:, None]).round().to(torch.int8)
        dense[name] = integers * scales[:, None]
        stem = name.removesuffix(".weight")
        small |= {f"{stem}.packed": integers.view(torch.int32), f"{stem}.scales": scales}
    save_file(dense, plain / SINGLE_FILE)
    save_file(small, packed / SINGLE_FILE)
    return plain, packed


def packed_model(path: Path, communicator: Communicator | None = None) -> Llama:
    cpu = torch.device("cpu")
    parts = Parts(load_spec(path), torch.float32, cpu, communicator or SingleRank(cpu), PackedForm())
    return Llama(parts, 256, 512)


def test_a_form_names_its_own_tensors(packed: tuple[Path, Path]) -> None:
    oracle = Oracle(packed[0])
    oracle.model = packed_model(packed[0])
    load_weights(oracle.model, packed[1])
    assert oracle.difference(Paged(oracle).run(oracle.tokens, 64)) < 3e-4


def test_a_packed_tensor_of_another_type_is_refused(packed: tuple[Path, Path]) -> None:
    tensors = load_file(packed[1] / SINGLE_FILE)
    name = "model.layers.0.mlp.up_proj.packed"
    save_file(tensors | {name: tensors[name].float()}, packed[1] / SINGLE_FILE)
    with pytest.raises(ModelError, match=f"1 not stored as one of I32: {name} F32"):
        load_weights(packed_model(packed[0]), packed[1])


def test_ranks_multiply_with_their_parts_of_packed_weights(packed: tuple[Path, Path]) -> None:
    oracle = Oracle(packed[0])

    def work(communicator: Communicator) -> float:
        model = packed_model(packed[0], communicator)
        load_weights(model, packed[1])
        return oracle.difference(Paged(oracle, model=model).run(oracle.tokens, 64))

    assert max(on_ranks(2, work)) < 3e-4


def test_a_rank_takes_its_part_of_packed_weights(packed: tuple[Path, Path]) -> None:
    groups = packed_model(packed[0], ThreadGroup(2).communicators[1]).weight_groups()
    slots = {slot.name.removeprefix("model.layers.1."): slot for group in groups for slot in group.slots}
    assert slots["self_attn.k_proj.packed"][1:4] == ((32, 16), (16, 0), (16, 16))
    assert slots["self_attn.k_proj.scales"][1:4] == ((32,), (16,), (16,))
    assert slots["mlp.down_proj.packed"][1:4] == ((64, 24), (0, 12), (64, 12))
    assert "self_attn.k_proj.weight" not in slots
