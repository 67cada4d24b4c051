"""The wheel has all files that a user needs, works without the source tree, and can be built without a compiler."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest

from tests.deadlines import scaled

ROOT = Path(__file__).parents[2]
LIBRARY = "vllm_lite/_native/libvllm_lite_cpu.so"
NO_COMPILER = {"CXX": "/nonexistent/c++", "CC": "/nonexistent/cc"}


@dataclass(frozen=True)
class Wheel:
    name: str
    folder: Path  # the unpacked wheel
    output: str  # of the build

    @property
    def members(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


def build(folder: Path, env: dict[str, str], objects: Path | None = None) -> Wheel:
    """Build this tree's wheel without a network, and unpack it. `objects` keeps compiled files for the next build."""
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-index"]
    if objects is not None:
        command += ["--config-settings", f"build-dir={objects}"]
    done = subprocess.run(
        [*command, "-w", str(folder), str(ROOT)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "unpacked")
    return Wheel(path.name, folder / "unpacked", done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Wheel:
    """Compiling everything takes minutes of CPU time. So only files that have changed since the last run are compiled,
    without optimization and for one instruction set."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)  # None with -p no:cacheprovider
    env = {"CMAKE_ARGS": "-DVLLM_LITE_OPTIMIZE=-O0 -DVLLM_LITE_BASELINE=ON"}
    return build(tmp_path_factory.mktemp("wheel"), env, cache and cache.mkdir("wheel-build"))


@pytest.fixture(scope="module")
def plain_wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return build(tmp_path_factory.mktemp("plain"), NO_COMPILER)


def run_with(wheel: Wheel, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `wheel` instead of this environment's own install; -S disables the import hooks of that
    install."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheel.folder), sysconfig.get_path("platlib")])}
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env=env,
        cwd=wheel.folder.parent,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


def tracked(*patterns: str) -> set[str]:
    """Files of the source tree that are not ignored."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=True,
    )
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def test_wheel_holds_the_package_the_kernels_and_the_demo_model(wheel: Wheel) -> None:
    sources = tracked("vllm_lite")
    native = {f"vllm_lite/{name}" for name in tracked("csrc")}
    assert "vllm_lite/demo_model/model.safetensors" in sources
    assert "vllm_lite/csrc/cpu/sampler.cpp" in native
    info = {name for name in wheel.members if name.split("/")[0].endswith(".dist-info")}
    assert wheel.members - info - {LIBRARY} == sources | native
    assert {name.split("/", 1)[1] for name in info} >= {"METADATA", "entry_points.txt", "licenses/LICENSE"}
    for name in sources:
        assert (wheel.folder / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler here")
def test_wheel_holds_the_library_and_serves_every_python(wheel: Wheel) -> None:
    assert LIBRARY in wheel.members
    assert "-py3-none-linux_" in wheel.name
    assert "no native kernels were built" not in wheel.output


def test_without_a_compiler_the_wheel_is_pure_and_the_build_warns(wheel: Wheel, plain_wheel: Wheel) -> None:
    assert plain_wheel.name.endswith("-py3-none-any.whl")
    assert "no native kernels were built" in plain_wheel.output

    def content(members: set[str]) -> set[str]:
        return {name for name in members if name.startswith("vllm_lite/")} - {LIBRARY}

    assert content(plain_wheel.members) == content(wheel.members)


PROGRAM = """
import numpy, torch, vllm_lite
from importlib.resources import files
from vllm_lite.kernels import cpu
print(vllm_lite.__file__)
print((files("vllm_lite") / "csrc" / "cpu" / "sampler.cpp").is_file())
print((files("vllm_lite") / "demo_model" / "config.json").is_file())
print(cpu.available(), cpu.available())
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler here")
def test_wheel_works_without_the_source_tree(wheel: Wheel) -> None:
    done = run_with(wheel, "-c", PROGRAM)
    assert done.stdout.split() == [str(wheel.folder / "vllm_lite/__init__.py"), "True", "True", "True", "True"], done
    assert done.stderr == ""


def test_a_pure_wheel_works_and_warns(plain_wheel: Wheel) -> None:
    done = run_with(plain_wheel, "-c", PROGRAM)
    expected = [str(plain_wheel.folder / "vllm_lite/__init__.py"), "True", "True", "False", "False"]
    assert done.stdout.split() == expected, done
    assert done.stderr.count("no native CPU kernels") == 1


def test_command_line_of_the_wheel(wheel: Wheel) -> None:
    assert "vllm-lite = vllm_lite.tools.cli:main" in next(wheel.folder.glob("*.dist-info/entry_points.txt")).read_text()
    done = run_with(wheel, "-m", "vllm_lite", "--help")
    assert done.returncode == 0, done
    assert "vllm-lite" in done.stdout


def test_this_install_finds_its_files() -> None:
    """Tests run with an editable install, whose sources and library are in two folders."""
    package = files("vllm_lite")
    assert (package / "csrc" / "cpu" / "sampler.cpp").is_file()
    assert (package / "demo_model" / "config.json").is_file()
    if shutil.which("c++"):
        assert (package / "_native" / "libvllm_lite_cpu.so").is_file()
