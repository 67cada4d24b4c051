"""An engine is killed, frozen, and killed again under load: every stream continues with the tokens that it would have
had.

All tests use float32, where a token does not depend on the other requests of a step.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import patience
from tests.e2e.test_processes import START_S, Engine, assert_nothing_left, family, run_root, running, seconds_until
from tests.http_server import READY_S, Server, client, serving, until
from vllm_lite import AsyncClient, SamplingParams

__all__ = ["run_root"]

SILENCE_S = 1.5
LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
MIX = (
    SamplingParams(temperature=0.0, **LONG),
    SamplingParams(temperature=1.0, seed=7, n=4, **LONG),
    SamplingParams(temperature=0.7, seed=8, top_k=20, repetition_penalty=1.2, logprobs=2, **LONG),
    SamplingParams(temperature=0.0, prompt_logprobs=1, **LONG),
)
Tokens = list[list[int]]


async def read(client: AsyncClient, index: int, started: asyncio.Semaphore) -> Tokens:
    """The tokens of all samples of one request, as they were streamed."""
    params, tokens = MIX[index % len(MIX)], list[list[int]]()
    last = None
    async for output in client.generate([5 + index, 6, 7, 8], params):
        if last is None:
            started.release()
        last = output
    assert last is not None
    for sample in last.outputs:
        assert len(sample.token_ids) == params.max_tokens
        assert params.logprobs is None or len(sample.logprobs or ()) == params.max_tokens
        tokens.append(list(sample.token_ids))
    return tokens


async def load(address: str, disturb: Any = None) -> list[Tokens]:
    """Return the tokens of eight requests of two clients; `disturb` is called on a thread once all of them have a
    token."""
    async with AsyncClient(address) as one, AsyncClient(address) as other:
        started = asyncio.Semaphore(0)
        reading = [asyncio.ensure_future(read((one, other)[index % 2], index, started)) for index in range(8)]
        if disturb is not None:
            for _ in reading:
                await asyncio.wait_for(started.acquire(), START_S)
            await asyncio.to_thread(disturb)
        return await asyncio.wait_for(asyncio.gather(*reading), START_S)


def engine_of(pid: int) -> int | None:
    """The process of a launcher's engine; None while there is none."""
    for member in family(pid)[1:]:
        if "vllm_lite.engine.process" in command(member):
            return member
    return None


