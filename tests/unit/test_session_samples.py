"""A session with a fake engine where one request has several samples, or begins as a fork."""

import pytest

from tests.fakes import FakeEngine, Sink, session_with, settle, start
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.stream import StreamFailure
from vllm_lite.protocol.api import Abort, Finished, ForkRequest, Generate, Tokens
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams


def start_samples(session: Session, engine: FakeEngine, count: int, sink: Sink) -> None:
    session.submit(Generate("a", pack_tokens([1]), SamplingParams(n=count)), sink)
    engine.expect(Generate)


def test_each_sample_has_its_own_place_and_its_own_end() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start_samples(session, engine, 3, sink)
        engine.send_outputs(Tokens("a", 0, [1, 2]), Tokens("a", 0, [3], index=1), Tokens("a", 0, [4], index=2))
        engine.finish("a", 2, 5)
        engine.tokens("a", 3, 9)  # of a sample that has ended
        engine.send_outputs(Tokens("a", 0, [9], index=3))  # of a sample that was not requested
        engine.send_outputs(Tokens("a", 0, [3, 6], index=1))
        engine.finish("a", 1, index=2)
        assert session.is_live("a")
        engine.finish("a", 2, 7, index=1)
        seen = [sink.next() for _ in range(7)]
        assert [
            (event.index, event.start, event.token_ids) for event in seen if not isinstance(event, StreamFailure)
        ] == [
            (0, 0, [1, 2]),
            (1, 0, [3]),
            (2, 0, [4]),
            (0, 2, [5]),
            (1, 1, [6]),
            (2, 1, []),
            (1, 2, [7]),
        ]
        settle(session, engine)
        assert not session.is_live("a")
        start(session, engine, "a", sink)  # its id is free


def test_one_error_ends_all_samples() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start_samples(session, engine, 3, sink)
        engine.finish("a", 0, 5)
        engine.finish("a", 7, reason="error", error="too late")  # of whichever sample, wherever it stood
        assert sink.next() == Finished("a", 0, [5], "length")
        assert sink.next() == Finished("a", 7, [], "error", error="too late")
        start(session, engine, "a", sink)


def test_a_gap_in_one_sample_ends_the_request_and_waits_for_the_others_ends() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start_samples(session, engine, 3, sink)
        engine.finish("a", 0, 5)
        engine.send_outputs(Tokens("a", 2, [5], index=1))
        assert sink.next() == Finished("a", 0, [5], "length")
        assert isinstance(sink.next(), StreamFailure)
        assert engine.expect(Abort).request_id == "a"
        start(session, engine, "a", sink)
        engine.finish("a", 3, reason="abort", index=1)
        engine.finish("a", 0, reason="abort", index=2)
        engine.finish("a", 0, 8)
        assert sink.next() == Finished("a", 0, [8], "length")


@pytest.mark.parametrize("error", [False, True])
def test_the_ends_of_a_dropped_request_are_swallowed_for_each_sample(error: bool) -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start_samples(session, engine, 2, Sink())
        engine.finish("a", 0, 5, index=1)
        settle(session, engine)
        session.drop("a")
        engine.expect(Abort)
        start_samples(session, engine, 2, Sink())
        session.drop("a")
        engine.expect(Abort)
        start(session, engine, "a", sink)
        engine.finish("a", 0, reason="abort")
        if error:
            engine.finish("a", 0, reason="error", error="the logits are not finite", index=1)
        else:
            engine.finish("a", 0, reason="abort", index=1)
            engine.finish("a", 0, reason="abort")
        engine.finish("a", 0, 8)
        assert sink.next() == Finished("a", 0, [8], "length")


def test_a_fork_is_a_request_of_its_own() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        parent, child = Sink(), Sink()
        start(session, engine, "a", parent)
        message = ForkRequest("a", "b", 2, SamplingParams(seed=1))
        session.submit(message, child)
        assert engine.expect(ForkRequest) == message
        engine.tokens("b", 2, 7)
        engine.finish("a", 0, 8)
        assert child.next() == Tokens("b", 2, [7])
        assert parent.next() == Finished("a", 0, [8], "length")
        assert (session.is_live("a"), session.is_live("b")) == (False, True)


def test_samples_are_aborted_by_name_and_end_with_the_engines_event() -> None:
    with FakeEngine() as engine, session_with(engine) as session:
        sink = Sink()
        start_samples(session, engine, 3, sink)
        engine.finish("a", 0, 5, index=1)
        settle(session, engine)
        session.abort("a", (1,))  # it has ended
        session.abort("b", (0,))
        session.abort("a", (0, 1), stopped=True)
        assert engine.expect(Abort) == Abort("a", stopped=True, samples=(0,))
        engine.tokens("a", 0, 6)
        engine.finish("a", 1, reason="abort")
        engine.finish("a", 0, 7, index=2)
        assert [sink.next() for _ in range(4)] == [
            Finished("a", 0, [5], "length", index=1),
            Tokens("a", 0, [6]),
            Finished("a", 1, [], "abort"),
            Finished("a", 0, [7], "length", index=2),
        ]
        settle(session, engine)
        assert not session.is_live("a")
