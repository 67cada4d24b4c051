"""An event that poll() can watch: how threads and signal handlers reach a loop that waits for messages."""

import os
import signal
from contextlib import suppress


class Wakeup:
    """Like threading.Event, but with a file descriptor that is readable while it is set."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._set = False

    def set(self) -> None:
        """Safe from any thread and from a signal handler, also after close()."""
        self._set = True
        fd = self._fd
        if fd >= 0:
            with suppress(OSError):  # closed by another thread in between
                os.eventfd_write(fd, 1)

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        """Call this before you look at what the wakeup announces, or a set() in between is lost."""
        self._set = False
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def pollables(self) -> tuple[int, ...]:
        return (self._fd,)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SignalWakeup(Wakeup):
    """One for signal handlers to set. To be made once, by the main thread, before loops that have their own way.

    CPython runs handlers in the main thread. The kernel may give a signal to any other, which happens to a process that
    was stopped; then it would be noticed when the main thread's poll ends for another reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pipe, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # a byte for every signal with a handler

    def pollables(self) -> tuple[int, ...]:
        return (*super().pollables(), self._pipe)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._pipe, 4096)
        super().clear()
