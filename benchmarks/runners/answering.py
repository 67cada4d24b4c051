"""Answers one prompt at a time over pipes, for benchmarks/speculation.py, with an engine in any Python environment.

A line of standard input is {"prompt": [token ids], "n": tokens}; its answer is {"tokens": [...], "took_s": seconds,
"drafted": tokens, "right": tokens}. The first line that is written says what the engine is. Only the standard library
is imported here.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

HERE = Path(__file__).resolve().parent
ENDS_IN_S = 20
"""Seconds in which a peer has to end after its last request."""


class Answer(NamedTuple):
    """Tokens that an engine generated, and numbers of drafts, if it reports them."""

    tokens: list[int]
    drafted: int = 0
    right: int = 0


class Answering(Protocol):
    """An engine in a peer's Python."""

    info: dict[str, Any]

    def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        """Continue the prompt greedily by exactly `num_tokens` tokens."""


def serve(engine: Answering) -> None:
    """Answer until standard input ends. Output of libraries does not mix with the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(engine.info), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        answer = engine.answer(asked["prompt"], asked["n"])
        took_s = time.perf_counter() - began
        print(json.dumps({**answer._asdict(), "took_s": took_s}), file=answers, flush=True)


class Peer:
    """An engine that answers in its own process."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            pipe = subprocess.PIPE
            child = subprocess.Popen(command, cwd=HERE.parent, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        if child.stdin is None or child.stdout is None:
            raise SystemExit("a peer has no pipes")
        self._child, self._asked, self._answers = child, child.stdin, child.stdout
        self.info = self._read()

    def ask(self, prompt: list[int], num_tokens: int) -> tuple[float, Answer]:
        """Ask for an answer. Returns its seconds and the answer."""
        self._asked.write(json.dumps({"prompt": prompt, "n": num_tokens}) + "\n")
        self._asked.flush()
        answer = self._read()
        return answer["took_s"], Answer(answer["tokens"], answer["drafted"], answer["right"])

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"a peer ended with status {self._child.wait()}:\n{self._log.read_text()[-2000:]}")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process by closing its standard input; kill it if this takes too long."""
        self._asked.close()
        try:
            self._child.wait(ENDS_IN_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
