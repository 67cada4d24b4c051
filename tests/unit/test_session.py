"""A session with a fake engine: order, gaps, death. Every stream ends exactly once."""

import threading
import time
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.fakes import DEADLINE_S, FakeEngine, Sink, session_with, settle, start, welcome
from vllm_lite.client.engines.connection import EngineAddress
from vllm_lite.client.engines.link import Silence
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.errors import EngineDeadError, EngineError, ProtocolError, RequestError
from vllm_lite.protocol.api import (
    Abort,
    Describe,
    Descriptions,
    Dying,
    Finished,
    Generate,
    GetStats,
    Heartbeat,
    PrefixCacheReset,
    ResetPrefixCache,
    ToClient,
    TokenLogprobs,
    Tokens,
)
from vllm_lite.protocol.codec import engine_to_client
from vllm_lite.protocol.external import AbortExternal, ExternalAborted, ExternalFound, FindExternal
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import Stats
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import Delivery

# ---- streams


def test_events_come_in_order_and_once_per_message_and_sink() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        shared, other = Sink(), Sink()
        for request_id, sink in (("a", shared), ("b", shared), ("c", other)):
            start(session, engine, request_id, sink)
        engine.send_outputs(Tokens("a", 0, [5]), Tokens("c", 0, [6]), Tokens("b", 0, [7]))
        engine.send_outputs(Tokens("a", 1, [8]), Finished("b", 1, [9], "stop"))
        assert shared.calls.get(timeout=DEADLINE_S) == [Tokens("a", 0, [5]), Tokens("b", 0, [7])]
        assert shared.calls.get(timeout=DEADLINE_S) == [Tokens("a", 1, [8]), Finished("b", 1, [9], "stop")]
        assert other.calls.get(timeout=DEADLINE_S) == [Tokens("c", 0, [6])]


def test_delivered_tokens_are_cut_from_a_resend() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start(session, engine, "a", sink)
        logprobs = [TokenLogprobs(-float(place), 1, ()) for place in range(4)]
        engine.send_outputs(Tokens("a", 0, [1, 2], logprobs[:2]))
        engine.send_outputs(Tokens("a", 0, [1, 2, 3], logprobs[:3]))
        engine.send_outputs(Tokens("a", 1, [2]))
        engine.send_outputs(Finished("a", 2, [3, 4], "length", logprobs=logprobs[2:]))
        assert [sink.next() for _ in range(4)] == [
            Tokens("a", 0, [1, 2], logprobs[:2]),
            Tokens("a", 2, [3], logprobs[2:3]),
            Tokens("a", 3, []),
            Finished("a", 3, [4], "length", logprobs=logprobs[3:]),
        ]


@pytest.mark.parametrize("last", [False, True])
def test_a_gap_ends_that_request_alone(last: bool) -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        torn, whole = Sink(), Sink()
        start(session, engine, "torn", torn)
        start(session, engine, "whole", whole)
        engine.tokens("torn", 0, 1, 2)
        (engine.finish if last else engine.tokens)("torn", 5, 9)
        engine.finish("whole", 0, 3)
        assert torn.next() == Tokens("torn", 0, [1, 2])
        failure = torn.next()
        assert isinstance(failure, StreamFailure)
        assert isinstance(failure.error, ProtocolError)
        assert "tokens 2 to 4" in str(failure.error)
        assert whole.next() == Finished("whole", 0, [3], "length")
        if not last:
            assert engine.expect(Abort).request_id == "torn"
            engine.finish("torn", 6, reason="abort")
        # the id is free again, and nothing of the old stream is left
        start(session, engine, "torn", torn)
        engine.finish("torn", 0, 4)
        assert torn.next() == Finished("torn", 0, [4], "length")


def test_a_finished_request_gets_no_further_message() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start(session, engine, "a", sink)
        engine.finish("a", 0, 1)
        engine.finish("a", 1)
        engine.tokens("a", 1, 2)
        engine.tokens("never started", 0, 2)
        settle(session, engine)
        assert sink.next() == Finished("a", 0, [1], "length")
        assert sink.is_empty()


