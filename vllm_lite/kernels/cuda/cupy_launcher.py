"""`CupyLauncher`: kernels compiled by NVRTC through CuPy and launched on torch's current stream.

CuPy is imported when a launcher is made, so that machines without a GPU need not have it.
"""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from vllm_lite.kernels.cuda.compiler import (
    Compiled,
    CudaSource,
    KernelCompiler,
    KernelError,
    compile_error,
    target_of,
)
from vllm_lite.kernels.cuda.elf import whole_cubin
from vllm_lite.kernels.cuda.launcher import DEFAULT_SHARED_BYTES, Arg, packed
from vllm_lite.runtime import log

_logger = log.get(__name__)


def import_cupy() -> ModuleType:
    try:
        return import_module("cupy")  # has no types to check
    except ImportError as error:
        raise KernelError(
            f"CUDA kernels need CuPy, which cannot be imported ({error}): pip install vllm-lite[cuda12] or [cuda13], "
            "the one that matches torch.version.cuda"
        ) from error


class CupyNvrtc:
    """The compiler that CuPy loads. Needs no GPU."""

    def __init__(self) -> None:
        self._nvrtc: Any = import_cupy().cuda.nvrtc
        self.version = ".".join(map(str, self._nvrtc.getVersion()))
        self.arches = tuple(map(int, self._nvrtc.getSupportedArchs()))

    def compile(self, program: CudaSource) -> Compiled:
        nvrtc = self._nvrtc
        (own, text), *headers = program.files
        handle = nvrtc.createProgram(
            text, own, [content.encode() for _, content in headers], [name.encode() for name, _ in headers]
        )
        try:
            nvrtc.addNameExpression(handle, program.name)
            try:
                nvrtc.compileProgram(handle, (*program.options, f"--gpu-architecture={program.arch}"))
            except nvrtc.NVRTCError as error:
                raise compile_error(program, f"{nvrtc.getProgramLog(handle) or error}") from None
            symbol = nvrtc.getLoweredName(handle, program.name)
            is_ptx = program.arch.startswith("compute_")
            binary = nvrtc.getPTX(handle) if is_ptx else whole_cubin(nvrtc.getCUBIN(handle))
            return Compiled(binary, symbol, nvrtc.getProgramLog(handle))
        finally:
            nvrtc.destroyProgram(handle)


class _Stream(NamedTuple):
    """All that a launch by CuPy wants of a stream. (CuPy's own ExternalStream warns each time that one is made.)"""

    ptr: int


class CupyKernel:
    """One instantiation on the current device. A launch returns at once; it can be captured into a CUDA graph."""

    def __init__(self, kernel: Any, name: str) -> None:
        self._kernel = kernel
        self._name = name
        self._shared_limit = DEFAULT_SHARED_BYTES

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Arg], shared_bytes: int = 0
    ) -> None:
        # CuPy passes an int as 8 bytes, which is what an address has, and numpy's scalars as they are.
        values = tuple(packed(self._name, args))
        if shared_bytes > self._shared_limit:
            self._kernel.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_limit = shared_bytes
        # The stream of now: one taken earlier would leave an empty graph where this launch is captured.
        stream = _Stream(torch.cuda.current_stream().cuda_stream)
        self._kernel(grid, block, values, shared_mem=shared_bytes, stream=stream)


class CupyLauncher:
    """Kernels for the device that is current when the launcher is made; a worker has one device.

    Before a CUDA graph is captured every kernel in it must have run once with as much shared memory: loading one, and
    raising that limit, are no operations of a stream.
    """

    def __init__(self, compiler: KernelCompiler | None = None) -> None:
        self._cupy = import_cupy()
        if compiler is None:
            nvrtc = CupyNvrtc()
            compiler = KernelCompiler(nvrtc, target_of(torch.cuda.get_device_capability(), nvrtc.arches))
        self._compiler = compiler
        self._kernels: dict[tuple[str, str], CupyKernel] = {}
        self._cubins = Path(tempfile.mkdtemp(prefix="vllm_lite-cubins-"))  # CuPy loads modules from files
        weakref.finalize(self, shutil.rmtree, self._cubins, ignore_errors=True)

    @cached_property
    def multiprocessor_bytes(self) -> int:
        return int(torch.cuda.get_device_properties().shared_memory_per_multiprocessor)

    def kernel(self, source: str, name: str) -> CupyKernel:
        if (source, name) not in self._kernels:
            compiled = self._compiler.compile(source, name)
            path = self._cubins / f"{len(self._kernels)}.cubin"
            path.write_bytes(compiled.cubin)
            try:
                loaded = self._cupy.RawModule(path=str(path)).get_function(compiled.symbol)
            except Exception as error:
                raise KernelError(f"CUDA kernel {name} of {source} cannot be loaded: {error}") from error
            self._kernels[source, name] = CupyKernel(loaded, name)
        return self._kernels[source, name]


@cache
def default_launcher() -> CupyLauncher | None:
    """The launcher that a process shares; None, with one line in the log, where CuPy is missing."""
    try:
        return CupyLauncher()
    except KernelError as error:
        _logger.warning(
            "no CUDA kernels: norms, rotations, cache writes and sampling run in plain torch, slower (%s)", error
        )
        return None
