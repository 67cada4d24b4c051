"""`serve` starts the engine's process before it knows the settings, and every engine its worker's. Real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast
from uuid import uuid4

import pytest

from tests.deadlines import scaled
from vllm_lite.client.engines import supervisor
from vllm_lite.client.engines.launch import ENGINE_MODULE
from vllm_lite.config import EngineConfig
from vllm_lite.engine import process_early
from vllm_lite.engine.process import EngineProcess
from vllm_lite.engine.workers.groups import WorkerGroups
from vllm_lite.process_settings import EngineSettings
from vllm_lite.runtime import supervise
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.tools import cli

DEADLINE_S = scaled(60.0)
MARKER = "VLLM_LITE_TEST_MARKER"
HELD = """
import sys, time
from vllm_lite.tools import cli
cli._parse_and_run = lambda words: time.sleep(600)
cli.main(["serve"])
"""
"""Program of a server that never sends settings."""


class Tree(NamedTuple):
    """Processes that `serve` started early, in an environment of its own."""

    server: "subprocess.Popen[str]"
    marker: str

    def pids(self, module: str) -> list[int]:
        """Processes of the tree that run `module`; of all of it for ""."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.marker.encode() in (entry / "environ").read_bytes():
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    found += [int(entry.name)] if not module or module.encode() in words else []
            except OSError:  # the process has ended; a zombie's file is empty
                pass
        return found

    def one(self, module: str) -> int:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (found := self.pids(module)):
            assert time.monotonic() < deadline_s, f"nobody runs {module}"
            time.sleep(0.01)
        return found[0]

    def wait_gone(self, module: str = "") -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while left := self.pids(module):
            assert time.monotonic() < deadline_s, f"processes {left} live on"
            time.sleep(0.01)


def _start(*words: str) -> Tree:
    marker = uuid4().hex
    environment = {**os.environ, MARKER: marker}
    command = [sys.executable, *words]
    return Tree(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True), marker)


@pytest.fixture
def held() -> Iterator[Tree]:
    tree = _start("-c", HELD)
    try:
        yield tree
    finally:
        tree.server.kill()
        tree.server.communicate(timeout=DEADLINE_S)
        tree.wait_gone()


def test_entry_points_that_are_started_early() -> None:
    assert cli.ENGINE == ENGINE_MODULE, "else nobody takes the engine"
    assert supervisor.EARLY_ENTRIES == {cli.ENGINE: cli.ENGINE_EARLY}
    assert EngineSettings.__struct_defaults__[0] == process_early.WORKER, "nor its worker"
    assert find_spec(cli.ENGINE_EARLY) is not None


@pytest.mark.parametrize("words", [["serve", "--help"], ["serve", "--print-config"], ["plan", "--help"], []])
def test_nothing_starts_where_no_engine_will(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(supervise, "spawn_early", lambda module, _entry: started.append(module))
    monkeypatch.setattr(cli, "_parse_and_run", lambda _words: 0)
    assert cli.main(words) == 0
    assert not started
    assert cli.main(["serve", "folder"]) == 0
    assert started == [ENGINE_MODULE]


@pytest.mark.parametrize(
    ("module", "settings", "is_early"),
    [
        (ENGINE_MODULE, {}, True),
        ("another", {}, False),
        (ENGINE_MODULE, {"tensor_parallel_size": 2}, False),
        (ENGINE_MODULE, {"distributed_executor_backend": "ray"}, False),
    ],
)
def test_an_engine_with_one_worker_here_starts_it_early_in_every_life(
    module: str, settings: dict[str, object], is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: list[str | None] = []
    monkeypatch.setattr(supervise, "spawn", lambda *_, entry, **__: entries.append(entry))
    config = EngineConfig.check(settings).resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
    life = SimpleNamespace(_module=module, _settings=EngineSettings(config, "ipc:///a", "none"), _wakeup=Wakeup())
    for _ in range(2):
        supervisor.EngineSupervisor._spawn(cast("supervisor.EngineSupervisor", life))
    assert entries == [cli.ENGINE_EARLY if is_early else None] * 2
    life._wakeup.close()


def test_an_engine_that_begins_asleep_keeps_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeping engine also ends the worker that its entry point has started early: other processes may need the
    memory."""
    calls: list[str] = []
    monkeypatch.setattr(supervise, "end_early", lambda: calls.append("end"))
    before = SimpleNamespace(ready="ready", num_blocks=1, num_host_blocks=2)
    groups = SimpleNamespace(adopt=lambda *_: calls.append("adopt"))
    life = cast("EngineProcess", SimpleNamespace(_before=before))
    assert EngineProcess._start_workers(life, cast("WorkerGroups", groups))[0] == before.ready
    assert calls == ["end", "adopt"]


def test_a_bad_flag_ends_with_one_sentence_and_leaves_no_process() -> None:
    tree = _start("-m", "vllm_lite", "serve", "--max-modl-len", "3")
    _, error = tree.server.communicate(timeout=DEADLINE_S)
    assert tree.server.returncode == 2
    assert error == "vllm-lite serve: unknown argument '--max-modl-len'; did you mean --max-model-len?\n"
    tree.wait_gone()


def test_a_server_that_dies_before_it_has_sent_settings_leaves_no_process(held: Tree) -> None:
    held.one(process_early.WORKER)
    held.server.kill()
    held.server.wait(DEADLINE_S)
    held.wait_gone()


def test_an_engine_that_dies_before_it_has_settings_leaves_no_worker(held: Tree) -> None:
    held.one(process_early.WORKER)
    os.kill(held.one(cli.ENGINE_EARLY), signal.SIGKILL)
    held.wait_gone(process_early.WORKER)
    assert held.server.poll() is None
