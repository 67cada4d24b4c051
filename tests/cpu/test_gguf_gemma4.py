"""Gemma 4 from GGUF beyond its logits: tables in blocks, unused K and V, and files whose metadata differ."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.all import VARIANTS
from tests.gguf_files import write_gguf
from tests.paged import Oracle, Paged
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint
from vllm_lite.errors import ModelError

PER_LAYER = next(one for one in VARIANTS if one.name == "gemma4-per-layer")
WIDE = {"hidden_size": 128, "intermediate_size": 128, "hidden_size_per_layer_input": 32, "head_dim": 32}


def wide(path: Path, **text: Any) -> Path:
    """A model with rows of whole blocks, and with vectors for each layer."""
    settings = {**PER_LAYER.settings["text_config"], **WIDE, "global_head_dim": 64, **text}
    return replace(PER_LAYER, settings={**PER_LAYER.settings, "text_config": settings}).make(path)


@pytest.mark.usefixtures("float_products")
def test_quantized_models_agree_with_their_dequantized_weights(tmp_path: Path) -> None:
    """Includes the table of vectors for each layer in blocks, of which each of two ranks has half."""
    oracle = Oracle(wide(tmp_path / "checkpoint"))
    blocks, floats = (
        write_gguf(tmp_path / f"{dense}.gguf", oracle.path, lambda _: "Q8_0", dense=dense) for dense in (False, True)
    )
    expected = oracle.logits_of(floats)
    model: Any = oracle.stored_as(blocks)
    assert (Paged(oracle, model=model).run(oracle.tokens, 64) - expected).abs().max() < 3e-4
    assert not hasattr(model.per_layer.table, "weight"), "there is no dense table"
    for logits in oracle.logits_on_two_ranks(blocks):
        assert (logits - expected).abs().max() < 3e-4


def test_layers_that_share_k_and_v_may_have_their_own_in_the_files(tmp_path: Path) -> None:
    """Published checkpoints have such tensors. They are not read, and not counted by a plan."""
    oracle = Oracle(PER_LAYER.make(tmp_path / "checkpoint"))
    expected, planned = Paged(oracle).run(oracle.tokens, 64), shapes(oracle.path)
    (file,) = oracle.path.glob("*.safetensors")
    tensors = load_file(file)
    for layer in (3, 4):
        before = f"model.language_model.layers.{layer}.self_attn."
        for part in ("k_proj", "v_proj", "k_norm"):
            name = f"{before}{part}.weight"
            assert name not in tensors
            tensors[name] = torch.full((8,) if part == "k_norm" else (32, 96), torch.nan)
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(Paged(oracle, model=oracle.load()).run(oracle.tokens, 64), expected)
    assert shapes(oracle.path) == planned
    stored = write_gguf(tmp_path / "model.gguf", oracle.path)
    assert oracle.difference(oracle.logits_of(stored)) < 4e-4


def test_another_layers_own_k_and_v_are_missed(tmp_path: Path) -> None:
    oracle = Oracle(PER_LAYER.make(tmp_path / "checkpoint"))
    (file,) = oracle.path.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.language_model.layers.1.self_attn.v_proj.weight"]
    tensors["model.language_model.layers.1.self_attn.v_bias.weight"] = torch.zeros(1)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 missing: model.layers.1.self_attn.v_proj.weight. 1 unexpected"):
        oracle.load()


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return dict(Checkpoint(load_spec(folder), read_headers(folder)).shapes)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"gemma4.feed_forward_length": [96, 96, 128, 192, 192]}, r"feed_forward_length differs by layer \(\[96, 128"),
        ({"gemma4.attention.sliding_window_pattern": [True]}, "sliding_window_pattern must be a flag for each layer"),
        ({"gemma4.attention.value_length_swa": 4}, "value_length_swa 4 is not supported; it must be 8"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(tmp_path: Path, more: dict[str, Any], problem: str) -> None:
    file = write_gguf(tmp_path / "model.gguf", PER_LAYER.make(tmp_path / "checkpoint"), more=more)
    with pytest.raises(ModelError, match=problem):
        load_spec(file)


def test_factors_that_are_no_part_of_the_pairs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gguf_parts.gemma4_factors", lambda _: torch.tensor([1.0, 8.0, 1.0]))
    file = write_gguf(tmp_path / "model.gguf", PER_LAYER.make(tmp_path / "checkpoint"))
    with pytest.raises(ModelError, match=r"rope_freqs.weight must be 1 for the pairs that turn and then 1e30"):
        load_spec(file)
