"""Processes die in every way: which process notices, how fast, with which error, and that nothing is left.

Nothing is restarted here; restarts and recovered streams are tested in test_engine_recovery.py and others. The limits
are those promised for an idle machine: clients get an error within 2 s, orphans are gone within 5.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.deadlines import patience, scaled
from tests.unit.test_time_slice import skip_without_slices, slice_of
from vllm_lite import AsyncClient, RequestOutput, SamplingParams
from vllm_lite.errors import EngineDeadError
from vllm_lite.transport.time_slice import SHORTEST_NS

START_S = scaled(60.0)
TOLD_S, GONE_S, SILENCE_S = 2.0, 5.0, 1.5
"""On an idle machine. What is as short is scaled where it is used: a file is imported long before its tests run."""
ROOT = Path(__file__).resolve().parent.parent.parent
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def run_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short TMPDIR for every process of the test, empty again at its end."""
    folder = tempfile.mkdtemp(prefix="t", dir="/tmp")
    monkeypatch.setenv("TMPDIR", folder)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


class Engine:
    """scripts/launch_engine.py as a user would run it. Workers of a `light` one have no model: they start at once."""

    silence_s = 0.0
    """The --heartbeat-timeout-s that it was started with: the machine may be quieter when it is over."""

    def __init__(self, model: Path | str, *flags: str, light: bool = False) -> None:
        command = [sys.executable, *(["-m", "tests.e2e.light"] if light else [])]
        command += [str(ROOT / "scripts/launch_engine.py"), "--model", str(model), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=START_S)[1]
        self.ready: dict[str, Any] = json.loads(line)
        self.address: str = self.ready["address"]
        self.engine_pid, self.worker_pid = family(self.process.pid)[1:3]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        print(self.process.communicate(timeout=START_S)[1])  # its log, shown if the test fails


@pytest.fixture
def engine(run_root: Path, tiny_checkpoint: Path) -> Iterator[Engine]:
    silence_s = patience(SILENCE_S)
    flags = "--heartbeat-timeout-s", str(silence_s), "--max-restarts", "0"
    started = Engine(tiny_checkpoint, *flags, light=True)
    started.silence_s = silence_s
    yield started
    started.end()


def family(pid: int) -> list[int]:
    """`pid` and its descendants, oldest first, without those that only fork others."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            if name.endswith(f"({fork_server.NAME}"):
                continue
            parent = int(rest.split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += sorted(children.get(member, []))
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def seconds_until(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, f"{what} not within {limit_s} s"
        time.sleep(0.01)
    return time.monotonic() - start


def assert_nothing_left(pids: list[int], run_root: Path) -> None:
    seconds_until(lambda: not any(map(running, pids)), scaled(GONE_S), "all processes gone")
    seconds_until(lambda: not any(run_root.iterdir()), scaled(GONE_S), f"files gone: {list(run_root.iterdir())}")


async def consume(client: AsyncClient, prompt: list[int], started: asyncio.Semaphore | None = None) -> RequestOutput:
    last = None
    async for output in client.generate(prompt, ENDLESS):
        if last is None and started is not None:
            started.release()
        last = output
    assert last is not None
    return last


async def kill_while_streaming(
    engine: Engine, kill: Callable[[], None], num_streams: int = 20
) -> tuple[float, list[Any]]:
    """Start streams, wait until each has a token, kill; seconds until the last stream has ended, and how each did."""
    async with AsyncClient(engine.address) as client:
        started = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(consume(client, [5 + index, 6, 7], started)) for index in range(num_streams)]
        for _ in range(num_streams):
            await asyncio.wait_for(started.acquire(), START_S)
        kill()
        start = time.monotonic()
        results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), START_S)
        return time.monotonic() - start, results


@pytest.mark.parametrize("victim", ["worker", "engine"])
async def test_killed_child_ends_every_stream_with_one_clear_error(engine: Engine, run_root: Path, victim: str) -> None:
    pids = family(engine.process.pid)
    pid = engine.worker_pid if victim == "worker" else engine.engine_pid
    told_s, results = await kill_while_streaming(engine, lambda: os.kill(pid, signal.SIGKILL))
    assert told_s < scaled(TOLD_S)
    assert all(isinstance(result, EngineDeadError) for result in results), results
    if victim == "worker":
        assert f"worker 0 (pid {pid}) died: killed by SIGKILL" in str(results[0])
    assert engine.process.wait(scaled(GONE_S)) == 1
    assert_nothing_left(pids, run_root)


async def test_frozen_worker_is_reported(engine: Engine, run_root: Path) -> None:
    pids = family(engine.process.pid)
    told_s, results = await kill_while_streaming(engine, lambda: os.kill(engine.worker_pid, signal.SIGSTOP), 3)
    assert told_s < engine.silence_s + scaled(TOLD_S) + 1
    assert all(isinstance(result, EngineDeadError) and "worker 0" in str(result) for result in results), results
    assert_nothing_left(pids, run_root)


async def test_killed_launcher_leaves_no_orphan_and_no_answer_that_looks_whole(engine: Engine, run_root: Path) -> None:
    pids = family(engine.process.pid)
    assert len(pids) >= 3
    told_s, results = await kill_while_streaming(engine, engine.process.kill)
    assert told_s < scaled(TOLD_S)
    wholes = [result.outputs[0].finish_reason for result in results if not isinstance(result, EngineDeadError)]
    assert not wholes
    engine.process.wait(scaled(GONE_S))
    assert_nothing_left(pids, run_root)


CLIENT_THAT_DIES = """
import asyncio, os, sys
from vllm_lite import AsyncClient, SamplingParams
async def main():
    client = await AsyncClient.connect(sys.argv[1])
    async def one(index):
        while True:
            async for _ in client.generate([9, index, 9], SamplingParams(max_tokens=400, ignore_eos=True)):
                print("token", flush=True)
    await asyncio.gather(*(one(index) for index in range(5, 10)))