def test_a_value_that_cannot_be_sent_harms_no_other_request() -> None:
    unsendable: Any = object()
    with FakeEngine() as engine, session_with(engine) as session:
        start(session, engine, "a", sink := Sink())
        with pytest.raises(RequestError, match=r"^the request has a value that cannot be sent: "):
            session.submit(Generate("b", b"", SamplingParams(extra_args={"mine": unsendable})), Sink())
        with pytest.raises(RequestError, match="surrogates not allowed"):
            session.submit(Generate("\ud800", b"", SamplingParams()), Sink())
        with pytest.raises(RequestError, match="surrogates not allowed"):
            session.ask(Describe(("\ud800",)), Descriptions)
        for refused in ("", "x" * 257):
            with pytest.raises(RequestError, match="request_id must be a text of 1 to 256 characters, got '"):
                session.submit(Generate(refused, b"", SamplingParams()), Sink())
            with pytest.raises(RequestError, match="the question has a value that the engine does not take: Expected"):
                session.load_adapter(refused, "/adapter")
        described = session.ask(Describe(("a",)), Descriptions)
        engine.expect(Describe)
        engine.send(Descriptions([]))
        assert described.result(DEADLINE_S) == Descriptions([]), "nothing waits for the answer before it"
        engine.send_outputs(Finished("a", 0, [1], "length"))
        assert sink.next() == Finished("a", 0, [1], "length")
        assert (session.dead, session.is_live("b")) == (None, False)


def test_an_id_in_use_is_refused() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        start(session, engine, "a", Sink())
        with pytest.raises(RequestError, match="'a' is in use"):
            session.submit(Generate("a", b"", SamplingParams()), Sink())


def test_abort_lets_the_engine_end_the_stream() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start(session, engine, "a", sink)
        session.abort("a")
        session.abort("unknown")
        assert engine.expect(Abort) == Abort("a")
        engine.finish("a", 0, reason="abort")
        assert sink.next() == Finished("a", 0, [], "abort")
        engine.expect_nothing_more()


def test_drop_ends_the_stream_here_and_its_rest_is_swallowed() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        old, new = Sink(), Sink()
        start(session, engine, "a", old)
        session.drop("a")
        session.drop("a")
        assert engine.expect(Abort) == Abort("a")
        start(session, engine, "a", new)
        engine.tokens("a", 0, 1)  # of the old stream, sent before the engine read the Abort
        engine.finish("a", 1, reason="abort")
        engine.tokens("a", 0, 7)
        assert new.next() == Tokens("a", 0, [7])
        assert old.is_empty()


def test_a_sink_that_raises_loses_only_its_own_requests() -> None:
    def broken(events: list[Event]) -> None:
        raise RuntimeError("the event loop is closed")

    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        for request_id in ("a", "b"):
            session.submit(Generate(request_id, b"", SamplingParams()), broken)
            engine.expect(Generate)
        start(session, engine, "c", sink)
        engine.send_outputs(Tokens("a", 0, [1]), Tokens("c", 0, [1]))
        assert {engine.expect(Abort).request_id, engine.expect(Abort).request_id} == {"a", "b"}
        assert sink.next() == Tokens("c", 0, [1])


def test_garbage_is_counted_and_does_no_harm() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start(session, engine, "a", sink)
        engine.send_raw(b"\xc1 garbage")
        engine.send_raw(b"")
        engine.finish("a", 0, 1)
        assert sink.next() == Finished("a", 0, [1], "length")
        assert session.link.num_malformed == 2


