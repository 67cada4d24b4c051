"""An engine that dies is replaced at the same address, as often as is allowed, and everybody learns when that ends."""

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import fake_engine_process
from tests.deadlines import patience, scaled
from tests.fakes import DEADLINE_S
from tests.http_server import until
from vllm_lite.client.engines import instances, supervisor
from vllm_lite.client.engines.launch import LaunchedEngine, launch
from vllm_lite.client.engines.session import Session
from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineError
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.runtime.restarts import WINDOW_S
from vllm_lite.tools.cli import main

ANSWER_S = 0.5


pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def start() -> Iterator[Callable[..., LaunchedEngine]]:
    """Launch an engine; its name scripts each of its lives."""
    launched: list[LaunchedEngine] = []

    def start(lives: str, **settings: Any) -> LaunchedEngine:
        settings = {"served_model_name": lives, "ready_timeout_s": DEADLINE_S, **settings}
        launched.append(launch(EngineConfig.check(settings)))
        return launched[-1]

    yield start
    for each in launched:
        each.close()


def ask(launched: LaunchedEngine) -> None:
    """Send one request to the engine as it is now, over a connection of its own, and do not wait for anything."""
    with closing(Session.connect(launched.address, timeout_s=DEADLINE_S)) as session:
        session.submit(Generate("r", b"\1\0\0\0", SamplingParams()), lambda _: None)
        until(lambda: not session.link.num_posted, "the request is sent")


def life(launched: LaunchedEngine) -> int | None:
    """The life of the engine that answers now, which the fake says as its epoch; None if none does."""
    with suppress(EngineError), closing(Session.connect(launched.address, timeout_s=scaled(ANSWER_S))) as session:
        return session.welcome.epoch
    return None


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the supervisor's log."""
    return [record.getMessage() for record in caplog.records if record.name == supervisor.__name__]


def next_life(launched: LaunchedEngine, dead: int) -> None:
    until(lambda: launched.pid != dead, "the next life")


