"""A really running server, `python -m vllm_lite serve`, for the tests that speak HTTP to it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tests import fork_server
from tests.deadlines import scaled
from vllm_lite.client.engines.session import Session

READY_S = scaled(60.0)
END_S = scaled(60.0)
DEADLINE_S = scaled(60.0)


class Server:
    """A started server. `output` is all it has printed. A `light` one has workers without a model, which start at
    once. The processes of a `fresh` one are new interpreters, others are forked in tests/e2e (fork_server.py)."""

    def __init__(
        self, *flags: str, env: dict[str, str] | None = None, light: bool = False, fresh: bool = False
    ) -> None:
        self.output = ""
        module = ["-m", *(["tests.e2e.light"] if light else []), "vllm_lite"]
        self._lines = threading.Condition()
        popen = subprocess.Popen if fresh else fork_server.Popen
        self.process = popen(
            [sys.executable, *module, "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Once it is ready."""
        match = re.search(r"ready at (\S+),", self.output)
        assert match, self.output
        return match.group(1)

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + READY_S
        with self._lines:
            while text not in self.output:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"{text!r} was not printed in {READY_S:.0f} s: {self.output}"
                assert self._reader.is_alive(), f"{text!r} was never printed: {self.output}"
                self._lines.wait(min(left_s, 1.0))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end. Returns the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(END_S)
        self._reader.join(END_S)
        return status

    def close(self) -> None:
        """The end, whatever was before."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(END_S)
        self._reader.join(END_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._lines:
                self.output += line
                self._lines.notify_all()
        with self._lines:
            self._lines.notify_all()


@contextmanager
def serving(*flags: str, template: str | None = None, ready: bool = True, **settings: Any) -> Iterator[Server]:
    """A server of the demo model on a free port, ended with the block. `template`: the text of a chat template;
    `settings` as for Server. Its workers may be killed, but none may fail by itself: streams go on with new workers, so
    that a test would not notice."""
    with ExitStack() as stack:
        if template is not None:
            file = Path(stack.enter_context(TemporaryDirectory())) / "chat.jinja"
            file.write_text(template)
            flags += "--chat-template", str(file)
        server = Server(*flags, "--port", "0", **settings)
        stack.callback(server.close)
        if ready:
            server.wait_for("ready at")
            server.wait_for("Try:")
        yield server
    fault = re.search(r"worker \d+ failed: .*", server.output)
    assert fault is None, fault


def until(condition: Callable[[], bool], what: str, most_s: float = DEADLINE_S) -> None:
    """Wait until `condition()` holds; fail after `most_s`."""
    deadline_s = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come in {most_s:.0f} s"
        time.sleep(0.01)  # between two looks


def client(server: Server, **settings: object) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=DEADLINE_S, **settings)  # type: ignore[arg-type]


def post(http: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    """The answer as JSON, which is to have this status."""
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@contextmanager
def engine_of(server: Server) -> Iterator[Session]:
    """A client of its engine beside HTTP; the server was started with --address."""
    args = server.process.args
    assert isinstance(args, list)
    session = Session.connect(str(args[args.index("--address") + 1]))
    try:
        yield session
    finally:
        session.close()


def children(pid: int) -> dict[str, int]:
    """Pids of the engine and the workers below a server, by module."""
    import psutil

    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        words = child.cmdline()
        if "-m" in words:
            module = words[words.index("-m") + 1].removesuffix("_early")
            found["vllm_lite.worker.process" if module == "tests.e2e.light_worker" else module] = child.pid
    return found


def short_socket(folder: Path) -> str:
    """An ipc address in `folder`, whose path is short enough."""
    return f"ipc://{folder}/e"


ANIMAL: dict[str, Any] = {
    "type": "object",
    "properties": {"animal": {"enum": ["bear", "fox"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["animal", "age"],
    "additionalProperties": False,
}
"""A JSON schema of tools' arguments and of answers."""
