"""Engines found by ps and ended by kill: engines by their records, and nothing that is not verified to be one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes import DEADLINE_S
from tests.http_server import until
from vllm_lite.client.engines import instances
from vllm_lite.client.engines.instances import RECORD, InstanceRecord, Process
from vllm_lite.client.engines.launch import LaunchedEngine, launch
from vllm_lite.config import EngineConfig
from vllm_lite.tools.cli import main


@pytest.fixture(autouse=True)
def quick(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # its children end before the check of it
    monkeypatch.setattr(instances, "ASK_S", 0.3)


@pytest.fixture
def engine() -> Iterator[LaunchedEngine]:
    launched = launch(EngineConfig.check({"served_model_name": "serves", "ready_timeout_s": DEADLINE_S}))
    yield launched
    launched.close()


@pytest.fixture
def stranger() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of this user that is not an engine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def ps(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert main(["ps", "--json", *flags]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def leave(place: Path, process: Process, name: str = "vl-left", address: str = "ipc:///nowhere") -> Path:
    """A run directory with a record."""
    (place / name).mkdir(mode=0o700)
    instances.write(str(place / name), InstanceRecord(model="m", address=address, started_s=1.0, engine=process))
    return place / name


def test_an_engine_is_listed_and_ended(engine: LaunchedEngine, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = place.glob(f"vl-*/{RECORD}")
    assert record.stat().st_mode & 0o777 == 0o600
    assert record.parent.stat().st_mode & 0o777 == 0o700
    (row,) = ps(capsys)
    assert (row["pid"], row["kind"], row["model"]) == (engine.pid, "engine", "serves")
    assert row["address"] == engine.address
    assert row["state"] == "not answering", "the fake counts nothing"
    assert row["memory_bytes"] > 2**20
    assert main(["ps"]) == 0
    assert "serves" in capsys.readouterr().out
    assert main(["kill", "serves"]) == 0
    assert capsys.readouterr().out == f"{engine.pid} serves: ended\n"
    assert engine.wait(DEADLINE_S)
    assert ps(capsys) == []
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == "no engine of yours is running\n"


def test_a_record_does_not_have_the_command(engine: LaunchedEngine, place: Path) -> None:
    (record,) = place.glob(f"vl-*/{RECORD}")
    assert "python" not in record.read_text(), "there might be keys in it"


def test_a_stopped_engine_is_reported_and_ended(engine: LaunchedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    os.kill(engine.pid, signal.SIGSTOP)
    until(lambda: ps(capsys)[0]["state"] == "stopped", "the stop")
    assert main(["kill", str(engine.pid), "--timeout", str(DEADLINE_S)]) == 0
    assert capsys.readouterr().out == f"{engine.pid} serves: ended\n"
    assert engine.wait(DEADLINE_S)
    assert engine.alive() == "exit status 0"


def test_force_kills_an_engine_that_hangs(
    engine: LaunchedEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = signal.pidfd_send_signal
    monkeypatch.setattr(
        signal, "pidfd_send_signal", lambda of, number: None if number == signal.SIGCONT else send(of, number)
    )
    os.kill(engine.pid, signal.SIGSTOP)
    assert main(["kill", str(engine.pid), "--timeout", "0.1"]) == 1
    assert capsys.readouterr().out == f"{engine.pid} serves: still running; --force kills it\n"
    assert main(["kill", str(engine.pid), "--timeout", "0.1", "--force"]) == 0
    assert capsys.readouterr().out == f"{engine.pid} serves: killed\n"
    assert engine.wait(DEADLINE_S)
    assert engine.alive() == "killed by SIGKILL"


def test_an_engine_without_workers_is_recovering(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(launch(EngineConfig.check({"served_model_name": "recovers"}))):
        (row,) = ps(capsys)
        assert (row["state"], row["restarts"]) == ("recovering", 3)
        assert main(["ps"]) == 0
        heads, cells = capsys.readouterr().out.splitlines()
        assert cells[heads.index("restarts") : heads.index("address")].strip() == "3"


def test_an_engine_that_is_not_ready_is_starting(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def meanwhile(_: EngineConfig) -> None:
        assert ps(capsys)[0]["state"] == "starting"
        assert main(["kill", "all"]) == 0

    # "killed" if its handler of the signal was not there yet
    with pytest.raises(Exception, match=r"exit status 0|killed by SIGTERM"):
        launch(EngineConfig.check({"served_model_name": "hangs", "ready_timeout_s": DEADLINE_S}), meanwhile=meanwhile)


def test_files_of_dead_instances_are_removed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(done.pid)
    done.communicate(b"\n")
    folder = leave(place, process)
    assert [row["state"] for row in ps(capsys)] == ["stale"]
    assert folder.exists()
    ps(capsys, "--clean")
    assert not folder.exists()
    leave(place, process)
    assert main(["kill", "m"]) == 0
    assert ps(capsys) == []


def test_files_of_a_killed_instance_are_removed(
    place: Path, stranger: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    folder = leave(place, Process.of(stranger.pid))
    assert main(["kill", folder.name]) == 0
    assert capsys.readouterr().out == f"{stranger.pid} m: ended\n"
    assert stranger.wait(DEADLINE_S) == -signal.SIGTERM
    assert not folder.exists()


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"command": "another"}])
def test_a_stranger_is_never_signalled(
    place: Path, stranger: "subprocess.Popen[bytes]", change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded pid was an engine's, and another process has it now."""
    process = msgspec.structs.replace(Process.of(stranger.pid), **change)
    folder = leave(place, process)
    (instance,) = instances.find()
    assert instance.state == "stale"
    assert instances.end(instance, 0.1, force=True) == "was gone", "also if it became one after the look"
    leave(place, process) if not folder.exists() else None
    assert main(["kill", str(stranger.pid), "--force", "--timeout", "0.1"]) == 0
    assert stranger.poll() is None


