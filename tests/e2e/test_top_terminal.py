"""`vllm-lite top` in a real terminal, tmux: it fits, follows a resize, ends by `q`, and outlives its server."""

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.http_server import Server, client, serving

TMUX = shutil.which("tmux")
pytestmark = pytest.mark.skipif(TMUX is None, reason="tmux is not installed")
SIZES = [(80, 24), (40, 12), (20, 6), (250, 70)]


class Terminal:
    """A terminal of a given size that runs a command."""

    def __init__(self, command: list[str], columns: int, lines: int, **env: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vl-")
        shell = " ".join(f"{name}={value}" for name, value in env.items())
        words = f"{shell} {' '.join(command)}; echo ended with $?; sleep 1000"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines), words)

    def _tmux(self, *words: str) -> str:
        run = [TMUX or "tmux", "-S", f"{self._folder.name}/tmux", *words]
        return subprocess.run(run, capture_output=True, text=True, check=True, timeout=scaled(30)).stdout

    def type(self, keys: str) -> None:
        self._tmux("send-keys", keys)

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def text(self, *flags: str) -> str:
        return self._tmux("capture-pane", "-p", *flags)

    def until(self, condition: Callable[[str], object], *flags: str) -> str:
        """Wait until `condition` holds, and return the screen's text."""
        deadline_s = time.monotonic() + scaled(60)
        while not condition(text := self.text(*flags)):
            assert time.monotonic() < deadline_s, text
            time.sleep(0.05)  # between two looks
        return text

    def close(self) -> None:
        self._tmux("kill-server")
        self._folder.cleanup()


@contextmanager
def top(url: str, columns: int = 80, lines: int = 24, **env: str) -> Iterator[Terminal]:
    terminal = Terminal([sys.executable, "-m", "vllm_lite", "top", "--url", url], columns, lines, **env)
    try:
        yield terminal
    finally:
        terminal.close()


@contextmanager
def asking_on(server: Server, body: dict[str, Any]) -> Iterator[None]:
    """Have a request again as soon as it has ended: a quick machine computes one between two looks."""
    is_over = threading.Event()

    def ask() -> None:
        with client(server) as http:
            while not is_over.is_set():
                assert http.post("/v1/completions", json=body).status_code == 200

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            is_over.set()
        asked.result(timeout=scaled(60))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--num-gpu-blocks-override", "200", "--max-num-seqs", "2") as running:
        yield running


def test_top_fits_the_terminal_and_follows_a_resize(server: Server) -> None:
    with top(server.url, COLUMNS="80", LINES="24") as terminal:
        for columns, lines in SIZES:
            terminal.resize(columns, lines)
            room = re.compile("^demo_model  serving" + (".*nothing to compute" if columns >= 60 else ".{0,20}…"))
            shown = terminal.until(room.match).rstrip("\n").splitlines()
            assert len(shown) <= lines
            assert max(map(len, shown)) <= columns
        text = "\n".join(shown)
        assert "of 199 KV blocks" in text
        assert "request" in text
        terminal.type("q")
        terminal.until(lambda text: "ended with 0" in text)


def test_requests_are_there_at_80_columns(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "request_id": "mine"}
    with top(server.url) as terminal:
        terminal.until(lambda text: "KV blocks" in text)
        with asking_on(server, body):
            text = terminal.until(lambda text: "cmpl-mine" in text)
            [row] = [line for line in text.splitlines() if "cmpl-mine" in line]
            assert row.split()[:3] == ["cmpl-mine", "running", "5"], row
            assert re.search(r"step \d+: 1 sequences", text), text


@pytest.mark.parametrize("key", ["Q", "C-c", "C-d"])
def test_top_ends_on_its_keys_and_restores_the_terminal(server: Server, key: str) -> None:
    with top(server.url) as terminal:
        terminal.until(lambda text: "KV blocks" in text)
        terminal.type("x")
        terminal.type(key)
        text = terminal.until(lambda text: "ended with" in text)
        assert "ended with 0" in text
        assert "Traceback" not in text
        assert "KV blocks" not in text, "the terminal has its own picture again"


def test_without_colours(server: Server) -> None:
    with top(server.url, NO_COLOR="1") as terminal:
        text = terminal.until(lambda text: "KV blocks" in text, "-e")
        assert not re.search(r"\x1b\[(3[0-7]|4[0-7]|9[0-7]|[34]8;)", text)
    with top(server.url, TERM="dumb") as terminal:
        text = terminal.until(lambda text: "ended with 0" in text, "-e")
        assert "KV blocks" in text, "a terminal that cannot be drawn on gets one look"


def test_a_server_that_ends_and_returns() -> None:
    with serving(light=True) as first:
        port = first.url.rpartition(":")[2]
        with top(first.url) as terminal:
            terminal.until(lambda text: "demo_model  serving" in text)
            assert first.stop() == 0
            terminal.until(lambda text: "trying again (q ends)" in text)
            second = Server("--port", port, light=True)
            try:
                second.wait_for("Try:")
                terminal.until(lambda text: "demo_model  serving" in text and "trying again" not in text)
            finally:
                second.close()
    command = [sys.executable, "-m", "vllm_lite", "top", "--url", first.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 2
    assert "no server answers at" in done.stderr
