"""A head that config.json calls tied, and that the files hold beside the embedding, with other values or the same."""

import json
import logging
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu.test_families import MAX_DIFFERENCE, difference
from tests.driver import Driver
from tests.families.all import VARIANTS
from tests.families.through_transformers import VARIANTS as THROUGH_TRANSFORMERS
from tests.families.variant import Variant
from tests.paged import Oracle, Paged
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors import tied_head
from vllm_lite.checkpoint.tensors.headers import INDEX_FILE, SINGLE_FILE, read_headers
from vllm_lite.checkpoint.tensors.tensor_names import EMBEDDING, HEAD, canonical
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.models.registry import Sizes, build

BY_NAME: dict[str, Variant] = {variant.name: variant for variant in (*VARIANTS, *THROUGH_TRANSFORMERS)}


def with_head(path: Path, change: float, *, name: str = HEAD, shards: bool = False) -> Path:
    """Put a head into the files: the embedding, with `change` added to its last number."""
    tensors = load_file(path / SINGLE_FILE)
    head = next(tensor for key, tensor in tensors.items() if canonical(key) == EMBEDDING).clone()
    head[-1, -1] += change
    if not shards:
        save_file(tensors | {name: head}, path / SINGLE_FILE, metadata={"format": "pt"})
        return path
    (path / SINGLE_FILE).unlink()
    files = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": {name: head}}
    for file, held in files.items():
        save_file(held, path / file, metadata={"format": "pt"})
    weight_map = {key: file for file, held in files.items() for key in held}
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


NAMED = [
    ("qwen2-odd-tied", "auto", HEAD),
    ("qwen2_5-vl-tied", "auto", HEAD),
    ("gemma3-nested", "auto", "language_model.lm_head.weight"),
    ("gpt2", "auto", HEAD),
    ("neox-tied", "auto", "embed_out.weight"),
    ("nemotron", "transformers", HEAD),
]


@pytest.mark.parametrize(("variant", "model_impl", "name"), NAMED)
def test_another_head_is_used_as_transformers_uses_it(variant: str, model_impl: str, name: str, tmp_path: Path) -> None:
    path = with_head(BY_NAME[variant].make(tmp_path / variant), 5.0, name=name)
    oracle = Oracle(path, model_impl=model_impl)
    assert not oracle.spec.tie_word_embeddings
    assert difference(oracle, Paged(oracle).run(oracle.tokens, 1000)) < MAX_DIFFERENCE
    oracle.spec = msgspec.structs.replace(oracle.spec, tie_word_embeddings=True)
    if model_impl == "auto":
        tied = Paged(oracle, model=oracle.load()).run(oracle.tokens, 1000)
        assert (tied - oracle.logits)[:, -1].abs().max() > 0.5, "a head that is not used is seen"


def test_an_equal_head_is_not_loaded(tmp_path: Path) -> None:
    path = with_head(BY_NAME["qwen2-odd-tied"].make(tmp_path / "equal"), 0.0)
    oracle = Oracle(path)
    assert oracle.spec.tie_word_embeddings
    assert HEAD not in {slot.name for group in oracle.model.weight_groups() for slot in group.slots}
    assert difference(oracle, Paged(oracle).run(oracle.tokens, 1000)) < MAX_DIFFERENCE


@pytest.mark.parametrize(("change", "tied"), [(0.0, True), (1e-3, False)])
def test_a_head_in_another_shard_is_compared_as_well(
    monkeypatch: pytest.MonkeyPatch, change: float, tied: bool, tmp_path: Path
) -> None:
    monkeypatch.setattr(tied_head, "CHUNK_BYTES", 1000)
    path = with_head(BY_NAME["qwen2-odd-tied"].make(tmp_path / "shards"), change, shards=True)
    assert load_spec(path).tie_word_embeddings is tied


def test_a_plan_counts_another_head(tmp_path: Path) -> None:
    path = with_head(BY_NAME["qwen2-odd-tied"].make(tmp_path / "plan"), 1.0)
    spec = load_spec(path)
    groups = build(spec, "float32", "cpu", Sizes(8, 8)).weight_groups()
    taken = sum(slot.num_elements for group in groups for slot in group.slots)
    assert weights_bytes(Checkpoint(spec, read_headers(path)), 4) == 4 * taken == 4 * spec.num_parameters()


def test_a_head_of_another_type_is_one_of_its_own(tmp_path: Path) -> None:
    """The result is as correct as with a copy; comparing values of different types would need torch."""
    path = with_head(BY_NAME["qwen2-odd-tied"].make(tmp_path / "type"), 0.0)
    tensors = load_file(path / SINGLE_FILE)
    save_file(tensors | {HEAD: tensors[HEAD].to(torch.bfloat16)}, path / SINGLE_FILE)
    assert not load_spec(path).tie_word_embeddings


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_the_worker_logs_a_head_that_differs_from_the_embedding(
    change: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_head(BY_NAME["qwen2-odd-tied"].make(tmp_path / "model"), change)
    with caplog.at_level(logging.INFO):
        Driver(path, max_model_len=64)
    assert ("the head is that of the files" in caplog.text) is (change > 0)


def test_files_that_are_damaged_are_for_the_loader(tmp_path: Path) -> None:
    path = BY_NAME["qwen2-odd-tied"].make(tmp_path / "damaged")
    (path / SINGLE_FILE).write_bytes(b"\xff" * 100)
    assert load_spec(path).tie_word_embeddings
    (path / SINGLE_FILE).unlink()
    assert load_spec(path).tie_word_embeddings