def test_only_records_that_are_ours_are_read(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("vl-a", "{}"), ("vl-b", "\xff"), ("vl-c", '{"model": 1}')):
        (place / name).mkdir()
        (place / name / RECORD).write_text(text)
    (place / "vl-d").mkdir()
    leave(tmp_path, Process.of(os.getpid()))
    (place / "vl-link").symlink_to(tmp_path / "vl-left")
    assert ps(capsys) == []
    assert main(["kill", "all"]) == 0
    assert main(["kill", "nobody"]) == 1
    assert "no engine of yours is 'nobody'" in capsys.readouterr().err
    for name in "abcd":
        shutil.rmtree(place / f"vl-{name}")
    (place / "vl-link").unlink()


def test_another_users_are_not(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = leave(place, Process.of(os.getpid()))
    assert len(instances.find()) == 1
    me = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: me + 1)
    assert instances.find() == []
    shutil.rmtree(folder)


def test_workers_are_the_engines_children_of_that_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This process is the engine. Only the main thread's name counts, and only a name as workers give it themselves."""
    program = "import sys\nfrom vllm_lite.runtime.supervise import name_process\nname_process(sys.argv[1])\ninput()"
    names = ("vl-worker 1", "vl-worker 10", "vl-worker 0", "vl-worker x", "python")
    children = [subprocess.Popen([sys.executable, "-c", program, name], stdin=subprocess.PIPE) for name in names]
    folder = leave(place, Process.of(os.getpid()))
    try:
        until(
            lambda: all(
                Path(f"/proc/{c.pid}/comm").read_text() == n + "\n" for c, n in zip(children, names, strict=True)
            ),
            "names",
        )
        other = leave(place, Process.of(children[-1].pid), "vl-other")
        assert [bool(row["workers"]) for row in ps(capsys)] == [True, False], "not the workers of every engine"
        shutil.rmtree(other)
        (row,) = ps(capsys)
        found = [(worker["rank"], worker["pid"]) for worker in row["workers"]]
        assert found == [(0, children[2].pid), (1, children[0].pid), (10, children[1].pid)]
        assert all(worker["memory_bytes"] > 2**20 for worker in row["workers"])
        assert main(["ps"]) == 0
        heading, line = capsys.readouterr().out.splitlines()
        assert line[: heading.index("workers") + len("workers")].split()[-1] == "3"
    finally:
        for child in children:
            child.communicate(b"\n")
        shutil.rmtree(folder)
