"""Runs a program in a pseudo terminal: reads its output, and types text and Ctrl-C."""

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.deadlines import scaled

WAIT_S = scaled(60.0)
END_S = scaled(60.0)
CTRL_C, CTRL_D = "\x03", "\x04"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x01\x02]")


class Typist:
    """A user at the terminal. `shown`: all output of the program, without colours and with plain line ends."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        self._raw = b""
        self._at = 0
        self._changed = threading.Condition()
        self._keyboard, program = pty.openpty()  # the terminal of a new session, so that its Ctrl-C is this program's
        termios.tcsetwinsize(program, (50, 500))  # so that no line is broken into two
        inherited = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm_lite", *words],
            stdin=program,
            stdout=program,
            stderr=program,
            env={**inherited, "TERM": "xterm", **(env or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,  # noqa: PLW1509 - one system call
        )
        os.close(program)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def shown(self) -> str:
        return _ESCAPES.sub("", self._raw.decode(errors="replace")).replace("\r", "")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for `pattern` in the text after the last match; the next search begins after this one."""
        deadline_s = time.monotonic() + WAIT_S
        with self._changed:
            while (match := re.compile(pattern).search(self.shown, self._at)) is None:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"{pattern!r} was not shown in {WAIT_S:.0f} s: {self.shown[self._at :]!r}"
                assert self._reader.is_alive(), f"{pattern!r} was never shown: {self.shown[self._at :]!r}"
                self._changed.wait(min(left_s, 1.0))
        self._at = match.end()
        return match

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def interrupt(self) -> None:
        """Type Ctrl-C once the program waits for a key. Between two waits CPython's readline loop would keep the signal
        until the next key."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        deadline_s = time.monotonic() + WAIT_S
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "S":
            assert time.monotonic() < deadline_s, "the program never waits for a key"
            time.sleep(0.001)
        self.type(CTRL_C)

    def say(self, line: str) -> None:
        """Type a line, and wait until the terminal has echoed it."""
        self.type(line + "\n")
        self.wait_for(re.escape(line) + "\n")

    def wait(self) -> int:
        status = self.process.wait(END_S)
        self._reader.join(END_S)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(END_S)
        self._reader.join(END_S)
        os.close(self._keyboard)

    def _read(self) -> None:
        with suppress(OSError):  # EIO: the program has closed its side
            while data := os.read(self._keyboard, 4096):
                with self._changed:
                    self._raw += data
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


@contextmanager
def typing(*words: str, env: dict[str, str] | None = None) -> Iterator[Typist]:
    typist = Typist(*words, env=env)
    try:
        yield typist
    finally:
        typist.close()
