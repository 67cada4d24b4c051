"""A session's connection to its engine: the queue before a busy engine, garbage, silence, and the reason of an end."""

import time
from collections.abc import Callable

import pytest

from vllm_lite.client.engines import link as links
from vllm_lite.client.engines.link import SessionLink, Silence
from vllm_lite.protocol.api import Abort, GetStats, Heartbeat
from vllm_lite.protocol.codec import client_to_engine, engine_to_client
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import Delivery

BEAT = engine_to_client.encode(Heartbeat(1, 2))


class FakeConnection:
    def __init__(self) -> None:
        self.arrived: list[bytes] = []
        self.sent: list[object] = []
        self.answers: list[Delivery] = []
        self.is_closed = False
        self._wakeup = Wakeup()

    def recv(self) -> bytes | None:
        return self.arrived.pop(0) if self.arrived else None

    def send(self, payload: bytes) -> Delivery:
        answer = self.answers.pop(0) if self.answers else Delivery.SENT
        if answer is Delivery.SENT:
            self.sent.append(client_to_engine.decode(payload))
        return answer

    def lost(self) -> bool:
        return False

    def refused(self) -> str | None:
        return None

    def pollables(self) -> tuple[int, ...]:
        return self._wakeup.pollables()

    def close(self) -> None:
        self.is_closed = True


def linked(alive: Callable[[], str | None] | None = None) -> tuple[SessionLink, FakeConnection]:
    connection = FakeConnection()
    return SessionLink(connection, alive), connection


def test_a_busy_engine_gets_every_message_once_and_in_order() -> None:
    link, connection = linked()
    connection.answers = [Delivery.SENT, Delivery.BUSY]
    link.post(Abort("a"), Abort("b"), Abort("c"))
    link.send_posted()
    assert (connection.sent, link.num_posted) == ([Abort("a")], 2)
    link.send_posted()
    assert (connection.sent, link.num_posted) == ([Abort("a"), Abort("b"), Abort("c")], 0)


def test_a_message_wakes_the_thread_that_sends() -> None:
    link, _ = linked()
    link.post(GetStats())
    assert link.wakeup.is_set()
    link.wait()
    assert not link.wakeup.is_set()
    link.discard_posted()
    assert link.num_posted == 0


def test_whatever_arrives_ends_the_silence() -> None:
    link, connection = linked()
    now_s = [0.0]
    link.silence = Silence(100.0, lambda: now_s[0])
    for payload, is_message in ((BEAT, True), (b"garbage", False)):
        now_s[0] += 9
        assert link.silence.seconds() == 9
        connection.arrived = [payload]
        assert (link.receive() is not None) == is_message
        assert link.silence.seconds() == 0
    assert link.num_malformed == 1
    now_s[0] += 5
    assert link.receive() is None
    assert link.silence.seconds() == 5


def test_another_engine_has_not_been_silent() -> None:
    link, first = linked()
    now_s = [0.0]
    link.silence = Silence(100.0, lambda: now_s[0])
    now_s[0] = 50
    link.disconnect()
    assert first.is_closed
    link.attach(second := FakeConnection())
    assert link.silence.seconds() == 0
    second.arrived = [BEAT]
    assert link.receive() == Heartbeat(1, 2)


def test_the_reason_of_an_end_is_waited_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = [None, None, "killed by SIGKILL"]
    link, _ = linked(lambda: reasons.pop(0))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(links, "REASON_S", 3600.0)
    assert link.await_end() == "killed by SIGKILL"
    monkeypatch.setattr(links, "REASON_S", 0.0)
    late, _ = linked(lambda: None)
    assert late.await_end() is None


def test_a_reported_end_is_preferred_to_the_exit_status() -> None:
    link, _ = linked(lambda: "exit status 1")
    assert link.end() == "exit status 1"
    link.reported_end = "killed by SIGKILL"
    assert link.end() == "killed by SIGKILL"
    alone, _ = linked()
    assert alone.end() is None
    assert alone.await_end() is None
