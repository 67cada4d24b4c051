"""Short time slices for threads that pass messages on, so that they need not wait for threads that compute.

A thread that wakes up on a CPU which computes waits until the time slice of the running thread ends, after some
milliseconds, unless its own slice is shorter. Linux has slices of a thread's own since 6.12, and before that ignores
the request.
"""

import ctypes
import platform
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

SHORTEST_NS = 100_000
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of the system calls sched_setattr and sched_getattr, by architecture."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period."""
_SHARED = (0, 3)
"""The policies with slices: SCHED_OTHER and SCHED_BATCH."""


def shorten_slice() -> None:
    """Give the calling thread, and threads and processes that it starts later, the shortest slice."""
    _set_slice(SHORTEST_NS)


def reset_slice() -> None:
    """Give the calling thread the default slice."""
    _set_slice(0)


def short_slices() -> AbstractContextManager[None]:
    """Give threads that start inside the shortest slice, and the calling one its own again afterwards."""
    return _slices(SHORTEST_NS)


def usual_slices() -> AbstractContextManager[None]:
    """Give processes that start inside the default slice, and the calling thread its own again afterwards."""
    return _slices(0)


@contextmanager
def _slices(slice_ns: int) -> Iterator[None]:
    before_ns = _set_slice(slice_ns)
    try:
        yield
    finally:
        _set_slice(before_ns)


def _set_slice(slice_ns: int) -> int:
    """Set the slice of the calling thread, 0 for the default. Returns the previous one, 0 if it is not known."""
    if platform.machine() not in _CALLS:
        return 0
    (set_attributes, get_attributes), call = _CALLS[platform.machine()], ctypes.CDLL(None).syscall
    memory = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(get_attributes, 0, memory, len(memory), 0):
        return 0
    before_ns: int
    _, policy, flags, nice, priority, before_ns, *rest = _ATTRIBUTES.unpack(memory.raw)
    if policy in _SHARED:
        values = _ATTRIBUTES.pack(len(memory), policy, flags, nice, priority, slice_ns, *rest)
        call(set_attributes, 0, values, 0)
    return before_ns
