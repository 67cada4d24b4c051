"""Input and output of a chat: a terminal with history and Ctrl-C, or a pipe, which gets only the answers."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from vllm_lite.tools.chat.word_wrap import WordWrap

MAX_HISTORY = 1000
_VISIBLE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {13: None}
"""Replacements of control characters: a model's text must not control the terminal."""
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


class Terminal:
    """A chat's screen and keyboard. Answers go to stdout, everything else to stderr."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        """Whether a user is typing: prompts and remarks are shown, lines are edited and stored."""
        self._has_colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._safe_out = sys.stdout.isatty()
        self._history = _History() if self.is_interactive else None
        self._at_line_start = True
        self._is_dim = False
        self._wrap = WordWrap()

    # ---- input

    def read(self, prompt: str) -> str | None:
        """Read a line, without its end; None at the end of input. Raises KeyboardInterrupt on a terminal."""
        if self._history is None:
            line = sys.stdin.readline()
            return line.removesuffix("\n").removesuffix("\r") if line else None
        if self._has_colors:
            prompt = f"\x01{_BOLD}\x02{prompt}\x01{_PLAIN}\x02"  # readline does not count characters between \1 and \2
        try:
            line = input(prompt)
        except EOFError:
            self._line("\n", sys.stderr)
            return None
        self._history.add(line)
        return line

    # ---- output

    def write(self, text: str, *, dim: bool = False) -> None:
        if dim and not self.is_interactive:
            return
        shown = text.translate(_VISIBLE) if self._safe_out else text
        if dim is not self._is_dim and not self._at_line_start:
            self._line("\n", sys.stdout)  # reasoning and answer are on separate lines
        self._is_dim = dim
        if self.is_interactive:
            if self._at_line_start:
                self._wrap = WordWrap()
            shown = self._wrap.feed(shown, shutil.get_terminal_size().columns)
        if dim and self._has_colors:
            shown = f"{_DIM}{shown}{_PLAIN}"
        self._line(shown, sys.stdout)
        self._at_line_start = text.endswith("\n")

    def end(self) -> None:
        """End an answer, on a terminal with an empty line."""
        self._line(("" if self._at_line_start else "\n") + "\n" * self.is_interactive, sys.stdout)
        self._at_line_start = True

    def note(self, text: str) -> None:
        if not self._at_line_start:
            self._line("\n", sys.stdout)
            self._at_line_start = True
        shown = text.translate(_VISIBLE)
        self._line((f"{_DIM}{shown}{_PLAIN}" if self._has_colors and sys.stderr.isatty() else shown) + "\n", sys.stderr)

    @staticmethod
    def _line(text: str, file: object) -> None:
        print(text, end="", file=file, flush=True)  # type: ignore[call-overload]

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block in which only the first Ctrl-C counts: later ones would interrupt the cleanup after the first."""
        pressed = False

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            if not pressed:
                pressed = True
                signal.default_int_handler(number, frame)

        before = signal.signal(signal.SIGINT, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class _History:
    """The lines typed in all chats of this user, in a file that only they can read."""

    def __init__(self) -> None:
        self._path = history_path()
        try:
            import readline
        except ImportError:  # a Python without readline
            self._readline = None
            return
        self._readline = readline
        readline.set_auto_history(False)
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
            os.chmod(self._path, 0o600)
            readline.read_history_file(self._path)
            if readline.get_current_history_length() > MAX_HISTORY:
                readline.set_history_length(MAX_HISTORY)
                readline.write_history_file(self._path)
                os.chmod(self._path, 0o600)

    def add(self, line: str) -> None:
        if self._readline is None or not line.strip():
            return
        count = self._readline.get_current_history_length()
        if count and self._readline.get_history_item(count) == line:
            return
        self._readline.add_history(line)
        with suppress(OSError):
            self._readline.append_history_file(1, self._path)


def history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "vllm-lite" / "chat_history"
