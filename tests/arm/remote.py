"""The library of csrc/cpu for another architecture, in an emulated process that reads and writes this one's memory.

The plugin beside this file puts it in place of this machine's library, so that tests of kernels run unchanged:

    make arm
    VLLM_LITE_GUEST_CPU=cortex-a72 python -m pytest -p tests.arm.plugin tests/cpu/test_native_linear.py

Functions that take file descriptors, or memory that processes share, cannot be called.
"""

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

FOLDER = Path(__file__).parents[2] / "build" / "aarch64"
LIBRARY, GUEST = FOLDER / "libvllm_lite_cpu.so", FOLDER / "guest"
EMULATOR = "qemu-aarch64"
SYSTEM = Path("/usr/aarch64-linux-gnu")
"""Folder of the cross compiler's C library."""
MASKS = {ctypes.c_int32: 0xFFFF_FFFF, ctypes.c_int64: -1, ctypes.c_void_p: -1}


def missing() -> str | None:
    """A sentence that names the first thing missing on this machine; None if the library can run."""
    if shutil.which(EMULATOR) is None:
        return f"needs {EMULATOR} (Debian: qemu-user)"
    if not (LIBRARY.exists() and GUEST.exists()):
        return f"needs {LIBRARY.name} for aarch64, which `make arm` builds"
    return None


class Remote:
    """The library, with the interface of a ctypes library."""

    def __init__(self, cpu: str) -> None:
        self._lock = Lock()
        while True:
            self._process = self._started(cpu)
            if not _overlap(self._process.pid):
                break
            self.close()

    def _started(self, cpu: str) -> subprocess.Popen[bytes]:
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        command = [EMULATOR, "-cpu", cpu, "-L", str(SYSTEM), str(GUEST), str(LIBRARY), str(memory)]
        try:
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[memory])
        finally:
            os.close(memory)
        self._send_to(process, _name("vllm_lite_abi"))  # after the answer it has mapped all of its memory
        return process

    def close(self) -> None:
        self._process.communicate()

    def __getattr__(self, name: str) -> "RemoteFunction":
        address = self.send(_name(name))
        if address == 0:
            raise AttributeError(name)
        return RemoteFunction(self, address)

    __getitem__ = __getattr__

    def send(self, request: bytes) -> int:
        return self._send_to(self._process, request)

    def _send_to(self, process: subprocess.Popen[bytes], request: bytes) -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            process.stdin.write(request)
            process.stdin.flush()
            answer = process.stdout.read(8)
        if len(answer) != 8:
            raise RuntimeError(f"the emulated process ended with {process.wait()}")
        return int(struct.unpack("<q", answer)[0])


class RemoteFunction:
    def __init__(self, remote: Remote, address: int) -> None:
        self._remote, self._address = remote, address
        self._as_parameter_ = ctypes.c_void_p(address)
        self.argtypes: Sequence[Any] = ()
        self.restype: Any = ctypes.c_int32

    def __call__(self, *args: Any) -> Any:
        given = list(zip(self.argtypes, args, strict=True))
        ints = [(value or 0) & 0xFFFF_FFFF_FFFF_FFFF for kind, value in given if kind is not ctypes.c_float]
        floats = [value for kind, value in given if kind is ctypes.c_float]
        head = (self._address, len(ints), len(floats))
        answer = self._remote.send(struct.pack(f"<{3 + len(ints)}Q{len(floats)}f", *head, *ints, *floats))
        return None if self.restype is None else self.restype(answer & MASKS[self.restype]).value


def _name(name: str) -> bytes:
    return struct.pack("<QQ", 0, len(name)) + name.encode()


def _overlap(process: int) -> bool:
    """Whether its memory, the emulator's own included, has addresses that our memory has, too: they could not be told
    apart."""
    ours, its = _mapped(os.getpid()), _mapped(process)
    return any(a < d and c < b for a, b in ours for c, d in its)


def _mapped(process: int) -> list[tuple[int, int]]:
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    parts = [line.split()[0].split("-") for line in lines if "[vsyscall]" not in line]
    return [(int(first, 16), int(end, 16)) for first, end in parts]
