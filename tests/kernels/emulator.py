"""`EmulatorLauncher`: runs the sources of csrc/cuda on the CPU, compiled by g++, with the interface of the product's
launcher.

A shared object is built for each instantiation, or for several at once after `preload`; it is kept in a cache folder
(VLLM_LITE_EMULATOR_CACHE, else one in the system's temporary folder) under a hash of the sources and the compiler.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from vllm_lite.kernels.cuda import compiler
from vllm_lite.kernels.cuda.launcher import Arg, check_args

EMULATOR = Path(__file__).parents[2] / "csrc" / "emulator"
FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-shared", "-fPIC", "-w"),
    *("-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE"),  # the last: longjmp between stacks is meant
    *("-fno-gnu-unique", "-fvisibility=hidden", "-Wl,-Bsymbolic"),  # no symbol is shared with another loaded kernel
]

_ELEMENTS = {
    torch.float32: {"float"},
    torch.float16: {"__half"},
    torch.bfloat16: {"__nv_bfloat16"},
    torch.float8_e4m3fn: {"fp8_e4m3"},
    torch.float8_e5m2: {"fp8_e5m2"},
    torch.int32: {"int", "unsigned int"},
    torch.int64: {"long int", "long long int", "long unsigned int", "long long unsigned int"},
    torch.uint8: {"unsigned char", "char", "fp8_e4m3", "fp8_e5m2"},
    torch.int8: {"signed char", "char"},
    torch.bool: {"bool", "unsigned char"},
}
_SCALARS = {
    np.int32: {"int"},
    np.uint32: {"unsigned int"},
    np.int64: {"long int", "long long int"},
    np.uint64: {"long unsigned int", "long long unsigned int"},
    np.float32: {"float"},
}
_stacks: list[int] = []
"""Addresses of stacks that ended launches used and the next ones can use; as many as launches have run at once."""
_KNOWN = set().union(*_ELEMENTS.values())  # a pointer to anything else takes any tensor


def available() -> str | None:
    """The path of the compiler; None if there is none, so that the tests of the emulator cannot run."""
    return shutil.which(os.environ.get("CXX") or "g++")


def fits(parameter: str, arg: Arg) -> bool:
    """Whether `arg` fits a parameter of this C++ type, such as "const float*" or "long long int"."""
    if parameter.endswith("*"):
        element = parameter.removesuffix("*").replace("const ", "").strip()
        if arg is None or element in ("void", "const void") or element not in _KNOWN:
            return arg is None or isinstance(arg, torch.Tensor)
        return isinstance(arg, torch.Tensor) and element in _ELEMENTS.get(arg.dtype, ())
    return any(isinstance(arg, scalar) and parameter in names for scalar, names in _SCALARS.items())


class EmulatedKernel:
    """One instantiation of a kernel. A call returns when the launch has ended."""

    def __init__(self, library: ctypes.CDLL, index: int, name: str, launcher: "EmulatorLauncher") -> None:
        self._run = getattr(library, f"run_k{index}")
        self._error = library.emulator_error
        self._error.restype = ctypes.c_char_p
        self._prefetched = library.emulator_prefetched
        self._make_stacks = library.emulator_make_stacks
        self._make_stacks.restype = ctypes.c_void_p
        self._name = name
        self._launcher = launcher
        self.parameters: list[str] = []
        add = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._add_parameter)
        getattr(library, f"signature_k{index}")(add)

    def _add_parameter(self, spelling: bytes) -> None:
        found = re.search(r"T = (.*)\]$", spelling.decode())
        assert found, spelling
        self.parameters.append(found.group(1).strip())

    def prefetched(self) -> list[int]:
        """The addresses that kernels of the same library have prefetched since the last call."""
        room = (ctypes.c_size_t * (1 << 16))()
        count: int = self._prefetched(room, ctypes.c_size_t(len(room)))
        return room[:count]

    def _check(self, args: Sequence[Arg]) -> None:
        check_args(self._name, args)
        if len(args) != len(self.parameters):
            raise TypeError(f"{self._name}: {len(args)} arguments for {len(self.parameters)} parameters")
        for position, (parameter, arg) in enumerate(zip(self.parameters, args, strict=True)):
            if not fits(parameter, arg):
                kind = f"tensor of {arg.dtype}" if isinstance(arg, torch.Tensor) else type(arg).__name__
                raise TypeError(f"{self._name}: argument {position} is a {kind}, its parameter a {parameter}")
            if isinstance(arg, torch.Tensor) and arg.device.type != "cpu":
                raise TypeError(f"{self._name}: argument {position} lies on {arg.device}")

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Arg], shared_bytes: int = 0
    ) -> None:
        self._check(args)
        boxes = [_box(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(boxes))(*[ctypes.addressof(box) for box in boxes])
        three = ctypes.c_uint * 3
        seed = ctypes.c_uint(self._launcher.order_seed)
        try:
            stacks = _stacks.pop()
        except IndexError:  # not checked before: another thread may take the last one meanwhile
            stacks = self._make_stacks()
        sizes = three(*grid), three(*block), ctypes.c_size_t(shared_bytes)
        failed = self._run(*sizes, pointers, seed, ctypes.c_void_p(stacks))
        if stacks:
            _stacks.append(stacks)
        if failed:
            raise RuntimeError(f"{self._name}: {self._error().decode()}")


def _box(arg: Arg) -> ctypes.c_void_p | ctypes.Array[ctypes.c_char]:
    if arg is None or isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(0 if arg is None else arg.data_ptr())
    return ctypes.create_string_buffer(arg.tobytes(), 8)


class EmulatorLauncher:
    """Runs kernels on CPU tensors. `order_seed` determines the order in which warps, lanes and blocks run; 0 is
    ascending."""

    def __init__(
        self, order_seed: int = 0, sources: Path | None = None, multiprocessor_bytes: int = 228 * 1024
    ) -> None:
        self.order_seed = order_seed
        self.multiprocessor_bytes = multiprocessor_bytes
        self._sources = sources
        self._kernels: dict[tuple[str, str], EmulatedKernel] = {}

    def kernel(self, source: str, name: str) -> EmulatedKernel:
        if (source, name) not in self._kernels:
            if (kept := _loaded.get((self._sources, source, name))) is None:
                self.preload(source, [name])
                kept = _loaded[self._sources, source, name]
            library, index = kept
            self._kernels[source, name] = EmulatedKernel(library, index, name, self)
        return self._kernels[source, name]

    def preload(self, source: str, names: Iterable[str]) -> None:
        """Build those of these instantiations that are not in the cache, with one run of the compiler."""
        missing = [name for name in dict.fromkeys(names) if (self._sources, source, name) not in _loaded]
        if missing:
            library = ctypes.CDLL(str(_build(source, missing, self._sources)))
            _loaded.update({(self._sources, source, name): (library, i) for i, name in enumerate(missing)})


def check_orders(run: Callable[[EmulatorLauncher], torch.Tensor]) -> None:
    """Check that `run` gives the same bits in several orders of threads: a barrier that is missing shows in some."""
    first, *others = (run(EmulatorLauncher(order_seed)) for order_seed in range(4))
    assert all(torch.equal(first, other) for other in others)


_loaded: dict[tuple[Path | None, str, str], tuple[ctypes.CDLL, int]] = {}


@cache
def _compiler() -> tuple[str, str]:
    """The path of the compiler, and a line that differs between versions of it."""
    path = available()
    if path is None:
        raise RuntimeError("the emulator needs a C++ compiler: install g++ or set CXX")
    return path, subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout


def cache_folder() -> Path:
    """Folder of test builds; nobody else can write there."""
    default = Path(tempfile.gettempdir()) / f"vllm_lite-emulator-{os.getuid()}"
    folder = Path(os.environ.get("VLLM_LITE_EMULATOR_CACHE") or default)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to somebody else")
    return folder


def _build(source: str, names: Sequence[str], sources: Path | None) -> Path:
    path, version = _compiler()
    exports = "".join(f"EMULATED_KERNEL(k{index}, {name})\n" for index, name in enumerate(names))
    code = f'#include "{source}"\n{exports}'
    headers = [(file.name, file.read_text()) for file in sorted(EMULATOR.glob("*.h"))]
    material = [
        version,
        *FLAGS,
        code,
        *[part for file in (*headers, *compiler.read_sources(source, sources)) for part in file],
    ]
    key = hashlib.sha256("\0".join(material).encode()).hexdigest()
    target = cache_folder() / f"{Path(source).stem}-{key[:32]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            unit, built = Path(folder) / "unit.cpp", Path(folder) / "unit.so"
            unit.write_text(code)
            command = [path, *FLAGS, f"-I{EMULATOR}", f"-I{sources or compiler.source_folder()}", str(unit)]
            done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{source} does not compile for the emulator:\n{done.stderr[:4000]}")
            os.replace(built, target)
    return target


def source_in(text: str, folder: Path) -> Path:
    """Make `folder` a folder of sources: "test.cuh" with the kernels in `text`, and a copy of common.cuh."""
    (folder / "test.cuh").write_text('#include "common.cuh"\n' + text)
    shutil.copy(compiler.source_folder() / "common.cuh", folder)
    return folder
