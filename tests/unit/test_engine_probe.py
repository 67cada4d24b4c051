"""A supervisor's own connection to an engine, with a clock of the test."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from tests.fakes import FakeEngine
from tests.http_server import until
from vllm_lite.client.engines.engine_probe import PINGS, STOPPED_S, EngineProbe
from vllm_lite.protocol.api import Dying, Heartbeat, Ping, Refused

START_S, SILENCE_S = 100.0, 20.0


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(silent=True) as engine:
        yield engine


@pytest.fixture
def probe(engine: FakeEngine) -> Iterator[EngineProbe]:
    with closing(EngineProbe(engine.address, START_S, SILENCE_S, 0.0)) as probe:
        yield probe


def watch(probe: EngineProbe, first_s: float, last_s: float, *, is_stopped: bool = False) -> bool:
    """Look as often as one should. False once the engine counts as hung."""
    now_s = first_s
    while now_s <= last_s:
        if not probe.look(now_s, is_stopped=is_stopped):
            return False
        now_s += probe.every_s
    return True


def ready(engine: FakeEngine, probe: EngineProbe, now_s: float) -> None:
    engine.greet()
    until(lambda: probe.look(now_s) and probe.is_ready, "Welcome")
    if now_s >= probe.every_s:
        engine.expect(Ping)


def test_an_engine_may_take_its_time_to_start(probe: EngineProbe) -> None:
    assert watch(probe, 0.0, START_S)
    assert not probe.is_ready
    assert not probe.look(START_S + 1.0)


def test_time_stopped_during_the_start_does_not_count(probe: EngineProbe) -> None:
    assert watch(probe, 0.0, 50.0)
    assert watch(probe, 51.0, 51.0 + SILENCE_S, is_stopped=True)
    assert not watch(probe, 52.0 + SILENCE_S, 53.0 + SILENCE_S, is_stopped=True)
    assert probe.patience_s == SILENCE_S
    assert watch(probe, 54.0 + SILENCE_S, 55.0 + SILENCE_S), "it goes on"


def test_a_ready_engine_that_answers_is_not_hung(engine: FakeEngine, probe: EngineProbe) -> None:
    ready(engine, probe, 90.0)
    for now_s in range(95, 200, 5):
        assert probe.look(now_s)
        engine.expect(Ping)
        engine.send(Heartbeat(1, 0))
        until(partial(heard, probe, now_s), "the answer")
        engine.expect_nothing_more()


def heard(probe: EngineProbe, now_s: float) -> bool:
    return probe.look(now_s) and probe._heard_s == now_s


def test_a_ready_engine_that_does_not_answer_is_hung(engine: FakeEngine, probe: EngineProbe) -> None:
    ready(engine, probe, 90.0)
    assert watch(probe, 95.0, 90.0 + SILENCE_S)
    assert not probe.look(90.0 + SILENCE_S + 1.0)
    until(lambda: engine.heard.qsize() == PINGS, "all pings")


def test_a_probe_that_was_stopped_itself_gives_the_engine_time(engine: FakeEngine, probe: EngineProbe) -> None:
    ready(engine, probe, 90.0)
    late_s = 90.0 + SILENCE_S + probe.every_s + STOPPED_S
    assert probe.look(late_s)
    assert watch(probe, late_s, late_s + SILENCE_S)
    assert not probe.look(late_s + SILENCE_S + 1.0)


@pytest.mark.parametrize("message", [Refused("no weights", bad_input=True), Dying("no weights")])
def test_the_reason_of_an_end(engine: FakeEngine, probe: EngineProbe, message: Refused | Dying) -> None:
    ready(engine, probe, 0.0)
    engine.send(message)
    engine.die()
    probe.read_last()
    assert probe.reason == "no weights"


def test_an_end_without_a_reason(engine: FakeEngine, probe: EngineProbe) -> None:
    ready(engine, probe, 0.0)
    engine.die()
    probe.read_last()
    assert probe.reason is None
