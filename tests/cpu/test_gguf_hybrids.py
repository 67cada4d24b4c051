"""GGUF files of hybrid models: the changes that converters make to tensors besides their names, also to tensors in
blocks."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.families.hybrid import EXPERTS, next_, qwen
from tests.gguf_files import KindOf, write_gguf
from tests.paged import Oracle, Paged
from tests.thread_group import on_ranks
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.gguf.changes import Flat, HeadOrder, LogOfMinus, OneMore, changed
from vllm_lite.checkpoint.gguf.checkpoint import GgufCheckpoint
from vllm_lite.checkpoint.quantization.spec import Gguf
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.kernels.gguf_blocks import BlockRows, take_apart
from vllm_lite.kernels.grouped import dequantize
from vllm_lite.models.weight_source import restored

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 128,
    "initializer_range": 0.05,
}
"""A block of 256 elements has parts of two value heads."""
KINDS = {
    "attn_qkv": "Q4_K",
    "attn_gate": "Q6_K",
    "ssm_alpha": "Q8_0",
    "ssm_beta": "Q4_0",
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",
    "ffn_gate": "Q4_0",
    "ffn_down": "Q8_0",
    "token_embd": "Q8_0",
}


def checkpoint(path: Path, **settings: Any) -> Path:
    return qwen("wide", "Qwen3_5", {}, WIDE | settings).make(path)


def kinds_with(output: str) -> Any:
    """The type of a matrix, with `output` for that behind the recurrent heads."""
    return lambda name: (KINDS | {"ssm_out": output}).get(name.split(".")[-2], "F32")


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("output", ["Q4_K", "Q6_K", "Q8_0"])
def test_reordered_heads_of_blocks_agree_with_their_dequantized_floats(tmp_path: Path, output: str) -> None:
    """Rows of blocks are reordered like rows of floats. Inputs of floats are reordered, but those of blocks stay in the
    file's order."""
    oracle = Oracle(checkpoint(tmp_path / "checkpoint"))
    blocks = write_gguf(tmp_path / "blocks.gguf", oracle.path, kinds_with(output))
    floats = write_gguf(tmp_path / "floats.gguf", oracle.path, kinds_with(output), dense=True)
    one, other = (oracle.logits_of(file) for file in (blocks, floats))
    assert (one - other).abs().max() < 3e-4
    quantization = load_spec(blocks).quantization
    assert isinstance(quantization, Gguf)
    assert quantization.inputs.keys() == {f"model.layers.{layer}.linear_attn.out_proj" for layer in (0, 1, 3)}


@pytest.mark.usefixtures("float_products")
def test_ranks_share_rows_of_blocks_but_not_inputs_in_another_order(tmp_path: Path) -> None:
    oracle = Oracle(checkpoint(tmp_path / "checkpoint"))
    expected = Paged(oracle).run(oracle.tokens, 64)
    floats = write_gguf(tmp_path / "floats.gguf", oracle.path)
    for logits in oracle.logits_on_two_ranks(floats):
        assert (logits - expected).abs().max() < 3e-4
    blocks = write_gguf(tmp_path / "blocks.gguf", oracle.path, kinds_with("Q8_0"))
    with pytest.raises(ConfigError, match=r"layers.0.linear_attn.out_proj: the file has its inputs in another order"):
        on_ranks(2, lambda rank: oracle.stored_as(blocks, rank))


def test_a_key_head_of_its_own_for_each_value_head_moves_nothing(tmp_path: Path) -> None:
    oracle = Oracle(checkpoint(tmp_path / "checkpoint", linear_num_key_heads=4))
    file = write_gguf(tmp_path / "blocks.gguf", oracle.path, kinds_with("Q4_K"))
    quantization = load_spec(file).quantization
    assert isinstance(quantization, Gguf)
    assert not quantization.inputs
    changes = {each for tensor in GgufCheckpoint([file]).tensors().values() for each in tensor.changes}
    assert changes == {LogOfMinus(), OneMore(1, 3)}


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("joins", [False, True])
def test_projections_of_qwen3_next_are_two_tensors_or_three(tmp_path: Path, joins: bool) -> None:
    """The first converters left Q, K, V and z as the checkpoint has them, by key head."""
    variant = next_("wide", {}, **WIDE | {"num_experts_per_tok": 2})
    oracle = Oracle(variant.make(tmp_path / "checkpoint"))

    def files(kinds: KindOf) -> list[Path]:
        return [
            write_gguf(tmp_path / f"{dense}.gguf", oracle.path, kinds, dense=dense, joins=joins)
            for dense in (False, True)
        ]

    expected = Paged(oracle).run(oracle.tokens, 64)
    assert oracle.difference(expected) < 1e-3
    floats = write_gguf(tmp_path / "floats.gguf", oracle.path, joins=joins)
    for logits in oracle.logits_on_two_ranks(floats):
        assert (logits - expected).abs().max() < 3e-4
    kinds = KINDS | {"ssm_in": "Q4_K", "ssm_ba": "Q8_0", "ssm_out": "Q6_K"}
    blocks = files(lambda name: kinds.get(name.split(".")[-2], "F32"))
    one, other = (oracle.logits_of(file) for file in blocks)
    assert (one - other).abs().max() < 3e-4
    names = {name.rpartition("linear_attn.")[2] for name in GgufCheckpoint([floats]).tensors() if "linear_attn" in name}
    assert {name for name in names if "in_proj" in name} == (
        {"in_proj_qkvz.weight", "in_proj_ba.weight"}
        if joins
        else {"in_proj_qkv.weight", "in_proj_z.weight", "in_proj_ba.weight"}
    )