def test_each_kind_of_question_has_its_own_answers() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        stats, state, reset = session.request_stats(), session.describe(["a", "b"]), session.reset_prefix_cache()
        aborted, found = session.abort_external("y"), session.find_external(["y", "z"])
        late = session.describe(external_id="c", with_content=True)
        engine.expect(GetStats)
        assert engine.expect(Describe).request_ids == ("a", "b")
        engine.expect(ResetPrefixCache)
        assert engine.expect(AbortExternal) == AbortExternal("y")
        assert engine.expect(FindExternal) == FindExternal(("y", "z"))
        engine.send(ExternalFound(["z"]))
        assert engine.expect(Describe) == Describe((), "c", with_content=True)
        engine.send(ExternalAborted(1))
        engine.send(PrefixCacheReset(1, 2, 3))
        engine.send(Descriptions([]))
        engine.send(Stats(*range(11)))
        assert reset.result(DEADLINE_S) == PrefixCacheReset(1, 2, 3)
        assert state.result(DEADLINE_S) == Descriptions([])
        assert stats.result(DEADLINE_S) == Stats(*range(11))
        assert aborted.result(DEADLINE_S) == ExternalAborted(1)
        assert found.result(DEADLINE_S) == ExternalFound(["z"])
        assert not late.done()
        engine.die()
        with pytest.raises(EngineDeadError):
            late.result(DEADLINE_S)


def test_stats_are_answered_in_order() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        first, second = session.request_stats(), session.request_stats()
        first.cancel()
        for running in (1, 2):
            engine.expect(GetStats)
            engine.send(Stats(running, *range(10)))
        assert second.result(DEADLINE_S).num_running == 2
        with pytest.raises(EngineError, match=r"did not answer within 0\.01 s"):
            session.stats(timeout_s=0.01)


# ---- the end


def ends_once(sinks: list[Sink], kind: type[EngineError], text: str) -> None:
    for sink in sinks:
        failure = sink.next()
        assert isinstance(failure, StreamFailure)
        assert type(failure.error) is kind
        assert text in str(failure.error)
        assert sink.is_empty()


def running(session: Session, engine: FakeEngine, count: int = 5) -> list[Sink]:
    sinks = [Sink() for _ in range(count)]
    for number, sink in enumerate(sinks):
        start(session, engine, str(number), sink)
        engine.tokens(str(number), 0, 1)
        assert isinstance(sink.next(), Tokens)
    return sinks


def is_dead(session: Session, text: str, kind: type[EngineError] = EngineDeadError) -> None:
    for attempt in (lambda: session.submit(Generate("x", b"", SamplingParams()), Sink()), session.request_stats):
        with pytest.raises(kind, match=text):
            attempt()


def test_a_lost_connection_ends_every_stream_once() -> None:
    with FakeEngine() as engine, session_with(engine, recovery_timeout_s=0) as session:
        sinks, stats = running(session, engine), session.request_stats()
        engine.die()
        ends_once(sinks, EngineDeadError, "closed its connection")
        with pytest.raises(EngineDeadError):
            stats.result(DEADLINE_S)
        is_dead(session, "closed its connection")
        session.fail("killed by SIGKILL")
        assert all(sink.is_empty() for sink in sinks)


def test_the_reason_of_the_end_is_looked_up() -> None:
    end: list[str] = []
    with FakeEngine() as engine, session_with(engine, alive=lambda: end[0] if end else None) as session:
        sinks = running(session, engine)
        end.append("killed by SIGKILL")
        engine.die()
        ends_once(sinks, EngineDeadError, "the engine died: killed by SIGKILL")


def test_an_end_that_was_noticed_elsewhere() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sinks = running(session, engine)
        session.fail("exit status 3")
        ends_once(sinks, EngineDeadError, "the engine died: exit status 3")
        is_dead(session, "exit status 3")


def test_a_dying_engines_reason_is_reported() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sinks = running(session, engine)
        engine.send(Dying("worker 0 (pid 7) died: killed by SIGKILL"))
        engine.finish("0", 1, reason="error", error="too late")
        ends_once(sinks, EngineDeadError, "worker 0 (pid 7) died: killed by SIGKILL")
        is_dead(session, "worker 0")


