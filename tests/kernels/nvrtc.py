"""NVRTC without a GPU, through cuda.bindings: compiles the kernels of `CupyLauncher`, with ptxas's report of registers
and memory."""

import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from tests.kernels.emulator import cache_folder
from vllm_lite.kernels.cuda import compiler
from vllm_lite.kernels.cuda.compiler import Compiled, CudaSource, compile_error

ARCH = "sm_90"
"""For which all kernels are compiled."""
OLDEST_ARCH = "sm_80"
"""Architecture for which one kernel of each source is compiled: features of newer ones only would not compile."""
OTHER_ARCHES = (OLDEST_ARCH, "sm_86", "sm_89", "sm_100", "sm_120")
"""For which those are that most depends on."""


@dataclass(frozen=True)
class Report:
    """Report of ptxas on one kernel."""

    registers: int
    spill_bytes: int  # stores and loads together
    shared: int  # static shared memory, bytes
    stack: int  # bytes a thread


def available() -> bool:
    try:
        nvrtc()
    except (ImportError, RuntimeError):  # the package or the library
        return False
    return True


class BindingsNvrtc:
    """The product's `Nvrtc` over cuda.bindings."""

    def __init__(self) -> None:
        self._nvrtc = import_module("cuda.bindings.nvrtc")  # has no types to check
        _, major, minor = self._nvrtc.nvrtcVersion()
        self.version = f"{major}.{minor}"
        self.arches = tuple(map(int, self._nvrtc.nvrtcGetSupportedArchs()[1]))

    def compile(self, program: CudaSource) -> Compiled:
        nvrtc = self._nvrtc
        (own, text), *headers = program.files
        _, handle = nvrtc.nvrtcCreateProgram(
            text.encode(),
            own.encode(),
            len(headers),
            [header.encode() for _, header in headers],
            [name.encode() for name, _ in headers],
        )
        try:
            nvrtc.nvrtcAddNameExpression(handle, program.name.encode())
            options = [option.encode() for option in (*program.options, f"--gpu-architecture={program.arch}")]
            (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
            _, size = nvrtc.nvrtcGetProgramLogSize(handle)
            log = bytearray(size)  # never bytes: bytes objects of one character are shared in the whole process
            nvrtc.nvrtcGetProgramLog(handle, log)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise compile_error(program, log.decode())
            _, symbol = nvrtc.nvrtcGetLoweredName(handle, program.name.encode())
            is_ptx = program.arch.startswith("compute_")
            _, size = nvrtc.nvrtcGetPTXSize(handle) if is_ptx else nvrtc.nvrtcGetCUBINSize(handle)
            cubin = bytearray(size)
            (nvrtc.nvrtcGetPTX if is_ptx else nvrtc.nvrtcGetCUBIN)(handle, cubin)
            return Compiled(bytes(cubin), symbol.decode(), log.decode())
        finally:
            nvrtc.nvrtcDestroyProgram(handle)


@cache
def nvrtc() -> BindingsNvrtc:
    return BindingsNvrtc()


def compile_report(source: str, name: str, arch: str, sources: Path | None = None) -> Report:
    """Compile as the product does, with `--ptxas-options=-v`, and read the log, which is kept for the next time."""
    options = (*compiler.options_for(source), "--ptxas-options=-v")
    program = CudaSource(source, name, compiler.read_sources(source, sources), arch, options)
    kept = cache_folder() / f"{program.key(nvrtc().version)}.log"
    if not kept.exists():
        new = kept.with_suffix(f".{os.getpid()}")
        new.write_text(nvrtc().compile(program).log)
        os.replace(new, kept)
    log = kept.read_text()

    def number(pattern: str, default: int | None = None) -> int:
        found = re.findall(pattern, log)
        if not found and default is None:
            raise AssertionError(f"no {pattern!r} in the log of {name}:\n{log}")
        return max(map(int, found)) if found else int(default or 0)

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return Report(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=spills,
        shared=number(r"(\d+) bytes smem", 0),
        stack=number(r"(\d+) bytes stack frame"),
    )
