"""`CupyLauncher`: compiles kernels with NVRTC through CuPy and launches them on torch's current stream. CuPy is
imported when a launcher is made, so machines without a GPU do not need it."""

import shutil
import struct
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
    """CuPy's NVRTC. Needs no GPU."""

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
    """The attribute of a stream that CuPy's launch needs. (CuPy's ExternalStream warns each time one is made.)"""

    ptr: int


class CupyKernel:
    """One instantiation on the current device. A launch returns at once and can be captured into a CUDA graph."""

    def __init__(self, kernel: Any, name: str) -> None:
        self._kernel = kernel
        self._name = name
        self._shared_limit = DEFAULT_SHARED_BYTES

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Arg], shared_bytes: int = 0
    ) -> None:
        # CuPy passes an int as 8 bytes, like an address, and numpy's scalars unchanged.
        values = tuple(packed(self._name, args))
        if shared_bytes > self._shared_limit:
            self._kernel.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_limit = shared_bytes
        # Get the stream now: with an earlier one, a graph captured now would be empty.
        stream = _Stream(torch.cuda.current_stream().cuda_stream)
        self._kernel(grid, block, values, shared_mem=shared_bytes, stream=stream)


class CupyLauncher:
    """Kernels for the device that is current when the launcher is made; a worker has one device.

    Before a CUDA graph is captured, every kernel in it must have run once with as much shared memory: loading a kernel,
    and raising that limit, cannot be captured.
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
    """The process's launcher; None, with a log message, if CuPy is missing."""
    try:
        return CupyLauncher()
    except KernelError as error:
        _logger.warning(
            "no CUDA kernels: norms, rotations, cache writes and sampling run in plain torch, slower (%s)", error
        )
        return None


_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_SEGMENT_OFFSET, _SEGMENT_SIZE = 8, 32
_SECTION_TYPE, _SECTION_OFFSET, _SECTION_SIZE = 4, 24, 32
_NO_BITS = 8
"""Type of a section without data in the file."""


def is_elf(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def elf_size(data: bytes) -> int:
    """Bytes up to the end of the tables, segments and sections in the headers; those whose headers are beyond `data` do
    not count. Raises ValueError unless `data` is an ELF file."""
    if not is_elf(data) or len(data) < 64:
        raise ValueError(f"no ELF file of 64 bits: it begins with {data[:6]!r} and has {len(data)} bytes")
    segments, sections = struct.unpack_from("<QQ", data, 32)
    segment_bytes, num_segments, section_bytes, num_sections = struct.unpack_from("<HHHH", data, 54)
    end: int = max(64, segments + segment_bytes * num_segments, sections + section_bytes * num_sections)
    for at in range(segments, segments + segment_bytes * num_segments, segment_bytes or 1):
        if at + _SEGMENT_SIZE + 8 <= len(data):
            end = max(end, _number(data, at + _SEGMENT_OFFSET) + _number(data, at + _SEGMENT_SIZE))
    for at in range(sections, sections + section_bytes * num_sections, section_bytes or 1):
        if at + _SECTION_SIZE + 8 <= len(data) and struct.unpack_from("<I", data, at + _SECTION_TYPE)[0] != _NO_BITS:
            end = max(end, _number(data, at + _SECTION_OFFSET) + _number(data, at + _SECTION_SIZE))
    return end


def _number(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def whole_cubin(data: bytes) -> bytes:
    """`data` with its last byte: CuPy treats NVRTC's output as text and drops the last byte as a terminator. The byte
    is zero, the highest byte of a number in the last header. Raises KernelError if more is missing, or if this is not a
    cubin."""
    try:
        size = elf_size(data)
    except ValueError as error:
        raise KernelError(f"NVRTC gave no cubin: {error}") from error
    if size - len(data) > 1:
        raise KernelError(f"the cubin has {len(data)} bytes, and its headers speak of {size}")
    return data.ljust(size, b"\0")