def test_events_sent_before_the_end_count() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start(session, engine, "a", sink)
        engine.finish("a", 0, 1)
        engine.die()
        assert sink.next() == Finished("a", 0, [1], "length")


class LastWords:
    """A connection whose last message arrives together with its end."""

    def __init__(self, message: ToClient) -> None:
        self._arriving = [engine_to_client.encode(message)]
        self._arrived: list[bytes] = []
        self._wakeup = Wakeup()
        self._wakeup.set()

    def recv(self) -> bytes | None:
        return self._arrived.pop() if self._arrived else None

    def send(self, payload: bytes) -> Delivery:
        raise AssertionError(payload)

    def lost(self) -> bool:
        self._arrived, self._arriving = self._arriving, []
        return True

    def refused(self) -> None:
        return None

    def pollables(self) -> tuple[int, ...]:
        return self._wakeup.pollables()

    def close(self) -> None:
        self._wakeup.close()


def test_last_words_win_over_the_end_of_the_connection() -> None:
    session = Session(LastWords(Dying("worker 0 died")), welcome(), EngineAddress("inproc://x"))
    session._thread.join(DEADLINE_S)
    assert str(session.dead) == "worker 0 died"


def test_silence_is_death_only_while_something_is_asked() -> None:
    with FakeEngine() as engine, session_with(engine, recovery_timeout_s=0, heartbeat_timeout_s=scaled(0.2)) as session:
        threading.Event().wait(scaled(0.4))  # longer than the timeout, but no stream waits for tokens
        for _ in range(2):  # the second is sent after a look at the clock
            session.request_stats()
            engine.expect(GetStats)
        assert session.dead is None
        sinks = running(session, engine)
        began = time.monotonic()
        ends_once(sinks, EngineDeadError, "silent")
        assert time.monotonic() - began > 0.1
        is_dead(session, "silent")


def test_time_while_the_client_was_stopped_is_not_engine_silence() -> None:
    """As with a container that was paused together with its engine: the engine's silence in that time does not
    count."""

    def look(after_s: float) -> None:
        now[0] += after_s
        for _ in range(2):  # the second is sent after a look at the clock
            session.request_stats()
            engine.expect(GetStats)

    now = [0.0]
    with FakeEngine() as engine, session_with(engine, recovery_timeout_s=0, heartbeat_timeout_s=20) as session:
        session.link.silence = Silence(3.0, lambda: now[0])
        sinks = running(session, engine)
        look(3600)
        assert session.dead is None
        for _ in range(8):
            look(2)
        assert session.dead is None
        now[0] += 2
        session.request_stats()
        ends_once(sinks, EngineDeadError, "silent for 21 s")


def test_heartbeats_keep_a_stream_alive() -> None:
    beat_s = scaled(0.1)
    with FakeEngine() as engine, session_with(engine, heartbeat_timeout_s=5 * beat_s) as session:
        sinks = running(session, engine, 1)
        for _ in range(8):
            threading.Event().wait(beat_s)
            engine.send(Heartbeat(1, 1))
        assert session.dead is None
        assert sinks[0].is_empty()


def test_close_aborts_requests_in_flight() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sinks = running(session, engine, 3)
        session.close()
        assert {engine.expect(Abort).request_id for _ in sinks} == {"0", "1", "2"}
        ends_once(sinks, EngineError, "the client was closed")
        is_dead(session, "closed", EngineError)
        session.close()


def test_many_threads_submit_at_once() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sinks = {f"{thread}-{number}": Sink() for thread in range(8) for number in range(50)}

        def submit(thread: int) -> None:
            for number in range(50):
                name = f"{thread}-{number}"
                session.submit(Generate(name, b"", SamplingParams()), sinks[name])

        threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for _ in sinks:
            engine.finish(engine.expect(Generate).request_id, 0, 1)
        for name, sink in sinks.items():
            assert sink.next() == Finished(name, 0, [1], "length")
        for thread in threads:
            thread.join(DEADLINE_S)