asyncio.run(main())
"""


async def unfinished(client: AsyncClient) -> int:
    stats = await client.stats()
    return stats.num_running + stats.num_waiting


async def test_requests_of_a_killed_client_are_aborted_and_others_continue(engine: Engine) -> None:
    async with asyncio.timeout(START_S):
        async with AsyncClient(engine.address) as client:
            whole = await consume(client, [5, 6, 7])
            dying = subprocess.Popen(
                [sys.executable, "-c", CLIENT_THAT_DIES, engine.address], stdout=subprocess.PIPE, text=True
            )
            assert dying.stdout is not None
            assert dying.stdout.readline() == "token\n"
            await client.pause_generation("keep")  # or its requests would be over before anybody looks
            other = asyncio.ensure_future(consume(client, [5, 6, 7]))
            start = time.monotonic()
            while await unfinished(client) < 6:
                assert time.monotonic() - start < START_S, "not all requests have come"
                await asyncio.sleep(0.02)
            dying.kill()
            start = time.monotonic()
            while await unfinished(client) > 1:
                assert time.monotonic() - start < scaled(TOLD_S), "its requests still run"
                await asyncio.sleep(0.02)
            await client.resume_generation()
            assert (await other).outputs[0].token_ids == whole.outputs[0].token_ids
            stats = await client.stats()
            assert (stats.num_running, stats.num_used_blocks) == (0, 0)
            dying.communicate(timeout=START_S)


def test_threads_that_pass_messages_on_have_short_time_slices(engine: Engine) -> None:
    """Else they would wait for threads that compute. A worker's own thread computes, so it has the usual slice."""
    skip_without_slices()

    def slices_of(pid: int, name: str) -> set[int]:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return {slice_of(task) for task in tasks if (task / "comm").read_text().startswith(name)}

    is_short = lambda: slice_of(Path(f"/proc/{engine.engine_pid}")) == SHORTEST_NS  # noqa: E731
    seconds_until(is_short, scaled(START_S), "the engine's short slice")
    assert slice_of(Path(f"/proc/{engine.worker_pid}")) > SHORTEST_NS
    for pid in (engine.engine_pid, engine.worker_pid, engine.process.pid):
        assert slices_of(pid, "ZMQbg") == {SHORTEST_NS}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_launcher_ends_cleanly_when_asked(engine: Engine, run_root: Path, number: signal.Signals) -> None:
    pids = family(engine.process.pid)
    engine.process.send_signal(number)
    assert engine.process.wait(scaled(GONE_S)) == 0
    assert_nothing_left(pids, run_root)


@pytest.mark.parametrize("after_s", [0.1, 0.4, 1.0])
def test_start_can_be_ended_at_any_moment(run_root: Path, tiny_checkpoint: Path, after_s: float) -> None:
    command = [sys.executable, str(ROOT / "scripts/launch_engine.py"), "--model", str(tiny_checkpoint)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(after_s)
    pids = family(process.pid)
    process.send_signal(signal.SIGTERM)
    process.wait(scaled(GONE_S))
    assert_nothing_left(pids, run_root)


SCRIPT = """
import signal
from vllm_lite import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by whatever a shell starts in the background
llm = LLM({model!r}, log_level="error")
print("ready", flush=True)
while True:
    llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    print("again", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_scripts_own_engine_ends_with_it(run_root: Path, tiny_checkpoint: Path, number: signal.Signals) -> None:
    """No `__main__` guard, no `with`: Ctrl-C, kill -9 and a plain kill in the middle of generate()."""
    code = SCRIPT.format(model=str(tiny_checkpoint))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate(timeout=START_S)[1]
    assert process.stdout.readline() == "again\n"
    pids = family(process.pid)
    assert len(pids) >= 3
    process.send_signal(number)
    process.communicate(timeout=scaled(GONE_S))
    assert process.returncode != 0
    assert_nothing_left(pids, run_root)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--block-size", "7"], "block_size must be one of"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--num-gpu-blocks-override", "1"], "num_gpu_blocks_override"),
        (["--max-model-len", "99999999"], "max_model_len"),
        (["--cpu-kvcache-space", "0.000001"], "cpu_kvcache_space"),
        (["--address", "tcp://*:1"], "ipc://"),
        (["--address", "ipc:///" + "x" * 120], "107"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run_root: Path, flags: list[str], message: str) -> None:
    command = [sys.executable, str(ROOT / "scripts/launch_engine.py"), "--log-level", "error", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr.replace("-", "_") or message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not any(run_root.iterdir())


async def test_two_engines_of_one_user_do_not_mix(engine: Engine, tiny_checkpoint: Path) -> None:
    second = Engine(tiny_checkpoint, "--served-model-name", "second", light=True)
    try:

        async def models() -> list[str]:
            names = []
            for address in (engine.address, second.address):
                async with AsyncClient(address) as client:
                    names.append(client.engine.model)
            return names

        assert engine.address != second.address
        assert await models() == [tiny_checkpoint.name, "second"]
    finally:
        second.end()


def test_address_in_use_is_refused(run_root: Path, tiny_checkpoint: Path) -> None:
    address = f"ipc://{run_root}/s"
    first = Engine(tiny_checkpoint, "--address", address, light=True)
    try:
        command = [sys.executable, str(ROOT / "scripts/launch_engine.py"), "--model", str(tiny_checkpoint)]
        result = subprocess.run([*command, "--address", address], capture_output=True, text=True, timeout=START_S)
        assert result.returncode == 2
        assert "in use" in result.stderr
    finally:
        first.end()
