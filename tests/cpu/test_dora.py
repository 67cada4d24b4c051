"""Adapters with DoRA give PEFT's logits, and with quantized weights those of the dequantized weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.cpu.test_lora import MAX_DIFFERENCE, load, reference, run_mixed
from tests.cpu.test_lora_tokens import adapted_logits
from tests.families.all import VARIANTS
from tests.lora_adapters import change_config, make_adapter, merge
from tests.paged import Oracle
from tests.quantized_tensors import LARGE
from tests.thread_group import on_ranks
from vllm_lite.checkpoint.tensors.lora import MAGNITUDE, read_lora
from vllm_lite.errors import ModelError
from vllm_lite.layers.weights.dora import weight_rows

TENSORS = "adapter_model.safetensors"


def make_dora(base: Path, path: Path, targets: str | list[str], *, seed: int, rank: int = 4) -> Path:
    """PEFT begins with the lengths that the rows have."""
    make_adapter(base, path, targets, seed=seed, rank=rank, use_dora=True)
    tensors, draw = load_file(path / TENSORS), torch.Generator().manual_seed(seed)
    changed = {
        name: tensor * (0.5 + torch.rand(tensor.shape, generator=draw)) if MAGNITUDE in name else tensor
        for name, tensor in tensors.items()
    }
    assert any(MAGNITUDE in name for name in changed)
    save_file(changed, path / TENSORS)
    return path


@pytest.mark.parametrize("name", ["qwen2-odd-tied", "phi3-short", "gpt2"])
def test_logits_match_peft(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, one matrix of three projections, transposed matrices, beside an adapter without DoRA."""
    variant = next(each for each in VARIANTS if each.name == name)
    oracle = Oracle(variant.make(tmp_path / "base"), max_model_len=variant.max_model_len)
    paths = [
        make_dora(oracle.path, tmp_path / "one", "all-linear", seed=1),
        make_adapter(oracle.path, tmp_path / "two", "all-linear", seed=2),
    ]
    merged = [merge(oracle.path, path, tmp_path / f"merged-{path.name}") for path in paths]
    expected = [reference(path, oracle.spec.architecture, oracle.tokens[:40]) for path in merged]
    plain = oracle.logits.log_softmax(-1)
    assert (expected[0] - plain[:40]).abs().max() > 0.1
    found = [run_mixed(load(oracle, paths), oracle)]
    monkeypatch.setattr("vllm_lite.layers.weights.lora.copies", lambda *_: False)  # the rows of plain torch
    found.append(run_mixed(load(oracle, paths), oracle))
    for each in found:
        for ours, theirs in zip(each, [*expected, plain], strict=True):
            assert (ours - theirs[: len(ours)]).abs().max() < MAX_DIFFERENCE


@pytest.mark.parametrize("kind", [None, "int8", "int4_g32"])
def test_lengths_match_the_weights_that_are_multiplied(kind: str | None, tmp_path: Path) -> None:
    oracle = Oracle(make_checkpoint(tmp_path / "base", **LARGE))
    path = make_dora(oracle.path, tmp_path / "adapter", ["q_proj", "v_proj"], seed=1)
    model, made = load(oracle, [path], quantization=kind)
    qkv = model.layers[1].attention.qkv
    weight, x = qkv.matmul.matmul, torch.randn(5, 256)
    rows = weight_rows(weight, 0, 512)
    tensors = load_file(path / TENSORS)
    prefix = "base_model.model.model.layers.1.self_attn.{}.lora_{}"
    first = 0
    for name, size in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
        if name != "k_proj":
            down, up = (tensors[f"{prefix.format(name, part)}.weight"] for part in "AB")
            own = rows[first : first + size] + 2 * up @ down
            own *= (tensors[prefix.format(name, MAGNITUDE)] / own.norm(dim=1))[:, None]
            rows[first : first + size] = own
        first += size
    adapted = torch.zeros(5, 512)
    made.rows.begin_step(np.zeros(5, np.int64))
    qkv.forward(x, adapted)
    assert (adapted - x @ rows.t()).abs().max() < (1e-4 if kind is None else 2e-3)
    assert adapted.abs().max() > 1


def test_unsupported_lengths_are_refused(tmp_path: Path) -> None:
    oracle = Oracle(make_checkpoint(tmp_path / "base"))
    path = make_dora(oracle.path, tmp_path / "dora", ["q_proj", "down_proj"], seed=1)
    expected = adapted_logits(oracle.path, path, oracle.tokens[:40])
    ours = run_mixed(load(oracle, [path]), oracle)[0]
    assert (ours - expected[: len(ours)]).abs().max() < MAX_DIFFERENCE
    for _, made in on_ranks(2, lambda rank: load(oracle, [], rank)):
        with pytest.raises(ModelError, match=r"has lengths \(DoRA\) of rows of .*down_proj, which .* on one rank"):
            made.read(read_lora(path), "adapter")
    _, made = load(oracle, [])
    head = make_dora(oracle.path, tmp_path / "head", ["lm_head"], seed=1)
    with pytest.raises(ModelError, match=r"of rows of lm_head, which are served .* of linear layers"):
        made.read(read_lora(head), "adapter")
    with pytest.raises(ModelError, match=r"use_dora is not set, and .*_proj has a lora_magnitude_vector"):
        read_lora(change_config(path, {"use_dora": False}))
    change_config(path, {"use_dora": True})
    tensors = load_file(path / TENSORS)
    (name, *_) = (name for name in tensors if MAGNITUDE in name)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, path / TENSORS)
    with pytest.raises(ModelError, match=r"another base model: it has \[63\] lengths"):
        made.read(read_lora(path), "adapter")
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, path / TENSORS)
    with pytest.raises(ModelError, match=r"use_dora is set, and .*_proj has no lora_magnitude_vector"):
        read_lora(path)
