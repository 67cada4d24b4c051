"""An event that poll() can watch, by which threads and signal handlers wake a loop that waits for messages."""

import os
import signal
from contextlib import suppress


class Wakeup:
    """Like threading.Event, but with a file descriptor that is readable while it is set."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._set = False

    def set(self) -> None:
        """Safe from any thread and signal handler, also after close()."""
        self._set = True
        fd = self._fd
        if fd >= 0:
            with suppress(OSError):  # closed by another thread in between
                os.eventfd_write(fd, 1)

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        """Call it before reading what the wakeup announces; otherwise a set() in between is lost."""
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
    """A Wakeup for signal handlers to set. To be made once, by the main thread, before other event loops start.

    CPython runs handlers in the main thread, but the kernel may deliver a signal to another thread, as happens to a
    process that was stopped; without this, the main thread would handle it only when its poll ends for another reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pipe, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # one byte for every signal with a handler

    def pollables(self) -> tuple[int, ...]:
        return (*super().pollables(), self._pipe)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._pipe, 4096)
        super().clear()
