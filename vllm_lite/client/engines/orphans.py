"""Children of killed children: they end by themselves, but that takes a moment.

The last argument of a child is its parent's pid (runtime/supervise.py), so it can be found after the parent has ended.
"""

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GONE_S = 5.0
"""Timeout for the kernel to end a killed process with much memory."""


def end_children_of(pid: int, timeout_s: float = GONE_S) -> int:
    """Kill the children that the dead process `pid` had started with supervise.spawn(), and wait until they have ended
    and their memory is free. Returns the number that still exist after `timeout_s`."""
    watch = select.poll()
    fds = [fd for child in children_of(pid) if (fd := _killed(child, pid)) is not None]
    try:
        for fd in fds:
            watch.register(fd, select.POLLIN)
        left, deadline_s = len(fds), time.monotonic() + timeout_s
        while left and (left_s := deadline_s - time.monotonic()) > 0:
            for fd, _ in watch.poll(1000 * left_s):
                watch.unregister(fd)
                left -= 1
        return left
    finally:
        for fd in fds:
            os.close(fd)


def children_of(pid: int) -> Iterator[int]:
    """Pids of the running children that the process `pid`, dead or alive, had started with supervise.spawn()."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_child(int(entry.name), pid):
            yield int(entry.name)


def _is_child(child: int, pid: int) -> bool:
    """Whether a process of this user was started as `python -P -m MODULE PIPE PID`."""
    try:
        if os.stat(f"/proc/{child}").st_uid != os.getuid():
            return False
        arguments = Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return False
    return len(arguments) == 6 and arguments[1:3] == [b"-P", b"-m"] and arguments[5] == b"%d" % pid


def _killed(child: int, pid: int) -> int | None:
    """Kill `child` through its pidfd, and return that; None if it has ended. The command line is checked again, as its
    number may belong to another process by now."""
    with suppress(OSError):
        fd = os.pidfd_open(child)
        try:
            if _is_child(child, pid):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                return fd
        except ProcessLookupError:
            pass
        os.close(fd)
    return None
