"""Shows a server's engines in a terminal until `q` or Ctrl-C, also while the server is unreachable."""

import os
import queue
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from vllm_lite.errors import RemoteError
from vllm_lite.tools.chat.remote_server import Address
from vllm_lite.tools.top.screen import plain, screen
from vllm_lite.tools.top.watched import ServerLook, follow, take

AGAIN_S = 1.0
KEYS_S = 0.1
"""Interval at which keys, events and the terminal's size are checked."""
FIRST_S = 60.0
QUIT = b"qQ\x03\x04"


class Follower(threading.Thread):
    """Reads a server's events in a thread, reconnecting, and puts them, or errors, into `found`."""

    def __init__(self, address: Address, api_key: str | None, model: str | None) -> None:
        super().__init__(name="follower", daemon=True)
        self.found: queue.Queue[tuple[str, Any] | RemoteError] = queue.Queue(maxsize=64)
        self._asked = address, api_key, model

    def run(self) -> None:
        while True:
            try:
                for found in follow(*self._asked):
                    self.found.put(found)
            except RemoteError as error:
                self.found.put(error)
            time.sleep(AGAIN_S)


class ServerPicture:
    """The picture of a server, with the error if the server is unreachable."""

    def __init__(self, follower: Follower) -> None:
        self._found = follower.found
        self._look = ServerLook()
        self._trouble: str | None = None
        self.num_changes = 0

    def wait(self) -> None:
        """Wait for the first event. Raises RemoteError if there is none."""
        try:
            self._take(self._found.get(timeout=FIRST_S))
        except queue.Empty as error:
            raise RemoteError("the server does not answer") from error
        if self._trouble is not None:
            raise RemoteError(self._trouble)

    def catch_up(self) -> None:
        """Process all events received so far."""
        with suppress(queue.Empty):
            while True:
                self._take(self._found.get_nowait())

    def draw(self, num_lines: int, num_columns: int) -> RenderableType:
        if self._trouble is None:
            return screen(self._look, num_lines, num_columns)
        said = Text(plain(f"{self._trouble}; trying again (q ends)"), style="bold", no_wrap=True, overflow="ellipsis")
        return Group(said, screen(self._look, num_lines - 1, num_columns))

    def _take(self, found: tuple[str, Any] | RemoteError) -> None:
        if isinstance(found, RemoteError):
            self._trouble = str(found)
            self.num_changes += 1
            return
        take(self._look, *found)
        self._trouble = None
        self.num_changes += self._look.is_whole


def show(address: Address, api_key: str | None, model: str | None) -> None:
    """Draw each state over the one before. Raises RemoteError if there is no server at the start."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)  # a size once exported by a shell, which no resize changes
    console = Console(highlight=False)
    follower = Follower(address, api_key, model)
    follower.start()
    shown = ServerPicture(follower)
    shown.wait()
    drawn = None
    with (
        suppress(KeyboardInterrupt),
        keys() as descriptor,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not is_over(descriptor):
            shown.catch_up()
            size = console.size
            if (now := (shown.num_changes, size)) != drawn:
                live.update(shown.draw(size.height, size.width), refresh=True)
                drawn = now


@contextmanager
def keys() -> Iterator[int | None]:
    """A block in which keys are read one at a time, without echo. Yields the terminal's descriptor; None if stdin is no
    terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def is_over(descriptor: int | None) -> bool:
    """Wait KEYS_S for a key. Returns whether to quit: by a key, or as the terminal is gone."""
    if descriptor is None:
        time.sleep(KEYS_S)
        return False
    readable, _, _ = select.select([descriptor], [], [], KEYS_S)
    if not readable:
        return False
    typed = os.read(descriptor, 1024)
    return not typed or any(key in QUIT for key in typed)
