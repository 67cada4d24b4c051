"""The compiled library of csrc/cpu, opened once and called through ctypes on raw data pointers."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import as_file, files
from threading import Lock, get_ident
from typing import Any

from xxhash import xxh3_128_digest

from vllm_lite.runtime import log

ABI = 32
LIBRARY = "libvllm_lite_cpu.so"
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated", "neon_dot", "neon_i8mm")
"""Instruction sets for which kernels are compiled. On each architecture, a set includes all sets before it.
"amx_emulated" is for tests."""

pointer, int32, int64, float32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

_logger = log.get(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The library. Returns None and logs one line if it is missing or of another version."""
    try:
        return open_library()
    except (OSError, AttributeError) as error:
        _logger.warning(
            "no native CPU kernels: attention, small matrix products and sampling run in plain torch, several times "
            "slower (%s)",
            error,
        )
        return None


def open_library() -> ctypes.CDLL:
    """Open the library. Raises OSError if it is missing or of another version, AttributeError if another library has
    this name."""
    # Not next to __file__: an editable install has the library and the sources in two folders.
    resource = files("vllm_lite") / "_native" / LIBRARY
    if not resource.is_file():
        raise OSError(f"{LIBRARY} was not built when the package was installed; that takes a C++ compiler")
    with as_file(resource) as path:
        opened = ctypes.CDLL(str(path))
    abi = opened.vllm_lite_abi()
    if abi != ABI:
        raise OSError(f"{LIBRARY} has ABI {abi}, this package needs {ABI}; install the package again")
    if opened.vllm_lite_isa() < 0:
        raise OSError(f"{LIBRARY} was built for another processor alone; install the package again")
    return opened


@cache
def digest() -> bytes:
    """Digest of the library file, which changes whenever the layout of packed weights does. Raises OSError."""
    with (files("vllm_lite") / "_native" / LIBRARY).open("rb") as stream:
        return xxh3_128_digest(stream.read())


def available() -> bool:
    return library() is not None


class Function:
    """A function of the library. A call goes to the library or, while calls are recorded, to the recorder alone."""

    __slots__ = ("_call", "argtypes", "name")

    def __init__(self, name: str, call: Any) -> None:
        self.name = name
        self.argtypes: Sequence[Any] = call.argtypes
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._record_or_call(args) if _recording else self._call(*args)

    def _record_or_call(self, args: tuple[Any, ...]) -> Any:
        recorder = _recorders.get(get_ident())
        return self._call(*args) if recorder is None else recorder(self, args)


@cache
def function(name: str, argtypes: Sequence[Any], restype: Any = None) -> Function:
    """A function of the library. `argtypes` must be hashable, as a tuple is. Raises RuntimeError without a library."""
    opened = library()
    if opened is None:
        raise RuntimeError("no native CPU kernels; ask available() first")
    found = opened[name]  # a function object of its own, unlike getattr's, which is shared
    found.argtypes, found.restype = argtypes, restype
    return Function(name, found)


Recorder = Callable[[Function, tuple[Any, ...]], int]
_recorders: dict[int, Recorder] = {}
"""Thread id -> recorder."""
_recording = False
"""Whether `_recorders` has an entry. A call checks only this while nothing is recorded."""
_recorders_change = Lock()


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Pass this thread's calls to `recorder` instead of the library; they return what it returns.

    The calls of other threads, which may be other ranks of the model, go to the library as usual. Raises RuntimeError
    if this thread's calls are being recorded already.
    """
    global _recording  # the callers of kernels do not know that they are recorded, as with CUDA graphs
    with _recorders_change:
        if get_ident() in _recorders:
            raise RuntimeError("calls of this thread are being recorded already")
        _recorders[get_ident()] = recorder
        _recording = True
    try:
        yield
    finally:
        with _recorders_change:
            del _recorders[get_ident()]
            _recording = bool(_recorders)


def isa() -> str:
    """The instruction set in use, one of ISAS: the best that this machine has, or the one in VLLM_LITE_ISA."""
    return ISAS[function("vllm_lite_isa", (), ctypes.c_int32)()]


def num_threads() -> int:
    """Threads that a kernel uses, the calling one included."""
    return int(function("vllm_lite_num_threads", (), ctypes.c_int32)())


def set_num_threads(count: int, binds: bool = True) -> None:
    """Let kernels use `count` threads from now on, the calling one included. `binds`: if that is the number of CPUs
    that they may use, each of the others is bound to a CPU of its own."""
    if count < 1:
        raise ValueError(f"the number of threads must be at least 1, got {count}")
    function("vllm_lite_set_num_threads", (int32, int32))(count, int(binds))
