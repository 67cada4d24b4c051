"""GGUF files of encoders, and of decoders that pool: their vectors against transformers', and refused files."""

from pathlib import Path
from typing import Any

import pytest

from tests.cpu.test_pooling import PROMPTS, WITHIN, PoolingWorker
from tests.gguf_files import write_gguf
from tests.pooled import vectors, write_pooled
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.errors import ModelError
from vllm_lite.protocol.pooling import Pooling
from vllm_lite.runtime.nested_settings import PoolingOptions

MEAN, CLS, LAST, RANK = 1, 2, 3, 4
NAMES = {MEAN: "mean", CLS: "cls", LAST: "last"}


def write(path: Path, name: str, pooling: int | None, kind: str = "F32", *, dense: bool = False, **more: Any) -> Path:
    """Write a GGUF file of a tiny checkpoint beside it, with matrices of layers in the type `kind`."""
    folder = path / "checkpoint"
    if not folder.exists():
        write_pooled(folder, name, {"hidden_size": 64})
    architecture = {"Q": "qwen3", "N": "nomic-bert"}.get(name[0], "bert")
    own = {} if pooling is None else {f"{architecture}.pooling_type": pooling}

    def kind_of(tensor: str) -> str:
        return kind if tensor.startswith("blk.") and tensor.endswith("weight") else "F32"

    return write_gguf(path / f"{kind}-{dense}.gguf", folder, kind_of, own | more, dense=dense)


def worker_of(file: Path, **settings: Any) -> PoolingWorker:
    """With the tokenizer of the checkpoint beside the file, which has none."""
    return PoolingWorker(file, max_num_batched_tokens=512, tokenizer=str(file.parent / "checkpoint"), **settings)


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("BertModel", CLS),
        ("BertModel", MEAN),
        ("RobertaModel", MEAN),
        ("NomicBertModel", MEAN),
        ("Qwen3ForCausalLM", LAST),
    ],
)
def test_vectors_match_transformers(tmp_path: Path, name: str, pooling: int) -> None:
    file = write(tmp_path, name, pooling)
    worker = worker_of(file)
    assert (worker.ready.pooler.size, worker.ready.pooler.normalizes) == (64, True)
    want = vectors(tmp_path / "checkpoint", PROMPTS, NAMES[pooling])
    assert (worker.all(PROMPTS, Pooling("embed")) - want).abs().max() < WITHIN


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("name", ["BertModel", "NomicBertModel"])
def test_quantized_encoders_agree_with_their_dequantized_weights(tmp_path: Path, name: str) -> None:
    found = [
        worker_of(write(tmp_path, name, MEAN, "Q8_0", dense=dense)).all(PROMPTS, Pooling("embed"))
        for dense in (False, True)
    ]
    assert (found[0] - found[1]).abs().max() < WITHIN
    assert load_spec(tmp_path / "Q8_0-False.gguf").quantization is not None


def test_a_file_without_pooling_has_its_familys_or_the_users(tmp_path: Path) -> None:
    file = write(tmp_path, "BertModel", None)
    spec = load_spec(file)
    assert spec.pooling is not None
    assert (spec.pooling.kind, spec.pooling.generates) == ("cls", False)
    worker = worker_of(file, pooler_config={"pooling_type": "MEAN"})
    want = vectors(tmp_path / "checkpoint", PROMPTS, "mean")
    assert (worker.all(PROMPTS, Pooling("embed")) - want).abs().max() < WITHIN


def test_a_decoder_that_pools_also_generates(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, "Qwen3ForCausalLM", LAST), options=PoolingOptions(convert="auto"))
    assert spec.pooling is not None
    assert (spec.pooling.kind, spec.pooling.generates) == ("last", True)


@pytest.mark.parametrize(("number", "problem"), [(RANK, "is that of rerankers"), (9, "is unknown; supported: 0")])
def test_other_ways_to_pool_are_refused_by_name(tmp_path: Path, number: int, problem: str) -> None:
    with pytest.raises(ModelError, match=rf"bert.pooling_type {number} {problem}"):
        load_spec(write(tmp_path, "BertModel", number))
