"""`pull`, `list`, `show` and `rm` against a hub on this machine, and names that are not hub ids."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import scaled
from tests.hub_stub import COMMIT, Hub
from tests.unit.test_hub import DEMO, NEVER_FETCHED, stub  # noqa: F401 - a fixture
from vllm_lite.checkpoint.gguf.files import choose
from vllm_lite.checkpoint.hub_cache import cached_models, facts_of, find_cached, label_of
from vllm_lite.checkpoint.library_names import SAME_MODELS, hub_id
from vllm_lite.errors import ModelError
from vllm_lite.tools.cli import main

GGUFS = ("Tiny-Q4_K_M.gguf", "Tiny-Q8_0.gguf", "big/Tiny-BF16-00001-of-00002.gguf", "big/Tiny-BF16-00002-of-00002.gguf")


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


def test_pull_list_show_rm(stub: Hub, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["list"]) == 0
    assert "no model is in the cache" in capsys.readouterr().out
    assert main(["pull", "hf.co/org/model"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"org/model at {COMMIT[:12]}: ")
    assert "llama, safetensors bfloat16" in out
    assert "vllm-lite serve org/model" in out
    assert not stub.fetched() & set(NEVER_FETCHED)
    (row,) = listed(capsys)
    weights = (DEMO / "model.safetensors").stat().st_size
    assert row["name"] == "org/model"
    assert row["commit"] == COMMIT
    assert (row["family"], row["format"], row["is_whole"], row["fits"]) == ("llama", "safetensors", True, True)
    assert weights < row["size_bytes"] < 2 * weights  # type: ignore[operator]
    assert main(["list"]) == 0
    line = capsys.readouterr().out.splitlines()[1].split("  ")
    assert line[0] == "org/model"
    assert "yes" in line
    assert main(["show", "ORG/model"]) == 0
    assert "llama" in capsys.readouterr().out
    num_requests = len(stub.requests)
    assert main(["pull", "org/model"]) == 0
    assert not any("GET" in request and "/resolve/" in request for request in stub.requests[num_requests:]), (
        "all is there"
    )
    assert main(["rm", "org/model"]) == 0
    assert listed(capsys) == []
    assert main(["rm", "org/model"]) == 2
    assert "the cache has no model 'org/model'; it holds nothing" in capsys.readouterr().err


def test_models_in_gguf_files_are_distinguished_by_their_labels(
    stub: Hub,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stub.files = {name: f"{name:9}".encode() * 9 for name in GGUFS} | {"README.md": b"x"}
    assert main(["pull", "org/model"]) == 2
    assert "give one as ORG/MODEL:LABEL" in capsys.readouterr().err
    assert main(["pull", "org/model:Q9"]) == 2
    assert "has no GGUF models Q9" in capsys.readouterr().err
    monkeypatch.setattr("vllm_lite.checkpoint.hub_cache.read_metadata", lambda _: {"general.architecture": "llama"})
    for label in ("q4_k_m", "BF16"):
        assert main(["pull", f"org/model:{label}"]) == 0
    assert stub.fetched() == {name.rpartition("/")[2] for name in GGUFS if "Q8" not in name}
    models = cached_models()
    assert [model.name for model in models] == ["org/model:BF16", "org/model:Q4_K_M"]
    assert [model.facts.quantization for model in models] == ["BF16", "Q4_K_M"]
    assert [model.num_bytes for model in models] == [
        sum(len(stub.files[name]) for name in GGUFS[2:]),
        len(stub.files[GGUFS[0]]),
    ]
    with pytest.raises(ModelError, match="several models 'org/model'; it holds org/model:BF16, org/model:Q4_K_M"):
        find_cached("org/model")
    assert main(["rm", "org/model:bf16"]) == 0
    assert [model.name for model in cached_models()] == ["org/model:Q4_K_M"]
    assert main(["rm", "org/model"]) == 0
    assert cached_models() == []


def test_the_context_of_an_embedding_model_is_its_longest_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "max_position_embeddings": 512}')
    assert facts_of(tmp_path).context_length == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert facts_of(tmp_path).context_length == 256
    (tmp_path / "sentence_bert_config.json").write_text("[]")
    assert facts_of(tmp_path).context_length == 512


def test_a_pull_that_was_killed_continues(stub: Hub, tmp_path: Path) -> None:  # noqa: F811
    environment = {**os.environ, "HF_ENDPOINT": stub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "vllm_lite", "pull", "org/model"]
    stub.stall.set()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as killed:
        assert stub.stalled.wait(scaled(30))
        killed.send_signal(signal.SIGKILL)
        killed.wait(scaled(30))
    stub.stall.clear()
    stub.requests.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in stub.fetched()
    assert "config.json" not in stub.fetched(), "it was there"
    folder = done.stdout.splitlines()[1].removeprefix("in ")
    assert Path(folder, "model.safetensors").read_bytes() == stub.files["model.safetensors"]


def test_a_model_that_is_not_whole_is_shown_so(stub: Hub, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["pull", "org/model"]) == 0
    (model,) = cached_models()
    blob = (model.path / "model.safetensors").resolve()
    shutil.copy(blob, blob.with_suffix(".kept"))
    (model.path / "model.safetensors").unlink()
    rows = listed(capsys)
    assert [row for row in rows if row["is_whole"]] == []


@pytest.mark.parametrize(
    "name", [*SAME_MODELS, "llama3.2:latest", "qwen3:0.6b-q4_K_M", "library/llama3.2", "ollama.com/library/qwen3"]
)
def test_names_of_ollamas_library_are_refused_with_a_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match=r"name of Ollama's library, .*: use [\w-]+/[\w.:-]+$"):
        hub_id(name)


def test_the_error_for_an_unknown_name_tells_where_to_look() -> None:
    for name in ("nobody-knows-me", "llama3.2:90000b", "nothing:5b"):
        with pytest.raises(ModelError, match="look for ORG/REPO, or ORG/REPO:LABEL"):
            hub_id(name)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("org/model", "org/model"),
        ("hf.co/org/model:Q4_K_M", "org/model:Q4_K_M"),
        ("https://huggingface.co/org/model/tree/main", "org/model"),
        ("https://huggingface.co/org/model/", "org/model"),
    ],
)
def test_addresses_of_the_hub(given: str, name: str) -> None:
    assert hub_id(given) == name


def test_a_pull_of_an_invalid_hub_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "llama3.2"]) == 2
    assert "use bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M" in capsys.readouterr().err
    assert main(["pull", "a/b/c"]) == 2
    assert "'a/b/c' is not a hub id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], ["Q4_K_M", "Q8_0"]),
        (["m.Q4_0.gguf", "m.f16.gguf"], ["Q4_0", "f16"]),
        (["m-Q4_K_XL.gguf", "m-UD-Q4_K_XL.gguf"], ["m-Q4_K_XL", "UD-Q4_K_XL"]),
        (["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"], ["Q8_0"]),
        (["model.gguf"], ["model"]),
    ],
)
def test_labels(names: list[str], labels: list[str]) -> None:
    firsts = [name for name in names if "-00002-of" not in name]
    assert [label_of(first, names) for first in firsts] == labels
    for first, label in zip(firsts, labels, strict=True):
        assert choose(names, label)[0] == first
