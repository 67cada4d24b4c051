"""A build for this machine's processor alone, as `make demo` makes it: the instruction set of a full build."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.deadlines import scaled
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
CMAKE, COMPILER = shutil.which("cmake", path=PATHS), shutil.which("c++")

pytestmark = pytest.mark.skipif(CMAKE is None or COMPILER is None, reason="needs CMake and a C++ compiler")


def best() -> str:
    """The instruction set that files in isa/ are compiled for, of all that this machine has."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    needs = {
        "avx512_bf16": {"avx512_bf16", "avx512_vnni"},
        "avx512": {"avx512vl", "avx512bw"},
        "avx2": {"avx2", "fma", "f16c"},
        "neon_i8mm": {"asimddp", "i8mm", "bf16"},
        "neon_dot": {"asimddp"},
    }
    return next((isa for isa, wanted in needs.items() if wanted <= has), "baseline")


def configured(folder: Path, *options: str) -> list[str]:
    """The compiler's commands that CMake makes."""
    command = [str(CMAKE), "-S", str(ROOT), "-B", str(folder), "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options]
    subprocess.run(command, check=True, capture_output=True, timeout=scaled(60))
    return [entry["command"] for entry in json.loads((folder / "compile_commands.json").read_text())]


def test_one_instruction_set_is_compiled(tmp_path: Path) -> None:
    commands = configured(tmp_path, "-DVLLM_LITE_ISAS=host")
    found = {match[1] for each in commands if (match := re.search(r"-DVLLM_LITE_ISA=(\w+)", each))}
    tiles = {"amx", "amx_emulated"} if "amx_tile" in Path("/proc/cpuinfo").read_text() else set()
    assert found - tiles == {best()}
    if best() != "baseline":
        assert all(f"-DVLLM_LITE_ONLY={best()}" in each for each in commands)
    assert not any("VLLM_LITE_ONLY" in each for each in configured(tmp_path / "all"))


def chooser(folder: Path, *definitions: str) -> ctypes.CDLL:
    """isa.cpp as a library of its own."""
    made = folder / f"{len(list(folder.iterdir()))}.so"
    options = ["-std=c++17", "-shared", "-fPIC", "-DVLLM_LITE_X86", *definitions]
    command = [str(COMPILER), *options, str(ROOT / "csrc/cpu/isa.cpp"), "-o", str(made)]
    subprocess.run(command, check=True, timeout=scaled(60))
    return ctypes.CDLL(str(made))


@pytest.mark.skipif(not best().startswith("avx"), reason="for x86 with AVX2")
def test_a_library_for_one_set_uses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LITE_ISA", raising=False)
    number = library.ISAS.index(best())
    every, only = chooser(tmp_path), chooser(tmp_path, f"-DVLLM_LITE_ONLY={best()}")
    assert every.vllm_lite_isa() == only.vllm_lite_isa() == number
    assert every.vllm_lite_set_isa(0) == 1
    assert only.vllm_lite_set_isa(0) == 0
    assert only.vllm_lite_isa() == number


@pytest.mark.skipif(not best().startswith("avx"), reason="for x86 with AVX2")
def test_a_library_for_another_processor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = chooser(tmp_path, "-DVLLM_LITE_ONLY=none_of_ours").vllm_lite_isa()
    assert other == -1
    if not cpu.available():
        pytest.skip("there is no library to be opened")
    fake = SimpleNamespace(vllm_lite_abi=lambda: library.ABI, vllm_lite_isa=lambda: other)
    monkeypatch.setattr(ctypes, "CDLL", lambda _path: fake)
    with pytest.raises(OSError, match="was built for another processor alone; install the package again"):
        library.open_library()
