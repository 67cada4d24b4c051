"""A rank's share of a checkpoint: together all of it, each no more than its part, as a plan says."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import load_and_see, make_checkpoint
from tests.examples import examples
from tests.thread_group import ThreadGroup
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.layer_specs.rope import Rope
from vllm_lite.checkpoint.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec, make_kv_groups
from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.rank_shapes import rank_shape
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.layers.weights.weight_slot import WeightSlot
from vllm_lite.models.registry import Model, Sizes, build


def ranks_of(
    spec: ModelSpec, world: int, quantization: Quantization | None = None, dtype: str = "float32"
) -> list[Model]:
    """The ranks' parts of a model, without weights."""
    communicators = ThreadGroup(world).communicators
    return [build(spec, dtype, "cpu", Sizes(16, 4), quantization, communicator) for communicator in communicators]


def slots_of(model: Model) -> dict[str, WeightSlot]:
    return {slot.name: slot for group in model.weight_groups() for slot in group.slots}


@st.composite
def specs(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    """A model, and a number of ranks that can share it."""
    world = draw(st.integers(1, 6))
    num_kv_heads = draw(st.sampled_from([n for n in range(1, 9) if n % world == 0 or world % n == 0]))
    group = draw(st.integers(max(1, -(-world // num_kv_heads)), 7))
    attention = AttentionSpec(group * num_kv_heads, num_kv_heads, draw(st.sampled_from([2, 4, 6])), scale=1.0)
    layers = (LayerSpec(attention, Rope(1e4)),)
    vocab_size = draw(st.integers(world, 100) | st.integers(64 * world, 1000))
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=draw(st.integers(1, 20)),
        intermediate_size=world * draw(st.integers(1, 5)),
        layers=layers,
        norm=NormSpec(1e-5),
        max_position_embeddings=64,
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from([None, "head"])),
        bos_token_id=None,
        eos_token_ids=(),
        dtype="float32",
        kv_groups=make_kv_groups(layers),
    )
    return spec, world


@settings(max_examples=examples(150))
@given(specs())
def test_the_boxes_of_the_ranks_are_a_partition_of_every_tensor(drawn: tuple[ModelSpec, int]) -> None:
    """Norms are on all ranks, and KV heads on equally many; every other element is on one rank."""
    spec, world = drawn
    ranks = [slots_of(model) for model in ranks_of(spec, world)]
    num_sharing = max(1, world // spec.layers[0].attention.num_kv_heads)
    for name, whole in slots_of(build(spec, "float32", "cpu", Sizes(16, 4))).items():
        held = torch.zeros(whole.shape, dtype=torch.int32)
        assert whole.size == whole.shape
        for rank in ranks:
            assert rank[name].shape == whole.shape
            held[rank[name].box] += 1
        copies = world if "norm" in name else num_sharing if "k_proj" in name or "v_proj" in name else 1
        assert (held == copies).all(), name


@settings(max_examples=examples(150))
@given(specs())
def test_a_plan_has_the_shapes_of_a_rank(drawn: tuple[ModelSpec, int]) -> None:
    spec, world = drawn
    for shard, model in zip(Shard(0, world).all_ranks, ranks_of(spec, world), strict=True):
        for name, slot in slots_of(model).items():
            assert rank_shape(name, slot.shape, spec, shard) == slot.size, name


# ---- files

HEADS = "embed_tokens.weight", "lm_head.weight"
ODD = {"num_attention_heads": 5, "num_key_value_heads": 1, "vocab_size": 389, "hidden_size": 80}
VARIANTS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd-tied": {**ODD, "intermediate_size": 120, "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3"},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    return {name: make_checkpoint(root / name, **options) for name, options in VARIANTS.items()}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_load_their_boxes_of_the_same_model(checkpoints: dict[str, Path], name: str, load_format: str) -> None:
    path = checkpoints[name]
    spec = load_spec(path)
    whole = load_and_see(build(spec, "float32", "cpu", Sizes(16, 4)), path, load_format=load_format, seed=3)
    for model in ranks_of(spec, 2):
        slots = slots_of(model)
        for tensor_name, tensor in load_and_see(model, path, load_format=load_format, seed=3).items():
            assert torch.equal(tensor, whole[tensor_name][slots[tensor_name].box]), tensor_name


@pytest.mark.parametrize("quantization", [None, "int8", "int4_g32"])
@pytest.mark.parametrize(("name", "world"), [(name, 2) for name in VARIANTS] + [("odd-tied", 5), ("qwen3", 4)])
def test_the_first_rank_has_the_planned_bytes_and_no_other_has_more(
    checkpoints: dict[str, Path], name: str, world: int, quantization: Quantization | None
) -> None:
    path = checkpoints[name]
    checkpoint = Checkpoint(load_spec(path), read_headers(path))
    held = [weights_of(model, quantization) for model in ranks_of(checkpoint.spec, world, quantization)]
    assert held[0] == weights_bytes(checkpoint, 4, quantization, Shard(0, world))
    assert max(held) == held[0]


def weights_of(model: Model, quantization: Quantization | None) -> int:
    """Bytes of the tensors that the layers use, and of the groups of quantized ones."""
    mixed = MixedForm.of(model.spec, quantization, "cpu")
    total = 0
    for group in model.weight_groups():
        for stack in group.stacks:
            rows, *columns = stack.shape
            size = rows * math.prod(columns)
            embeds = stack.slots[0].name == "model.embed_tokens.weight"
            if quantization is None or not columns or embeds:
                total += 4 * size
            if quantization is not None and columns and (not embeds or model.spec.tie_word_embeddings):
                in_layers = not stack.slots[0].name.endswith(HEADS)
                forms = {mixed.form(slot.name) if mixed and in_layers else "int8" for slot in stack.slots}
                assert len(forms) == 1, "what is one matrix has one form"
                total += rows * row_bytes(math.prod(columns), forms.pop())
    return total


CELLS = {"int4_g32": (16 + 2, 8), "int5_g32": (20 + 2, 8)}
"""Bytes for 32 inputs, and bytes that 256 inputs share."""


def row_bytes(num_inputs: int, form: str) -> int:
    """Bytes of a row; int8 has groups of 128 on processors with tiles, and counts the larger of both."""
    if form == "int8":
        return max(math.ceil(num_inputs / 32) * (32 + 4), math.ceil(num_inputs / 128) * (128 + 4))
    cell_bytes, shared_bytes = CELLS[form]
    return math.ceil(num_inputs / 32) * cell_bytes + math.ceil(num_inputs / 256) * shared_bytes
