"""`plan` refuses the models that `serve` refuses, with the same words, and never says that such a model fits."""

import io
import json
import shutil
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.families.through_transformers import FOREIGN, VARIANTS
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.config import EngineConfig, demo_folder
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.models import examination
from vllm_lite.models.registry import examine
from vllm_lite.tools import plan_checkpoint
from vllm_lite.tools.cli import main

BY_NAME = {variant.name: variant for variant in VARIANTS}


def planned(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """The exit status of `plan`, and its last line."""
    capsys.readouterr()
    status = main(["plan", str(path), "--memory", "8GiB", *flags])
    out, err = capsys.readouterr()
    return status, (err or out).strip().splitlines()[-1]


def config(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.check({"model": str(path), "device": "cpu", **settings})


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine models here, where transformers is imported already, and not in a process of their own."""

    def run(command: list[str], *, input: bytes, **_: Any) -> "subprocess.CompletedProcess[bytes]":  # noqa: A002
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(input)))
        with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings(action="ignore"):
            status = examination.main()
        return subprocess.CompletedProcess(command, status, out.getvalue().encode(), b"")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("in_this_process")
def test_a_model_that_transformers_has_and_the_engine_cannot_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FOREIGN["diffllama"][0].make(tmp_path / "model")
    with pytest.raises(ModelError) as refused:
        examine(load_spec(path, "transformers"), torch.float32, 256)
    assert "attends 2 times" in str(refused.value)
    assert planned(path, capsys, "--max-model-len", "256") == (2, f"vllm-lite: {refused.value}")


def test_an_unknown_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads((Path(demo_folder()) / "config.json").read_text())
    changes = {"architectures": ["NovelForCausalLM"], "model_type": "novel"}
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    status, text = planned(tmp_path, capsys)
    assert status == 2
    assert "model_type 'novel' is not one that transformers" in text


@pytest.mark.usefixtures("in_this_process")
def test_a_plan_fits_where_the_model_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = BY_NAME["helium"].make(tmp_path / "model")
    status, text = planned(path, capsys)
    assert (status, text.split(".")[0]) == (0, "It fits")


def test_a_number_of_ranks_outside_its_plan_is_refused(tmp_path: Path) -> None:
    path = BY_NAME["stablelm"].make(tmp_path / "model")
    examination.check(config(path))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2: transformers has no plan .* 'stablelm'; give 1"):
        examination.check(config(path, tensor_parallel_size=2))
    examination.check(config(BY_NAME["seed-oss"].make(tmp_path / "shared"), tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"enable_lora": True}, "enable_lora is for models with a native"),
        ({"deterministic": True}, "deterministic needs a"),
    ],
)
def test_settings_that_need_a_native_implementation(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    shutil.copy(Path(demo_folder()) / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=f"^{says}"):
        plan_checkpoint.load(config(tmp_path, model_impl="transformers", **settings))


def test_an_examination_that_breaks_off_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_checkpoint, "MODULE", "vllm_lite.no_such_module")
    with pytest.raises(ModelError, match=r"could not be found out: .*No module named vllm_lite.no_such_module"):
        plan_checkpoint.check_implementation(config(tmp_path), tmp_path)
    monkeypatch.setattr(plan_checkpoint, "PATIENCE_S", 0.01)
    with pytest.raises(ModelError, match=r"was not found out within 0 s"):
        plan_checkpoint.check_implementation(config(tmp_path), tmp_path)
