"""Weights that are packed before there is a model: the same bytes as any other way, or none."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.deadlines import scaled
from tests.families.mixtures import VARIANTS, qwen3
from tests.families.variant import Variant
from tests.thread_group import ThreadGroup
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE, TensorPlace, locate
from vllm_lite.client.engines.launch import resolve
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import ModelError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.dtypes import FLOATS
from vllm_lite.kernels.cpu.pages import Pages
from vllm_lite.kernels.cpu.weights.file_packer import FilePacker, Job, Piece
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear
from vllm_lite.layers.weights.matmul import NativeMatmul
from vllm_lite.models.ahead import pack_ahead
from vllm_lite.models.registry import Model, Sizes, build
from vllm_lite.models.weights import load_weights
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.worker import process

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def config_of(path: Path, **settings: Any) -> ResolvedConfig:
    return resolve(EngineConfig(model=str(path), device="cpu", max_model_len=64, **settings))


def model_of(config: ResolvedConfig, rank: int) -> Model:
    shard = Shard.of(config, rank, config.num_stages)
    group = ThreadGroup(shard.world, expert_parallel=shard.expert_parallel, stage=shard.stage)
    communicator = group.communicators[shard.rank]
    sizes = Sizes(max_model_len=64, max_num_tokens=8)
    return build(load_spec(config.model), config.dtype, "cpu", sizes, config.quantization, communicator)


def packed_weights(root: object) -> Iterator[PackedWeight]:
    """All of a model, in the order in which its parts were made."""
    if isinstance(root, NativeMatmul):
        yield root.packed
    elif isinstance(root, list):
        for part in root:
            yield from packed_weights(part)
    elif type(root).__module__.startswith(("vllm_lite.models", "vllm_lite.layers")) and hasattr(root, "__dict__"):
        for part in vars(root).values():
            yield from packed_weights(part)


def bytes_of(packed: PackedWeight) -> tuple[bytes | None, ...]:
    parts = (*packed._tensors, packed._bias)
    return tuple(None if part is None else part.view(torch.uint8).numpy().tobytes() for part in parts)


def keys_of(model: Model) -> list[Any]:
    """Keys of the weights that this rank packs, in the order of loading."""
    groups = (group for group in model.weight_groups() if any(slot.num_elements for slot in group.slots))
    return [part.packing_key for group in groups for part in group.stacks if part.packed_as is not None]


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"attention_bias": True}, {}),
    ("llama", {"tie_word_embeddings": True, "max_shard_size": "100KB"}, {"dtype": "bfloat16"}),
    ("llama", {"tie_word_embeddings": True}, {"quantization": "int8"}),
    ("mistral", {}, {"dtype": "float16", "tensor_parallel_size": 2}),
    ("qwen3", {}, {"quantization": "int8", "dtype": "bfloat16", "tensor_parallel_size": 4}),
    ("mixture", {}, {}),
    ("mixture", {}, {"quantization": "int8", "tensor_parallel_size": 2}),
    ("mixture", {}, {"dtype": "bfloat16", "tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("mixture", {}, {"quantization": "int4_g32", "tensor_parallel_size": 2}),
    ("qwen3", {}, {"quantization": "int4", "dtype": "bfloat16"}),
    ("qwen3", {}, {"quantization": "fp8", "dtype": "bfloat16", "tensor_parallel_size": 2}),
]


def made(path: Path, family: str, **overrides: Any) -> Path:
    if family != "mixture":
        return make_checkpoint(path, family, dtype="bfloat16", **overrides)
    return qwen3("mixture", {}, mlp_only_layers=[1]).make(path / "mixture", **overrides)


@pytest.mark.parametrize(("family", "overrides", "settings"), CASES)
def test_a_model_takes_all_packed_weights(
    tmp_path: Path, family: str, overrides: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(made(tmp_path, family, **overrides), **settings)
    for rank in range(config.tensor_parallel_size):
        plain, model = model_of(config, rank), model_of(config, rank)
        load_weights(plain, config.model)
        ahead = pack_ahead(config, rank, num_threads=2)
        assert ahead is not None
        assert list(ahead.jobs) == keys_of(model)
        with ahead, monkeypatch.context() as patch:
            patch.setattr("vllm_lite.kernels.cpu.weights.linear._pack", lambda *_, **__: pytest.fail("packed again"))
            if config.quantization and overrides.get("tie_word_embeddings"):
                patch.undo()  # the head is made of the embedding, which is kept
            load_weights(model, config.model, ahead=ahead)
        gc.collect()  # the weights outlive the object that packed them
        packed = [bytes_of(weight) for weight in packed_weights(model)]
        assert packed == [bytes_of(weight) for weight in packed_weights(plain)]
        assert len(packed) >= 2 * 4 + 1


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_packs_its_own_layers_alone(tmp_path: Path, *, tied: bool) -> None:
    path = make_checkpoint(tmp_path, dtype="bfloat16", tie_word_embeddings=tied)
    config = replace(config_of(path, tensor_parallel_size=2), num_stages=2)
    jobs = []
    for rank in range(4):
        ahead = pack_ahead(config, rank, num_threads=0)
        assert ahead is not None
        with ahead:
            jobs.append(list(ahead.jobs))
            assert jobs[-1] == keys_of(model_of(config, rank))
    assert [len(each) for each in jobs] == [4, 4, 5, 5], "the head is in the last stage"


FAMILIES = ("qwen2-moe", "mixtral", "glm4-moe-groups", "ernie-moe")
"""Shared experts with a gate and without, other names of the matrices, a bias for the choice."""


@pytest.mark.parametrize("variant", [one for one in VARIANTS if one.name in FAMILIES], ids=lambda one: one.name)
def test_the_experts_of_a_family_are_all_packed(tmp_path: Path, variant: Variant) -> None:
    path = variant.make(tmp_path / "checkpoint")
    for settings in ({}, {"quantization": "int8", "tensor_parallel_size": 2, "enable_expert_parallel": True}):
        config = config_of(path, **settings)
        ahead = pack_ahead(config, 0, num_threads=0)
        assert ahead is not None
        with ahead:
            assert list(ahead.jobs) == keys_of(model_of(config, 0))


@pytest.mark.parametrize("other", [{"dtype": "float32"}, {"quantization": "int8"}, {"tensor_parallel_size": 2}])
def test_weights_packed_for_another_model_are_not_taken(tmp_path: Path, other: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path, dtype="bfloat16")
    config = config_of(path, dtype="bfloat16")
    plain, model = model_of(config, 0), model_of(config, 0)
    load_weights(plain, path)
    ahead = pack_ahead(config_of(path, **({"dtype": "bfloat16"} | other)), 0, num_threads=1)
    assert ahead is not None
    with ahead:
        load_weights(model, path, ahead=ahead)
        assert ahead._loading is None, "its memory is given back before more is taken"
    assert [bytes_of(one) for one in packed_weights(model)] == [bytes_of(one) for one in packed_weights(plain)]


def test_a_file_that_is_another_by_now_is_not_taken_from(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    config = config_of(path)
    ahead = pack_ahead(config, 0, num_threads=1)
    assert ahead is not None
    with ahead:
        assert ahead.serves(ahead.jobs)
        tensors = {name: tensor + 1 for name, tensor in load_file(path / SINGLE_FILE).items()}
        save_file(tensors, tmp_path / "new")
        os.replace(tmp_path / "new", path / SINGLE_FILE)
        model, plain = model_of(config, 0), model_of(config, 0)
        load_weights(model, path, ahead=ahead)
        assert ahead._loading is None
    load_weights(plain, path)
    assert [bytes_of(one) for one in packed_weights(model)] == [bytes_of(one) for one in packed_weights(plain)]


def test_a_file_that_is_replaced_after_its_header_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other file has all tensors elsewhere."""
    path = make_checkpoint(tmp_path)
    tensors = dict(reversed(load_file(path / SINGLE_FILE).items()))

    def replaced(folder: Path) -> dict[str, TensorPlace]:
        places = locate(folder)
        save_file(tensors, tmp_path / "new")
        os.replace(tmp_path / "new", path / SINGLE_FILE)
        return places

    monkeypatch.setattr("vllm_lite.models.ahead.locate", replaced)
    assert pack_ahead(config_of(path), 0, num_threads=1) is None