def test_a_killed_engine_is_replaced_at_its_address(
    start: Callable[..., LaunchedEngine], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launched = start("serves")
    first, address = launched.pid, launched.address
    with caplog.at_level(logging.WARNING):
        os.kill(first, signal.SIGKILL)
        next_life(launched, first)
        until(lambda: life(launched) == 2, "the second life")
        until(lambda: len(said(caplog)) == 2, "both lines of the log")
    assert launched.address == address
    assert launched.alive() is None
    assert not launched.wait(0.0)
    assert said(caplog)[0] == (
        f"the engine (pid {first}) ended: killed by SIGKILL; life 2 of it starts (pid {launched.pid}), at most 10 in "
        f"{WINDOW_S:g} s do"
    )
    assert said(caplog)[1].startswith("life 2 of the engine serves after ")
    (file,) = place.glob("vl-*/instance.json")
    until(lambda: json.loads(file.read_text())["ready"], "the record of the one that is ready")
    record = json.loads(file.read_text())
    assert (record["engine"]["pid"], record["launcher"]["pid"]) == (launched.pid, os.getpid())


def test_an_engine_that_is_a_thread_is_replaced_when_it_fails(start: Callable[..., LaunchedEngine]) -> None:
    launched = start("fails,serves", single_process=True)
    ask(launched)
    until(lambda: life(launched) == 2, "the second life")


def test_the_address_of_ones_own_stays(start: Callable[..., LaunchedEngine], place: Path) -> None:
    launched = start("serves", address=f"ipc://{place}/mine")
    first = launched.pid
    os.kill(first, signal.SIGKILL)
    next_life(launched, first)
    until(lambda: life(launched) == 2, "the second life")


@pytest.mark.parametrize(
    ("lives", "reason"),
    [("fails,serves", "the engine failed: KeyError(7)"), ("dies,serves", "killed by SIGKILL")],
)
def test_a_failed_engine_is_replaced_and_its_reason_logged(
    start: Callable[..., LaunchedEngine], lives: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    launched = start(lives)
    first = launched.pid
    ask(launched)
    next_life(launched, first)
    until(lambda: life(launched) == 2, "the second life")
    assert f"ended: {reason};" in said(caplog)[0]


def test_an_engine_that_hangs_is_killed_and_replaced(start: Callable[..., LaunchedEngine]) -> None:
    launched = start("freezes,serves", heartbeat_timeout_s=patience(0.6))
    first = launched.pid
    ask(launched)
    next_life(launched, first)
    until(lambda: life(launched) == 2, "the second life")
    assert not psutil.pid_exists(first)


def test_an_engine_that_hangs_while_it_starts_again_is_killed_and_replaced(
    start: Callable[..., LaunchedEngine],
) -> None:
    launched = start("dies,hangs,serves", ready_timeout_s=patience(2.0))
    ask(launched)
    until(lambda: life(launched) == 3, "the third life")


def _is_over(launched: LaunchedEngine, pid: int) -> bool:
    return launched.pid != pid or launched.alive() is not None


def test_past_the_limit_all_ends_with_the_first_cause(start: Callable[..., LaunchedEngine]) -> None:
    launched = start("fails,dies,dies", max_restarts=2)
    for _ in range(3):
        dead = launched.pid
        ask(launched)
        until(partial(_is_over, launched, dead), "the next life, or the end")
    assert launched.wait(DEADLINE_S)
    assert launched.alive() == (
        "the engine failed: KeyError(7) (the first of 3 deaths within 300 s; the last one: killed by SIGKILL)"
    )
    assert launched.session.dead is not None


def test_an_engine_that_gives_up_is_not_replaced(start: Callable[..., LaunchedEngine]) -> None:
    launched = start("gives-up,serves")
    ask(launched)
    assert launched.wait(DEADLINE_S)
    assert launched.alive() == "worker 0 died: killed by SIGKILL"


def test_an_engine_that_is_asked_to_end_is_not_replaced(start: Callable[..., LaunchedEngine]) -> None:
    launched = start("serves")
    os.kill(launched.pid, signal.SIGTERM)
    assert launched.wait(DEADLINE_S)
    assert launched.alive() == "exit status 0"


def test_bad_input_at_another_start_ends_all(start: Callable[..., LaunchedEngine]) -> None:
    launched = start("dies,refuses")
    ask(launched)
    assert launched.wait(DEADLINE_S)
    assert launched.alive() == (
        f"it cannot be started again: {fake_engine_process.REASON}; it was restarted because it ended: "
        f"killed by SIGKILL"
    )


def test_another_start_that_fails_counts_as_a_death(start: Callable[..., LaunchedEngine]) -> None:
    launched = start("dies,ends,serves", max_restarts=2)
    ask(launched)
    until(lambda: life(launched) == 3, "the third life")
    assert launched.alive() is None


def test_without_restarts_the_first_death_is_the_end(start: Callable[..., LaunchedEngine]) -> None:
    launched = start("dies,serves", max_restarts=0)
    ask(launched)
    assert launched.wait(DEADLINE_S)
    assert launched.alive() == "killed by SIGKILL"


def test_it_can_be_closed_while_another_life_starts(start: Callable[..., LaunchedEngine]) -> None:
    launched = start("dies,hangs")
    first = launched.pid
    ask(launched)
    next_life(launched, first)
    launched.close()
    assert not psutil.pid_exists(launched.pid)
    assert launched.wait(0.0)


def test_kill_finds_it_in_any_life_and_ends_it_for_good(
    start: Callable[..., LaunchedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    launched = start("stays")
    first = launched.pid
    os.kill(first, signal.SIGKILL)
    next_life(launched, first)
    until(lambda: life(launched) == 2, "the second life")
    assert main(["kill", "stays", "--timeout", "0.1", "--force"]) == 0
    assert capsys.readouterr().out == f"{launched.pid} stays: killed\n"
    assert launched.wait(DEADLINE_S)
    assert launched.alive() == "killed by SIGKILL"


def test_an_engine_that_is_being_replaced_is_not_cleaned_away(
    start: Callable[..., LaunchedEngine], place: Path
) -> None:
    launched = start("serves")
    (file,) = place.glob("vl-*/instance.json")
    record = instances._read(file.parent)
    gone = instances.Process(record.engine.pid, record.engine.start_ticks + 1, record.engine.command)
    instances.write(
        str(file.parent),
        record := instances.InstanceRecord(
            model="m", address=launched.address, started_s=1.0, engine=gone, launcher=record.launcher
        ),
    )
    (found,) = instances.find()
    assert found.state == "starting"
    instances.write(
        str(file.parent), instances.InstanceRecord(model="m", address="ipc:///no", started_s=1.0, engine=gone)
    )
    (found,) = instances.find()
    assert found.state == "stale"
