"""Matrices of NVFP4 with a number of their own beside the scales in their blocks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.families.all import VARIANTS
from tests.gguf_files import KindOf, write_gguf
from tests.paged import Oracle
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.errors import ModelError

NUMBERS = {"blk.0.ffn_up": [0.5], "blk.0.attn_q": [1.75], "blk.1.attn_v": [0.25], "blk.1.ffn_down": [3.0]}
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 64}


def nvfp4(name: str) -> str:
    return "NVFP4" if name.startswith("blk.") and name.endswith("weight") else "F32"


def both(path: Path, folder: Path, kind_of: KindOf, factors: dict[str, list[float]]) -> list[Path]:
    """Write the file with blocks, and one with the same values as floats."""
    return [
        write_gguf(path / f"{dense}.gguf", folder, kind_of, dense=dense, factors=factors) for dense in (False, True)
    ]


@pytest.mark.usefixtures("float_products")
def test_matrices_are_multiplied_by_their_number(tmp_path: Path) -> None:
    """Some of Q, K and V have one; on two ranks as well."""
    oracle = Oracle(make_checkpoint(tmp_path / "checkpoint", "qwen3", **SIZES))
    blocks, floats = both(tmp_path, oracle.path, nvfp4, NUMBERS)
    expected = oracle.logits_of(floats)
    assert (oracle.logits_of(blocks) - expected).abs().max() < 3e-4
    for logits in oracle.logits_on_two_ranks(blocks):
        assert (logits - expected).abs().max() < 3e-4
    plain = write_gguf(tmp_path / "plain.gguf", oracle.path, nvfp4)
    logits = oracle.logits_of(plain)
    assert (logits - expected).abs().max() > 1e-2, "the numbers count"


@pytest.mark.usefixtures("float_products")
def test_each_expert_has_a_number(tmp_path: Path) -> None:
    variant = next(one for one in VARIANTS if one.name == "qwen3-moe")
    settings = {**variant.settings, "hidden_size": 64, "moe_intermediate_size": 64, "mlp_only_layers": []}
    oracle = Oracle(replace(variant, settings=settings).make(tmp_path / "checkpoint"))
    count = oracle.spec.experts.routing.num_experts if oracle.spec.experts else 0
    factors = {f"blk.0.ffn_{part}_exps": [0.5 + index for index in range(count)] for part in ("gate", "down")}
    blocks, floats = both(tmp_path, oracle.path, lambda name: "NVFP4" if "_exps" in name else "F32", factors)
    expected = oracle.logits_of(floats)
    assert (oracle.logits_of(blocks) - expected).abs().max() < 3e-4


def test_scales_of_inputs_are_not_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "qwen3", **SIZES)
    file = write_gguf(tmp_path / "model.gguf", folder, nvfp4, rows={"blk.0.ffn_up.input_scale": 1})
    oracle = Oracle(folder)
    assert torch.isfinite(oracle.logits_of(file)).all()


@pytest.mark.parametrize(
    ("rows", "kind", "problem"),
    [
        (
            {"blk.0.ffn_up.scale": 1},
            "F32",
            r"'blk.0.ffn_up.scale' must be the scale of a matrix of NVFP4, 'blk.0.ffn_up",
        ),
        ({"blk.0.ffn_none.scale": 1}, "NVFP4", r"must be the scale of a matrix of NVFP4, 'blk.0.ffn_none.weight'"),
        ({"blk.0.ffn_up.scale": 2}, "NVFP4", r"has 2 numbers; it must have one for each matrix"),
    ],
)
def test_a_scale_of_something_else_is_named(tmp_path: Path, rows: dict[str, int], kind: str, problem: str) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "qwen3", **SIZES)
    file = write_gguf(tmp_path / "model.gguf", folder, nvfp4 if kind == "NVFP4" else lambda _: "F32", rows=rows)
    with pytest.raises(ModelError, match=problem):
        load_spec(file)