def workers_of(pid: int) -> list[int]:
    return [member for member in family(pid)[1:] if "vllm_lite.worker.process" in command(member)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def another(launcher: int, dead: int) -> int:
    """The engine that takes the place of a dead one."""
    seconds_until(lambda: engine_of(launcher) not in (None, dead), START_S, "another engine")
    found = engine_of(launcher)
    assert found is not None
    return found


class Trouble:
    """Disturbs the processes of a launcher, and records which ones it hit."""

    def __init__(self, engine: Engine) -> None:
        self.launcher, self.pids = engine.process.pid, family(engine.process.pid)

    def killed(self) -> None:
        os.kill(self._engine(), signal.SIGKILL)

    def frozen(self) -> None:
        os.kill(self._engine(), signal.SIGSTOP)

    def with_its_worker_stopped(self) -> None:
        """A stopped process does not look whether its parent is there."""
        for worker in workers_of(self.launcher):
            os.kill(worker, signal.SIGSTOP)
        self.killed()

    def killed_while_workers_are_replaced(self) -> None:
        for worker in workers_of(self.launcher):
            os.kill(worker, signal.SIGKILL)
        self.killed()

    def killed_again_while_it_starts(self) -> None:
        first = self._engine()
        os.kill(first, signal.SIGKILL)
        os.kill(another(self.launcher, first), signal.SIGKILL)

    def _engine(self) -> int:
        found = engine_of(self.launcher)
        assert found is not None
        return found


@pytest.fixture
def engine(run_root: Path, tiny_checkpoint: Path) -> Iterator[Engine]:
    started = Engine(tiny_checkpoint, "--dtype", "float32")
    yield started
    started.end()


@pytest.fixture
def frozen(run_root: Path, tiny_checkpoint: Path) -> Iterator[Engine]:
    """An engine whose launcher notices soon that it is silent."""
    started = Engine(tiny_checkpoint, "--heartbeat-timeout-s", str(patience(SILENCE_S)), "--dtype", "float32")
    yield started
    started.end()


async def test_streams_continue_when_their_engine_is_replaced(engine: Engine, frozen: Engine, run_root: Path) -> None:
    """Five engines of one launcher die, one after the other. Meanwhile a launcher of its own waits for a frozen one."""
    whole = await load(engine.address)
    trouble, seen = Trouble(engine), set(family(frozen.process.pid))
    waiting = asyncio.ensure_future(load(frozen.address, Trouble(frozen).frozen))
    for disturb in (
        trouble.killed,
        trouble.with_its_worker_stopped,
        trouble.killed_while_workers_are_replaced,
        trouble.killed_again_while_it_starts,
    ):
        seen |= set(family(engine.process.pid))
        assert await load(engine.address, disturb) == whole, disturb.__name__
    assert await waiting == whole, "frozen"
    for each in (engine, frozen):
        seen |= set(family(each.process.pid))
    assert len(seen) >= 2 + 2 * (5 + 2)  # the launchers, and engines with a worker each
    for each in (engine, frozen):
        each.process.send_signal(signal.SIGTERM)
        assert each.process.wait(START_S) == 0
    assert_nothing_left(list(seen), run_root)


def test_a_killed_launcher_leaves_nothing_even_after_a_recovery(engine: Engine, run_root: Path) -> None:
    os.kill(engine.engine_pid, signal.SIGKILL)
    found = another(engine.process.pid, engine.engine_pid)
    seconds_until(lambda: len(family(found)) > 1, START_S, "a worker, so that the engine has its settings")
    pids = family(engine.process.pid)
    engine.process.kill()
    engine.process.wait(START_S)
    assert_nothing_left(pids, run_root)


SCRIPT = """
import sys
from vllm_lite import LLM, SamplingParams
llm = LLM({model!r}, dtype="float32")
prompts = [[5 + index, 6, 7] for index in range(16)]
params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, ignore_eos=True)
for _ in range(2):
    outputs = llm.generate([{{"prompt_token_ids": prompt}} for prompt in prompts], params, use_tqdm=False)
    print([output.outputs[0].token_ids for output in outputs], flush=True)
"""


def test_generate_of_a_script_continues(run_root: Path, tiny_checkpoint: Path) -> None:
    code = SCRIPT.format(model=str(tiny_checkpoint))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    whole = process.stdout.readline()
    pids = family(process.pid)
    dead = engine_of(process.pid)
    assert dead is not None, process.communicate(timeout=START_S)[1]
    os.kill(dead, signal.SIGKILL)
    again = process.stdout.readline()
    rest, log = process.communicate(timeout=START_S)
    assert (again, rest, process.returncode) == (whole, "", 0), log
    assert f"the engine (pid {dead}) ended: killed by SIGKILL; life 2 of it starts" in log
    assert_nothing_left(pids, run_root)


BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "temperature": 0.0}


def test_streams_over_http_continue(run_root: Path, tiny_checkpoint: Path) -> None:
    """A stream and a plain answer, of two API servers; /health is not 200 while no engine answers."""
    with serving(str(tiny_checkpoint), "--dtype", "float32", "--api-server-count", "2") as server:
        whole = plain(server)
        dead = engine_of(server.process.pid)
        assert dead is not None
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(plain(server))) for _ in range(3)]
        with client(server) as http, http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            for thread in threads:
                thread.start()
            os.kill(dead, signal.SIGKILL)
            codes = health_until_another(server, dead)
            text = "".join(lines)
        for thread in threads:
            thread.join(START_S)
        assert answers == [whole] * len(threads)
        assert text.endswith("data: [DONE]")
        assert '"error"' not in text
        assert 503 in codes
        until(lambda: httpx.get(server.url + "/health").status_code == 200, "health")
        assert "Traceback" not in server.output
        pids = family(server.process.pid)
        assert server.stop() == 0
    assert_nothing_left(pids, run_root)


def plain(server: Server) -> str:
    with client(server) as http:
        answer = http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def health_until_another(server: Server, dead: int) -> list[int]:
    """Collect the states of /health from an engine's death until it is well again."""
    codes, deadline_s = list[int](), time.monotonic() + READY_S
    seconds_until(lambda: not running(dead), START_S, "the end")
    while not codes or codes[-1] != 200 or 503 not in codes:
        assert time.monotonic() < deadline_s, codes[-5:]
        codes.append(httpx.get(server.url + "/health").status_code)
    return codes
