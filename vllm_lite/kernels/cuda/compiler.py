"""Compiles an instantiation of a file of csrc/cuda to a cubin, with a cache on disk. Needs no GPU.

For a device newer than NVRTC the result is PTX, which the driver compiles when it is loaded. The key of a cache entry
is a hash of all inputs: the source and all files that it includes, the instantiation, the architecture, the options and
NVRTC's version. (CuPy's own cache ignores included files, so changes in them would be missed.)
"""

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from vllm_lite.errors import VllmLiteError
from vllm_lite.runtime import log
from vllm_lite.runtime.untrusted_files import first_untrusted, read_bounded

# 177: an unused constant of a shared header.
OPTIONS = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space", "-lineinfo", "--diag-suppress=177")
EXACT_SOURCES = ("sampler.cuh", "routing.cuh")
"""Sources that compare floats by their bits, and so need subnormals; all others flush them to 0, which is faster."""

_logger = log.get(__name__)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_EMULATOR = "cuda_on_cpu.h"  # not included by NVRTC
_MAGIC = b"vllm_lite kernel 2\n"
MAX_ENTRY_BYTES = 64 * 1024 * 1024


class KernelError(VllmLiteError):
    """A CUDA kernel could not be compiled or loaded. The message has the kernel and the line of its source."""


@dataclass(frozen=True)
class CudaSource:
    """The inputs of a compilation, except NVRTC's version."""

    source: str  # file of csrc/cuda
    name: str  # template instantiation
    files: tuple[tuple[str, str], ...]  # (name, text) of the source, then of included files
    arch: str  # "sm_90"; "compute_90" for PTX
    options: tuple[str, ...] = OPTIONS

    def key(self, nvrtc_version: str) -> str:
        digest = hashlib.sha256()
        parts = [self.source, self.name, self.arch, nvrtc_version, *self.options]
        parts += [part for file in sorted(self.files) for part in file]
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Compiled:
    cubin: bytes  # or PTX
    symbol: str  # the mangled name of the instantiation
    log: str = ""  # the compiler's output


class Nvrtc(Protocol):
    """The compiler; it raises KernelError with its log."""

    @property
    def version(self) -> str: ...

    @property
    def arches(self) -> Sequence[int]:
        """Supported architectures, such as 90 for sm_90."""
        ...

    def compile(self, program: CudaSource) -> Compiled: ...


def target_of(capability: tuple[int, int], arches: Sequence[int]) -> str:
    """The best target for a device of this capability among those of a compiler for `arches`: its own machine code,
    that of an older device of its generation, or PTX of the newest older architecture. Raises KernelError if there is
    none."""
    major, minor = capability
    older = [arch for arch in arches if arch <= 10 * major + minor]
    if not older:
        raise KernelError(f"the device has compute capability {major}.{minor}, NVRTC compiles for {min(arches)} and up")
    newest = max(older)
    if newest // 10 == major:
        return f"sm_{newest}"
    _logger.warning(
        "NVRTC is older than this device of compute capability %d.%d: its kernels are compiled as PTX for %d.%d, which "
        "the driver translates at each start; a newer CuPy and NVRTC would make them faster",
        *(major, minor, *divmod(newest, 10)),
    )
    return f"compute_{newest}"


def options_for(source: str) -> tuple[str, ...]:
    exact = source in EXACT_SOURCES
    return tuple("-ftz=false" if exact and option == "-ftz=true" else option for option in OPTIONS)


# ---- sources


@cache
def source_folder() -> Path:
    """csrc/cuda inside the installed package or, in a checkout, beside it."""
    packaged = files("vllm_lite") / "csrc" / "cuda"
    if isinstance(packaged, Path) and packaged.is_dir():
        return packaged
    checkout = Path(__file__).parents[3] / "csrc" / "cuda"
    if checkout.is_dir():
        return checkout
    raise KernelError(f"the CUDA sources are missing: neither {packaged} nor {checkout} is a folder")


def read_sources(source: str, folder: Path | None = None) -> tuple[tuple[str, str], ...]:
    """(name, text) of `source` and every file of csrc/cuda that it includes, in that order."""
    folder = folder or source_folder()
    texts: dict[str, str] = {}
    waiting = [source]
    while waiting:
        name = waiting.pop(0)
        if name in texts or name == _EMULATOR:
            continue
        path = folder / name
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except OSError as error:
            raise KernelError(f"cannot read the CUDA source {path}: {error.strerror}") from error
        waiting += _INCLUDE.findall(texts[name])
    return tuple(texts.items())


# ---- the cache on disk


def cache_folder() -> Path:
    if own := os.environ.get("VLLM_LITE_CACHE"):
        return Path(own) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "vllm_lite" / "kernels"


def read_entry(path: Path) -> Compiled | None:
    """The entry, or None if it is missing, damaged, or not from a trusted owner; never raises."""
    try:
        data = read_bounded(path, MAX_ENTRY_BYTES)
        stranger = first_untrusted((path.parent, path))
    except OSError:
        return None
    if stranger is not None:
        _logger.warning(
            "%s belongs to another user, or all users may write it, so the compiled kernel in it is not loaded",
            stranger,
        )
        return None
    magic, digest, rest = data[: len(_MAGIC)], data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if magic != _MAGIC or hashlib.sha256(rest).digest() != digest:
        _logger.warning("the compiled kernel in %s is damaged; compiling it again", path)
        return None
    symbol, _, cubin = rest.partition(b"\n")
    return Compiled(cubin, symbol.decode())


def write_entry(path: Path, compiled: Compiled) -> bool:
    """Write to a temporary name and rename, so that other processes see a complete entry or none. Returns False if it
    cannot be written."""
    rest = compiled.symbol.encode() + b"\n" + compiled.cubin
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(rest).digest() + rest)
        os.replace(temporary, path)
        return True
    except OSError as error:
        _logger.info("cannot keep compiled kernels in %s: %s", path.parent, error.strerror)
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        return False


class KernelCompiler:
    """Compiles instantiations for one architecture, each at most once per machine if the cache folder is writable."""

    def __init__(self, nvrtc: Nvrtc, arch: str, folder: Path | None = None, sources: Path | None = None) -> None:
        self._nvrtc = nvrtc
        self._arch = arch
        self._folder = folder or cache_folder()
        self._sources = sources
        self.num_compiled = 0

    def path_of(self, source: str, name: str) -> Path:
        """Path of a compiled instantiation."""
        return self._path(self._program(source, name))

    def _program(self, source: str, name: str) -> CudaSource:
        return CudaSource(source, name, read_sources(source, self._sources), self._arch, options_for(source))

    def _path(self, program: CudaSource) -> Path:
        return self._folder / f"{program.key(self._nvrtc.version)}.cubin"

    def compile(self, source: str, name: str) -> Compiled:
        program = self._program(source, name)
        path = self._path(program)
        if (kept := read_entry(path)) is not None:
            return kept
        self.num_compiled += 1
        begin = time.perf_counter()
        compiled = self._nvrtc.compile(program)
        seconds = time.perf_counter() - begin
        _logger.info("compiled CUDA kernel %d: %s for %s in %.1f s", self.num_compiled, name, self._arch, seconds)
        write_entry(path, compiled)
        return compiled


def compile_error(program: CudaSource, message: str) -> KernelError:
    """The error for a failed compilation, from the compiler's log, which has files and lines."""
    lines = [line for line in message.strip("\x00 \n").splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    return KernelError(
        f"CUDA kernel {program.name} of {program.source} does not compile for {program.arch}:\n  "
        + "\n  ".join(lines[first : first + 20])
    )
