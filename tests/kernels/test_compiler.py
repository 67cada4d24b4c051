"""The cache of compiled kernels, and the launcher over a CuPy that is not there: neither needs a GPU or NVRTC."""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_lite.kernels.cuda import compiler, cupy_launcher
from vllm_lite.kernels.cuda.compiler import Compiled, CudaSource, KernelCompiler, KernelError
from vllm_lite.kernels.cuda.launcher import check_args, cuda_type

BLOCK, GRID = (32, 1, 1), (1, 1, 1)


class FakeNvrtc:
    """A fake compiler whose result shows its input."""

    version = "13.0"
    arches = (80, 90)

    def __init__(self) -> None:
        self.programs: list[CudaSource] = []

    def compile(self, program: CudaSource) -> Compiled:
        self.programs.append(program)
        return Compiled(f"cubin {len(self.programs)}\nof {program.name}".encode(), f"_Z{program.name}")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.cuh").write_text('#include "b.cuh"\n  #  include "c.cuh"\nint a;\n')
    (folder / "b.cuh").write_text('#include "c.cuh"\n#include "cuda_on_cpu.h"\n')
    (folder / "c.cuh").write_text('#include "b.cuh"\n')
    (folder / "unrelated.cuh").write_text("")
    return folder


def test_sources_are_followed_through_includes(sources: Path) -> None:
    assert [name for name, _ in compiler.read_sources("a.cuh", sources)] == ["a.cuh", "b.cuh", "c.cuh"]
    (sources / "c.cuh").write_text('#include "gone.cuh"\n')
    with pytest.raises(KernelError, match=r"gone\.cuh: No such file"):
        compiler.read_sources("a.cuh", sources)


def test_the_tree_and_the_package_have_the_sources() -> None:
    assert (compiler.source_folder() / "common.cuh").is_file()


def key(sources: Path, source: str = "a.cuh", name: str = "k<1>", arch: str = "sm_90", version: str = "13.0") -> str:
    return CudaSource(source, name, compiler.read_sources(source, sources), arch).key(version)


def test_the_key_holds_all_that_decides_the_outcome(sources: Path) -> None:
    program = CudaSource("a.cuh", "k<1>", compiler.read_sources("a.cuh", sources), "sm_90", ("-O1",))
    keys = [
        key(sources),
        key(sources, "b.cuh"),
        key(sources, name="k<2>"),
        key(sources, arch="sm_80"),
        key(sources, version="13.1"),
        program.key("13.0"),
    ]
    (sources / "unrelated.cuh").write_text("int changed;")
    assert key(sources) == keys[0]
    (sources / "c.cuh").write_text('#include "b.cuh"\nint changed;\n')  # reached only through other files
    keys.append(key(sources))
    assert len(set(keys)) == len(keys)


def test_a_kernel_is_compiled_once(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nvrtc = FakeNvrtc()
    with caplog.at_level(logging.INFO, "vllm_lite"):
        first = KernelCompiler(nvrtc, "sm_90", tmp_path / "cache", sources).compile("a.cuh", "k<1>")
        again = KernelCompiler(nvrtc, "sm_90", tmp_path / "cache", sources).compile("a.cuh", "k<1>")
    assert first == again == Compiled(b"cubin 1\nof k<1>", "_Zk<1>")
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == [
        "compiled CUDA kernel 1: k<1> for sm_90"
    ]
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".new")]


@pytest.mark.parametrize("damage", [b"", b"vllm_lite kernel 1\n", b"cut", b"flip"])
def test_a_damaged_entry_is_built_again(damage: bytes, sources: Path, tmp_path: Path) -> None:
    nvrtc = FakeNvrtc()
    kernels = KernelCompiler(nvrtc, "sm_90", tmp_path / "cache", sources)
    kernels.compile("a.cuh", "k<1>")
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    path.write_bytes({b"cut": whole[:-1], b"flip": whole[:-1] + b"?"}.get(damage, damage))
    assert kernels.compile("a.cuh", "k<1>").cubin.startswith(b"cubin 2")
    assert kernels.compile("a.cuh", "k<1>").cubin.startswith(b"cubin 2")


