"""All kernels compile, keep their values in registers, leave room for the next block; some for every architecture."""

from pathlib import Path

import pytest

from tests.kernels import nvrtc
from tests.kernels.instantiations import INSTANTIATIONS, ON_EVERY_ARCH, Instantiation
from vllm_lite.kernels.cuda import compiler
from vllm_lite.kernels.cuda.compiler import KernelCompiler, KernelError

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="needs cuda-bindings and nvidia-cuda-nvrtc")


FIRST_OF_EACH_SOURCE = {kernel.source: kernel for kernel in reversed(INSTANTIATIONS)}.values()
COMPILED = dict.fromkeys(
    [
        *((kernel, nvrtc.ARCH) for kernel in INSTANTIATIONS),
        *((kernel, nvrtc.OLDEST_ARCH) for kernel in FIRST_OF_EACH_SOURCE),
        *(
            (kernel, arch)
            for kernel in INSTANTIATIONS
            if kernel.name.startswith(ON_EVERY_ARCH)
            for arch in nvrtc.OTHER_ARCHES
        ),
    ]
)


@pytest.mark.parametrize(
    ("kernel", "arch"), COMPILED, ids=[f"{kernel.name.replace(' ', '')}-{arch}" for kernel, arch in COMPILED]
)
def test_compiles_without_spills(kernel: Instantiation, arch: str) -> None:
    report = nvrtc.compile_report(kernel.source, kernel.name, arch)
    assert report.spill_bytes == 0, report
    assert report.registers <= kernel.max_registers, report


def test_every_source_has_an_instantiation() -> None:
    sources = {path.name for path in compiler.source_folder().glob("*.cuh") if "__global__" in path.read_text()}
    assert sources == {kernel.source for kernel in INSTANTIATIONS}


def test_an_error_names_the_kernel_and_the_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.cuh").write_text("template <int N>\n__global__ void wrong(int* p) {\n  *p = missing + N;\n}\n")
    kernels = KernelCompiler(nvrtc.nvrtc(), "sm_90", tmp_path / "cache", sources=tmp_path)
    with pytest.raises(KernelError, match=r"(?s)wrong<3> of wrong\.cuh.*wrong\.cuh\(3\): error.*missing"):
        kernels.compile("wrong.cuh", "wrong<3>")


def test_spills_are_seen(tmp_path: Path) -> None:
    (tmp_path / "fat.cuh").write_text(
        "__global__ void __launch_bounds__(1024) fat(float* p, int n) {\n"
        "  float x[128];\n"
        "#pragma unroll\n  for (int i = 0; i < 128; ++i) x[i] = p[i * n];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n  for (int i = 0; i < 128; ++i) p[i * n + threadIdx.x] = x[i] * x[127 - i];\n}\n"
    )
    assert nvrtc.compile_report("fat.cuh", "fat", "sm_90", tmp_path).spill_bytes > 0


def test_a_cubin_and_its_symbol_go_through_the_cache(tmp_path: Path) -> None:
    (tmp_path / "fill.cuh").write_text("template <int N>\n__global__ void fill(int* p) { p[threadIdx.x] = N; }\n")
    kernels = KernelCompiler(nvrtc.nvrtc(), "sm_80", tmp_path / "cache", sources=tmp_path)
    first, second = kernels.compile("fill.cuh", "fill<7>"), kernels.compile("fill.cuh", "fill<7>")
    assert (first.cubin, first.symbol) == (second.cubin, second.symbol)
    assert first.cubin.startswith(b"\x7fELF")
    assert first.symbol.encode() in first.cubin
    assert kernels.num_compiled == 1