@pytest.mark.usefixtures("float_products")
def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    """Converters may join them; in an expert's tensor gate precedes up."""
    oracle = Oracle(
        qwen("mixture", "Qwen3_5Moe", {}, EXPERTS | {"moe_intermediate_size": 32}).make(tmp_path / "checkpoint")
    )
    files = []
    for kind in ("F32", "Q8_0"):
        for joins in (False, True):
            kinds: KindOf = {"F32": lambda _: "F32", "Q8_0": lambda name: "Q8_0" if "_exps" in name else "F32"}[kind]
            files.append(write_gguf(tmp_path / f"{kind} {joins}.gguf", oracle.path, kinds, joins=joins))
    logits = [oracle.logits_of(file) for file in files]
    assert oracle.difference(logits[0]) < 3e-4
    assert torch.equal(logits[1], logits[0])
    assert torch.equal(logits[3], logits[2])
    assert not torch.equal(logits[2], logits[0])


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """They count as layers in the file, after the others."""
    oracle = Oracle(checkpoint(tmp_path / "checkpoint"))
    more = {"qwen35.block_count": 6, "qwen35.nextn_predict_layers": 1}
    file = write_gguf(tmp_path / "model.gguf", oracle.path, more=more, rows={"blk.5.nextn.eh_proj.weight": 4})
    assert load_spec(file).num_layers == 5
    assert oracle.difference(oracle.logits_of(file)) < 3e-4


def test_headers_have_the_shapes_of_the_checkpoint(tmp_path: Path) -> None:
    """Plans count by them."""
    oracle = Oracle(checkpoint(tmp_path / "checkpoint"))
    file = write_gguf(tmp_path / "model.gguf", oracle.path)
    own, theirs = read_headers(file), read_headers(oracle.path)
    assert {name: each.shape for name, each in own.items()} == {name: each.shape for name, each in theirs.items()}


def test_heads_of_another_size_are_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    more = {"qwen35.ssm.inner_size": 256}
    with pytest.raises(ModelError, match="has 512 inputs; its heads have 256"):
        load_spec(write_gguf(tmp_path / "blocks.gguf", folder, kinds_with("Q8_0"), more))


def test_changes_restore_the_models_layout() -> None:
    heads = HeadOrder(axis=0, start=2, num_groups=2, per_group=3, size=2)
    stored = torch.tensor([0, 1, *(10 * head + e for head in (0, 3, 1, 4, 2, 5) for e in (0, 1))])
    here = restored(stored, (heads,))
    assert here.tolist() == [0, 1, 0, 1, 10, 11, 20, 21, 30, 31, 40, 41, 50, 51]
    assert torch.equal(here[torch.tensor(heads.inverse())], stored)
    assert torch.allclose(
        restored(-torch.tensor([[0.5], [2.0]]).exp(), (Flat(), LogOfMinus())), torch.tensor([0.5, 2.0])
    )
    assert changed((6, 4), (OneMore(1, 3),)) == (6, 1, 4)
    assert changed((6, 1, 4), (OneMore(1, 3),)) == (6, 1, 4)
    with pytest.raises(ValueError, match=r"is \[13\] and must have 14 elements along axis 0"):
        restored(stored[1:], (heads,))
    for wrong in (0.0, 2.0, torch.nan):
        with pytest.raises(ValueError, match="must have elements below 0 alone"):
            restored(torch.tensor([-1.0, wrong]), (LogOfMinus(),))


def test_columns_of_blocks_have_an_order() -> None:
    """The plain twin of the native library's order of columns."""
    matrix = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    blocks = torch.from_numpy(gguf.quants.quantize(matrix.numpy(), gguf.GGMLQuantizationType.Q8_0))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    plain, ordered = (dequantize(take_apart(BlockRows("Q8_0", blocks, each))) for each in (None, order))
    assert torch.equal(ordered[:, order], plain)
