"""GPU packages that `make venv` installs, and its message where it cannot."""

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from vllm_lite.runtime import machine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_extra  # noqa: E402


@pytest.fixture
def torch_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a driver, and the folder of its torch."""
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    monkeypatch.setattr(machine, "version", lambda _name: "2.13.0")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(machine, "find_spec", lambda name: spec if name == "torch" else None)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "extra"),
    [("cuda: Optional[str] = '13.0'", "cuda13"), ('cuda = "12.8"', "cuda12"), ("cuda: Optional[str] = None", "")],
)
def test_the_extra_matches_torchs_cuda_version(
    line: str,
    extra: str,
    torch_of: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (torch_of / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    assert gpu_extra.main() == 0
    said = capsys.readouterr()
    assert said.out.strip() == extra
    assert ("torch 2.13.0 is built without CUDA: workers will run on the CPU" in said.err) == (extra == "")
    if extra:
        monkeypatch.setattr(machine, "hides_gpus", lambda: False)
        assert machine.lacks_for_cuda() == f"the package cupy is not installed; install vllm-lite[{extra}]"
        assert re.search(rf"^{extra} = \[\"cupy-{extra}x", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_without_a_driver_there_is_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "has_driver", lambda: False)
    assert gpu_extra.main() == 0
    assert capsys.readouterr() == ("", "")


def test_a_torch_that_is_not_there(torch_of: Path) -> None:
    assert machine.cuda_extra() is None