def test_a_cache_that_cannot_be_written_costs_only_time(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    nvrtc = FakeNvrtc()
    kernels = KernelCompiler(nvrtc, "sm_90", tmp_path / "file" / "cache", sources)
    assert kernels.compile("a.cuh", "k<1>").cubin.startswith(b"cubin 1")
    assert kernels.compile("a.cuh", "k<1>").cubin.startswith(b"cubin 2")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert not compiler.write_entry(tmp_path / "entry", Compiled(b"cubin", "symbol"))
    assert list(tmp_path.iterdir()) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_LITE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(compiler.cache_folder()) == "/home/somebody/.cache/vllm_lite/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(compiler.cache_folder()) == "/xdg/vllm_lite/kernels"
    monkeypatch.setenv("VLLM_LITE_CACHE", "/own")
    assert str(compiler.cache_folder()) == "/own/kernels"


def test_subnormal_floats_count_in_the_sampler_only() -> None:
    assert compiler.options_for("fused.cuh") == compiler.OPTIONS
    exact = compiler.options_for("sampler.cuh")
    assert [b for a, b in zip(compiler.OPTIONS, exact, strict=True) if a != b] == ["-ftz=false"]


def test_errors_begin_at_the_first_error() -> None:
    program = CudaSource("a.cuh", "k<1>", (), "sm_90")
    error = compiler.compile_error(program, "a.cuh(1): warning: x\n\na.cuh(7): error: y\n  here\n\0")
    assert str(error) == "CUDA kernel k<1> of a.cuh does not compile for sm_90:\n  a.cuh(7): error: y\n    here"


# ---- the launcher, over a fake CuPy


class FakeKernel:
    def __init__(self) -> None:
        self.shared_limits: list[int] = []
        self.launches: list[tuple[Any, ...]] = []

    def __setattr__(self, name: str, value: object) -> None:
        if name == "max_dynamic_shared_size_bytes":
            assert isinstance(value, int)
            self.shared_limits.append(value)
        else:
            super().__setattr__(name, value)

    def __call__(self, grid: object, block: object, args: object, *, shared_mem: int, stream: Any) -> None:
        self.launches.append((grid, block, args, shared_mem, stream.ptr))


class FakeCupy:
    """The parts of CuPy that loading a kernel touches."""

    def __init__(self) -> None:
        self.cubins: list[bytes] = []
        self.kernels: list[FakeKernel] = []

    def RawModule(self, path: str) -> Any:
        self.cubins.append(Path(path).read_bytes())
        if b"broken" in self.cubins[-1]:
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")

        def get_function(symbol: str) -> FakeKernel:
            assert symbol.startswith("_Z")
            self.kernels.append(FakeKernel())
            return self.kernels[-1]

        return SimpleNamespace(get_function=get_function)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    return fake


@pytest.fixture
def launcher(cupy: FakeCupy, sources: Path, tmp_path: Path) -> cupy_launcher.CupyLauncher:
    return cupy_launcher.CupyLauncher(KernelCompiler(FakeNvrtc(), "sm_90", tmp_path / "cache", sources))


def test_launch(launcher: cupy_launcher.CupyLauncher, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = launcher.kernel("a.cuh", "k<1>")
    assert launcher.kernel("a.cuh", "k<1>") is kernel
    assert cupy.cubins == [b"cubin 1\nof k<1>"]
    tensor, number = torch.zeros(3), np.float32(0.5)
    kernel(GRID, BLOCK, [tensor, None, number], 64)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=8))
    kernel(GRID, BLOCK, [])
    (fake,) = cupy.kernels
    # The stream is the one of each launch, not of the first.
    assert fake.launches == [(GRID, BLOCK, (tensor.data_ptr(), 0, number), 64, 7), (GRID, BLOCK, (), 0, 8)]


def test_much_shared_memory_is_asked_for_once(launcher: cupy_launcher.CupyLauncher, cupy: FakeCupy) -> None:
    kernel = launcher.kernel("a.cuh", "k<1>")
    for shared_bytes in (0, 48 * 1024, 49153, 49153, 100, 60000):
        kernel(GRID, BLOCK, [], shared_bytes)
    assert cupy.kernels[0].shared_limits == [49153, 60000]


def test_a_kernel_that_cannot_be_loaded_is_named(launcher: cupy_launcher.CupyLauncher) -> None:
    with pytest.raises(KernelError, match=r"broken<1> of a\.cuh cannot be loaded: CUDA_ERROR_INVALID_IMAGE"):
        launcher.kernel("a.cuh", "broken<1>")


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelError, match=r"pip install vllm-lite\[cuda12\] or \[cuda13\]"):
        cupy_launcher.CupyLauncher()


@pytest.mark.parametrize("wrong", [1, 1.0, True, np.float64(1), np.int16(1), "1", [1]])
def test_scalars_of_unknown_width_are_refused(wrong: Any, launcher: cupy_launcher.CupyLauncher) -> None:
    with pytest.raises(TypeError, match=r"k<1>: argument 1 is a \w+; a kernel takes tensors, None and numpy scalars"):
        launcher.kernel("a.cuh", "k<1>")(GRID, BLOCK, [None, wrong])
    check_args("k", [np.int32(1), np.int64(1), np.uint32(1), np.uint64(1), np.float32(1), None, torch.zeros(1)])


def test_element_types() -> None:
    assert cuda_type(torch.bfloat16, "q") == "__nv_bfloat16"
    with pytest.raises(ValueError, match=r"q is torch.int8; kernels take torch.float32"):
        cuda_type(torch.int8, "q")