def test_nothing_is_packed_for_models_of_transformers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    assert pack_ahead(config_of(path, model_impl="transformers"), 0, num_threads=1) is None


def test_damaged_files_get_the_error_of_the_loader(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    config, file = config_of(path), path / SINGLE_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert pack_ahead(config, 0, num_threads=1) is None
    with pytest.raises(ModelError, match="truncated"):
        locate(path)
    with pytest.raises(ModelError, match="truncated"):
        load_weights(model_of(config, 0), path)
    file.write_bytes(whole)
    ahead = pack_ahead(config, 0, num_threads=0)  # nothing is read before somebody waits
    assert ahead is not None
    with ahead:
        file.write_bytes(whole[: len(whole) // 2])
        assert all(ahead.take(key) is None for key in list(ahead.jobs)[-2:])
        with pytest.raises(ModelError, match="truncated"):
            load_weights(model_of(config, 0), path, ahead=ahead)


def test_sizes_of_a_header_match_the_file(tmp_path: Path) -> None:
    """Memory is taken by them before the file is read."""
    for offsets, shape in (([0, 8], [1 << 40, 1 << 40]), ([0, 1 << 60], [1 << 59]), ([-8, 0], [4]), ([0, 8], [-2, -2])):
        header = f'{{"x": {{"dtype": "BF16", "shape": {shape}, "data_offsets": {offsets}}}}}'.encode()
        (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(ModelError, match=r"not within the file|not a valid safetensors file"):
            locate(tmp_path)


# ---- the packer itself


def product(weight: PackedWeight) -> torch.Tensor:
    """With rows of its own type or, where that says nothing of them, float32."""
    dtype = weight.dtype if weight.dtype in FLOATS else torch.float32
    out = torch.empty(3, weight.num_outputs, dtype=dtype)
    linear(torch.randn(3, weight.num_inputs, generator=torch.Generator().manual_seed(2)).to(dtype), weight, out)
    return out


@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("form", [None, "int8", "int4", "int4_g32", "fp8"])
def test_pieces_of_any_kind_are_packed(
    tmp_path: Path, each_isa: str, num_threads: int, form: Quantization | None
) -> None:
    """Rows of several tensors, in another order, parts of rows, of one type as another: as PackedWeight packs them."""
    generator = torch.Generator().manual_seed(1)
    files, tensors = [], []
    for stored in FLOATS:
        tensor = torch.randn(70, 45, generator=generator)
        tensor[3, 4:9] = torch.tensor([float("inf"), 1e-40, -3e-6, 65519.0, 1.00390625])
        file = tmp_path / NAMES[stored]
        file.write_bytes(b"xyz" + tensor.to(stored).view(torch.uint8).numpy().tobytes())
        files.append(file)
        tensors.append(tensor.to(stored))
    order = tuple(torch.randperm(70, generator=generator)[:37].tolist())
    jobs, expected = {}, {}
    for dtype in FLOATS:
        for width, first in ((45, 0), (20, 7)):
            pieces, rows = [], []
            for file, tensor in zip(files, tensors, strict=True):
                sizes = (file, 3, NAMES[tensor.dtype], 45, first)
                pieces += [Piece(*sizes, 5, 40), Piece(*sizes, 0, len(order), order), Piece(*sizes, 3, 0)]
                part = tensor[:, first : first + width].to(dtype)
                rows += [part[5:45], part[list(order)]]
            jobs[dtype, width] = Job(tuple(pieces), width, NAMES[dtype], form)
            expected[dtype, width] = PackedWeight(torch.cat(rows), form=form)
    with FilePacker(jobs, num_threads) as packer:
        for key in (*reversed(jobs), *jobs):
            packed = packer.take(key)
            assert (packed is None) == (key not in expected), "each can be taken once"
            if packed is not None:
                ours, theirs = PackedWeight(packed), expected.pop(key)
                assert bytes_of(ours) == bytes_of(theirs), (each_isa, key)
                torch.testing.assert_close(product(ours), product(theirs), rtol=0, atol=0, equal_nan=True)


def test_a_closed_packer_frees_weights_that_were_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(64 * 64 * 4))
    job = Job((Piece(file, 0, "float32", 64, 0, 0, 64),), 64, "float32")
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(Pages, "give_back", lambda _, start, size: given.append((start, size)))
    packer = FilePacker({"first": job, "second": job, "third": job}, 2)
    assert packer.take("second") is not None
    assert packer.take("other") is None
    packer.close()
    packer.close()
    assert given == [(0, 16384), (2 * 16384, 16384)]
    assert packer.take("first") is None


def test_given_back_pages_are_whole_ones() -> None:
    pages = Pages.zeros(4 * 4096)
    view = memoryview(pages.mapping)[pages.start : pages.start + 4 * 4096]
    view[:] = b"x" * len(view)
    pages.give_back(100, 2 * 4096)
    assert bytes(view) == b"x" * 4096 + bytes(4096) + b"x" * 2 * 4096


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    job = Job((Piece(tmp_path / "none", 0, "float32", 64, 0, 0, 64),), 64, "float32")
    with pytest.raises(FileNotFoundError):
        FilePacker({"one": job}, 1)


# ---- the worker


def test_packing_ahead_is_imported_without_torch() -> None:
    code = "import sys, vllm_lite.worker.process; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))


@pytest.mark.parametrize("generation", [1, 2])
def test_only_the_first_group_packs_before_it_is_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: int
) -> None:
    """A group on standby waits beside one that has the memory."""
    began = []
    monkeypatch.setattr(process, "packed_weights", lambda *_: began.append("packs"))
    monkeypatch.setattr(process, "import_worker", lambda: began.append("imports"))
    settings = WorkerSettings(config_of(make_checkpoint(tmp_path)), "", 0, generation)
    loop = process.WorkerLoop.__new__(process.WorkerLoop)
    loop.settings = settings
    monkeypatch.setattr(loop, "send", lambda _: None)
    monkeypatch.setattr(loop, "receive", lambda: None)
    loop.run()
    assert began == ["packs", "imports"] if generation == 1 else began == ["imports"]
