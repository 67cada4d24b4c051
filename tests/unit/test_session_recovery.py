"""A session whose engine dies and is replaced: nothing is delivered twice, nothing is missing, every stream ends
once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.fakes import DEADLINE_S, STATS, FakeEngine, Sink, start, welcome
from vllm_lite.client.engines.connection import EngineSearch
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.stream import StreamFailure
from vllm_lite.errors import EngineDeadError, EngineError
from vllm_lite.protocol.api import (
    Abort,
    Dying,
    Finished,
    ForkRequest,
    Generate,
    GetStats,
    Heartbeat,
    OutputBatch,
    PromptLogprobs,
    Recovered,
    Recovering,
    Refused,
    SampleSoFar,
    TokenLogprobs,
    Tokens,
)
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import Delivery

PROMPT = pack_tokens([1, 2])
GREEDY = SamplingParams(max_tokens=9)


class Play:
    """A session, and the engines that it has one after the other."""

    def __init__(self, *, is_supervised: bool = True, **options: Any) -> None:
        self.engine = FakeEngine(answer=welcome(is_supervised=is_supervised))
        options = {"recovery_timeout_s": DEADLINE_S} | options
        self.session = Session.connect(self.engine.address, timeout_s=DEADLINE_S, **options)

    def submit(self, message: Generate | ForkRequest, own: Generate | None = None) -> Sink:
        sink = Sink()
        self.session.submit(message, sink, own)
        self.engine.expect(type(message))
        return sink

    def gone(self) -> None:
        """The engine dies, and the session knows."""
        self.engine.die()
        self.until(lambda: self.session._lost is not None)

    def back(self, **options: Any) -> FakeEngine:
        """The next one serves."""
        self.engine = self.engine.successor(**options)
        return self.engine

    def replaced(self) -> FakeEngine:
        self.gone()
        return self.back()

    def heard_no_more(self) -> None:
        """Assert that this engine was sent nothing else than the test has expected."""
        answer = self.session.request_stats()
        self.engine.expect(GetStats)
        self.engine.send(STATS)
        answer.result(DEADLINE_S)

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(int(DEADLINE_S * 200)):
            if condition():
                return
            threading.Event().wait(0.005)
        raise AssertionError("it does not happen")

    def close(self) -> None:
        self.session.close()
        self.engine.die()


@pytest.fixture
def play() -> Iterator[Play]:
    made = Play()
    yield made
    made.close()


def failure(sink: Sink) -> str:
    event = sink.next()
    assert isinstance(event, StreamFailure), event
    assert isinstance(event.error, EngineError)
    return str(event.error)


# ---- what is sent again


def test_a_stream_continues_after_the_delivered_tokens(play: Play) -> None:
    sent = Generate("a", PROMPT, GREEDY, external_id="call", context=b"mine")
    sink = play.submit(sent)
    play.engine.tokens("a", 0, 5, 6)
    assert sink.next() == Tokens("a", 0, [5, 6])
    engine = play.replaced()
    assert engine.expect(Generate) == Generate("a", PROMPT, GREEDY, 2, pack_tokens([5, 6]), "call", b"mine")
    engine.tokens("a", 1, 6, 7)  # an engine may begin a little earlier
    engine.finish("a", 3, 8)
    assert [sink.next(), sink.next()] == [Tokens("a", 2, [7]), Finished("a", 3, [8], "length")]
    assert sink.is_empty()
    assert play.session.recovering is None
    assert play.session.welcome.epoch == 2


def test_undelivered_tokens_must_not_be_missing_later(play: Play) -> None:
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    engine = play.replaced()
    assert engine.expect(Generate).have == 0
    engine.tokens("a", 1, 5)
    assert "tokens 0 to 0" in str(getattr(sink.next(), "error", None))


def test_it_happens_again_and_again(play: Play) -> None:
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    for number in range(4):
        play.engine.tokens("a", number, number)
        assert sink.next() == Tokens("a", number, [number])
        again = play.replaced().expect(Generate)
        assert (again.have, again.output) == (number + 1, pack_tokens(range(number + 1)))
    play.engine.finish("a", 4)
    assert sink.next() == Finished("a", 4, [], "length")


def test_all_are_sent_again_in_their_order_once(play: Play) -> None:
    sinks = {name: play.submit(Generate(name, PROMPT, GREEDY)) for name in "cab"}
    play.engine.finish("a", 0)
    assert isinstance(sinks["a"].next(), Finished)
    play.gone()
    late = Sink()
    play.session.submit(Generate("late", PROMPT, GREEDY), late)  # it waits for the next engine
    engine = play.back()
    assert [engine.expect(Generate).request_id for _ in range(3)] == ["c", "b", "late"]
    play.heard_no_more()
    engine.finish("late", 0, 1)
    assert late.next() == Finished("late", 0, [1], "length")


def test_unsent_messages_are_sent_once(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play.session.link._connection, "send", lambda _: Delivery.BUSY)
    play.session.submit(Generate("a", PROMPT, GREEDY), Sink())
    engine = play.replaced()
    assert engine.expect(Generate).request_id == "a"
    play.heard_no_more()


def test_resumed_samples_have_their_tokens_without_ended_ones(play: Play) -> None:
    params = GREEDY.clone(n=4)
    sink = play.submit(Generate("a", PROMPT, params))
    play.engine.send_outputs(
        Tokens("a", 0, [5]), Tokens("a", 0, [6, 7], index=2), Finished("a", 0, [8], "stop", index=1)
    )
    assert len([sink.next() for _ in range(3)]) == 3
    again = play.replaced().expect(Generate)
    samples = (SampleSoFar(0, pack_tokens([5])), SampleSoFar(2, pack_tokens([6, 7])), SampleSoFar(3))
    assert again == Generate("a", PROMPT, params, samples=samples)
    rest = ((0, 1), (2, 2), (3, 0))
    for index, have in rest:
        play.engine.finish("a", have, index=index)
    assert [sink.next() for _ in rest] == [Finished("a", have, [], "length", index=index) for index, have in rest]
    assert not play.session.is_live("a")


def test_samples_without_a_token_begin_with_the_prompt(play: Play) -> None:
    message = Generate("a", PROMPT, GREEDY.clone(n=4))
    play.submit(message)
    assert play.replaced().expect(Generate) == message


def test_beams_begin_anew(play: Play) -> None:
    message = Generate("a", PROMPT, SamplingParams(n=2, use_beam_search=True, temperature=0.0))
    sink = play.submit(message)
    engine = play.replaced()
    assert engine.expect(Generate) == message
    engine.send_outputs(*(Finished("a", 0, [index], "length", index=index) for index in range(2)))
    assert [sink.next().index for _ in range(2)] == [0, 1]  # type: ignore[union-attr]


def test_beams_begin_anew_whatever_has_come_of_them(play: Play) -> None:
    message = Generate("a", PROMPT, SamplingParams(n=2, use_beam_search=True, temperature=0.0))
    sink = play.submit(message)
    play.engine.finish("a", 0, 7)
    sink.next()
    engine = play.replaced()
    assert engine.expect(Generate) == message
    engine.send_outputs(*(Finished("a", 0, [index], "length", index=index) for index in range(2)))
    assert sink.next() == Finished("a", 0, [1], "length", index=1)


def test_logprobs_of_the_prompt_are_counted(play: Play) -> None:
    sink = play.submit(Generate("a", pack_tokens([1, 2, 3, 4]), GREEDY.clone(prompt_logprobs=0)))
    one = TokenLogprobs(-1.0, 1, ())
    play.engine.send_outputs(Tokens("a", 0, [], prompt=PromptLogprobs(1, [one, one])))
    sink.next()
    again = play.replaced().expect(Generate)
    assert (again.num_scored, again.have) == (3, 0)


def test_a_fork_continues_without_its_parent(play: Play) -> None:
    parent = play.submit(Generate("parent", PROMPT, GREEDY))
    play.engine.tokens("parent", 0, 5, 6)
    parent.next()
    params = GREEDY.clone(seed=3)
    own = Generate("child", PROMPT, params, 2, pack_tokens([5, 6]))
    sink = play.submit(ForkRequest("parent", "child", 2, params, "call", b"mine"), own)
    play.engine.tokens("child", 2, 7)
    sink.next()
    play.engine.finish("parent", 2)
    parent.next()
    engine = play.replaced()
    assert engine.expect(Generate) == Generate("child", PROMPT, params, 3, pack_tokens([5, 6, 7]), "call", b"mine")
    engine.finish("child", 3, 8)
    assert sink.next() == Finished("child", 3, [8], "length")


def test_requests_without_a_known_prompt_cannot_be_started_again(play: Play) -> None:
    fork = play.submit(ForkRequest("parent", "child", 2, GREEDY))
    attached = play.submit(Generate("b", PROMPT, GREEDY, have=3))
    play.replaced()
    for sink in (fork, attached):
        assert "cannot be started again" in failure(sink)
        assert sink.is_empty()


def test_the_remaining_time_of_a_deadline_is_sent(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("vllm_lite.client.streams.open_stream.monotonic", lambda: now_s[0])
    short = play.submit(Generate("short", PROMPT, GREEDY.clone(deadline_ms=500)))
    play.submit(Generate("long", PROMPT, GREEDY.clone(deadline_ms=5000)))
    play.engine.tokens("short", 0, 5)
    short.next()
    play.gone()
    now_s[0] += 1.0
    assert short.next() == Finished("short", 1, [], "error", error="the deadline of 500 ms passed")  # with no engine
    assert not play.session.is_live("short")
    again = play.back().expect(Generate)
    assert (again.request_id, again.params.deadline_ms) == ("long", 4000)
    assert short.is_empty()


# ---- how it is noticed


@pytest.mark.parametrize(
    "say",
    [
        lambda engine: engine.send(Dying("worker 0 died", is_final=False)),
        lambda engine: engine.send(Refused("say Hello first")),
        lambda engine: engine.send(Heartbeat(7, 1)),
        lambda engine: engine.send(OutputBatch(7, [Tokens("a", 0, [9])])),
        lambda engine: engine.send(Recovering(7, "of another epoch", 1)),
    ],
)
def test_an_engine_that_is_another_one_is_greeted_again(play: Play, say: Callable[[FakeEngine], None]) -> None:
    """The new engine may be there already, at the same address."""
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    say(play.engine)
    assert play.engine.expect(Generate).request_id == "a"
    assert len(play.engine.hellos) == 2
    play.engine.finish("a", 0, 1)
    assert sink.next() == Finished("a", 0, [1], "length")
    assert sink.is_empty()


def test_silence_is_noticed_and_the_next_one_may_speak() -> None:
    play = Play(heartbeat_timeout_s=scaled(0.3))
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    assert play.engine.expect(Generate).request_id == "a"  # it hangs no more
    play.engine.finish("a", 0, 1)
    assert sink.next() == Finished("a", 0, [1], "length")
    play.close()


def test_an_end_that_is_final_is_final(play: Play) -> None:
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    play.engine.send(Dying("worker 0 died eleven times"))
    assert failure(sink) == "worker 0 died eleven times"
    assert isinstance(play.session.dead, EngineDeadError)


# ---- meanwhile


def test_an_abort_ends_the_stream_at_once(play: Play) -> None:
    before, meanwhile, part = (
        play.submit(Generate(name, PROMPT, params))
        for name, params in (("before", GREEDY), ("meanwhile", GREEDY), ("part", GREEDY.clone(n=3)))
    )
    play.engine.tokens("meanwhile", 0, 5)
    meanwhile.next()
    play.session.abort("before")
    play.engine.expect(Abort)
    play.gone()
    assert before.next() == Finished("before", 0, [], "abort")
    play.session.abort("meanwhile")
    assert meanwhile.next() == Finished("meanwhile", 1, [], "abort")
    play.session.abort("part", [0, 2])
    assert [part.next(), part.next()] == [Finished("part", 0, [], "abort", index=index) for index in (0, 2)]
    assert not play.session.is_live("before")
    engine = play.back()
    assert engine.expect(Generate) == Generate("part", PROMPT, GREEDY.clone(n=3), samples=(SampleSoFar(1),))
    play.heard_no_more()
    engine.finish("part", 0, 1, index=1)
    assert part.next() == Finished("part", 0, [1], "length", index=1)
    for sink in (before, meanwhile, part):
        assert sink.is_empty()


def test_an_abort_just_before_all_is_sent_again_is_not_lost(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Any] = []

    def sink(events: list[Any]) -> None:
        ends.extend(events)
        play.session.abort("second")

    def step(search: EngineSearch, wakeup: Wakeup) -> Any:
        found = look(search, wakeup)
        if found is not None:
            play.session.abort("first")
        return found

    look = EngineSearch.step
    monkeypatch.setattr(EngineSearch, "step", step)
    play.session.submit(Generate("first", PROMPT, GREEDY), sink)
    second = play.submit(Generate("second", PROMPT, GREEDY))
    engine = play.replaced()
    assert engine.expect(Generate).request_id == "second"
    assert engine.expect(Abort).request_id == "second"
    engine.send(OutputBatch(engine.epoch, [Finished("second", 0, [], "abort")]))
    assert second.next() == Finished("second", 0, [], "abort")
    assert ends == [Finished("first", 0, [], "abort")]


def test_a_beam_search_with_an_aborted_sample_is_sent_again_whole(play: Play) -> None:
    message = Generate("a", PROMPT, SamplingParams(n=2, use_beam_search=True, temperature=0.0))
    sink = play.submit(message)
    play.session.abort("a", [1])
    assert play.replaced().expect(Generate) == message
    assert sink.is_empty()


def test_a_dropped_stream_is_forgotten_with_its_engine(play: Play) -> None:
    """The old engine owes its end; the next one has never heard of it."""
    before, meanwhile, again = (
        play.submit(Generate("x", PROMPT, GREEDY)),
        play.submit(Generate("y", PROMPT, GREEDY)),
        Sink(),
    )
    play.session.drop("x")
    play.engine.expect(Abort)
    play.gone()
    play.session.drop("y")
    play.session.submit(Generate("x", PROMPT, GREEDY), again)
    engine = play.back()
    assert engine.expect(Generate).request_id == "x"
    engine.finish("x", 0, 1)
    assert again.next() == Finished("x", 0, [1], "length")
    play.heard_no_more()
    assert before.is_empty()
    assert meanwhile.is_empty()


def test_questions_are_not_asked_twice(play: Play) -> None:
    pending = play.session.request_stats()
    play.engine.expect(GetStats)
    play.gone()
    with pytest.raises(EngineDeadError, match="the engine is being replaced and answers no questions: the engine died"):
        pending.result(DEADLINE_S)
    with pytest.raises(EngineDeadError, match="is being replaced"):
        play.session.describe(["a"])
    play.back()
    play.until(lambda: play.session.recovering is None)
    play.heard_no_more()


def test_why_streams_pause(play: Play) -> None:
    play.submit(Generate("a", PROMPT, GREEDY))
    assert play.session.recovering is None
    play.engine.send(Recovering(1, "worker 0 died", 1))
    play.until(lambda: play.session.recovering == "worker 0 died")
    play.engine.send(Recovered(1, 2, 0.5))
    play.until(lambda: play.session.recovering is None)
    play.engine.send(Recovering(1, "worker 1 died", 1))
    play.until(lambda: play.session.recovering == "worker 1 died")
    play.gone()
    assert play.session.recovering == f"the engine died: it closed its connection at {play.engine.address}"
    play.back()
    play.until(lambda: play.session.recovering is None)


# ---- no other engine


def test_there_is_none_within_the_time() -> None:
    timeout_s = scaled(0.2)  # another value each time: the load changes
    play = Play(recovery_timeout_s=timeout_s)
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    play.engine.die()
    said = failure(sink)
    assert said.startswith("the engine died: it closed its connection")
    assert said.endswith(f"no other engine took its place within {timeout_s:g} s")
    with pytest.raises(EngineDeadError, match="no other engine"):
        play.session.submit(Generate("b", PROMPT, GREEDY), Sink())
    play.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (welcome(model="other", epoch=2), "the one that took its place serves 'other', not 'fake'"),
        (Refused("weights are missing", bad_input=True), "that takes its place cannot start: weights are missing"),
    ],
)
def test_an_engine_that_cannot_take_its_place(play: Play, answer: Any, why: str) -> None:
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    play.gone()
    play.back(answer=answer)
    assert why in failure(sink)


def test_an_engine_that_fails_to_start_may_be_followed_by_another(play: Play) -> None:
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    play.gone()
    engine = play.back(answer=Refused("a worker died"))
    play.until(lambda: len(engine.hellos) >= 2)
    assert play.back().expect(Generate).request_id == "a"
    assert sink.is_empty()


def test_an_engine_that_dies_while_it_loads_is_followed_by_another(play: Play) -> None:
    play.submit(Generate("a", PROMPT, GREEDY))
    play.gone()
    engine = play.back(silent=True)
    play.until(lambda: len(engine.hellos) == 1)
    assert play.back().expect(Generate).request_id == "a"


@pytest.mark.parametrize("told", [False, True])
def test_whoever_watches_it_may_know_that_none_will_come(told: bool) -> None:
    end: list[str] = []
    play = Play(alive=lambda: end[0] if end else None)
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    play.gone()
    play.session.fail("exit status 2") if told else end.append("exit status 2")
    assert failure(sink) == "the engine died: exit status 2"
    play.close()


def test_close_ends_the_search(play: Play) -> None:
    sink = play.submit(Generate("a", PROMPT, GREEDY))
    play.gone()
    play.session.close()
    assert failure(sink) == "the client was closed"
    assert not play.session._thread.is_alive()


# ---- several sessions


def test_an_engine_without_a_supervisor_is_not_waited_for() -> None:
    with ExitStack() as stack:
        play = Play(is_supervised=False)
        stack.callback(play.close)
        sink = play.submit(Generate("a", PROMPT, GREEDY))
        play.engine.die()
        assert "closed its connection" in failure(sink)
        assert play.session.dead is not None


def test_an_engine_that_is_gone_for_good_does_not_disturb_the_other() -> None:
    """Each has its own engine here; they share the sink, as the calls of one server do."""
    with ExitStack() as stack:
        lost, kept = Play(recovery_timeout_s=0), Play()
        stack.callback(lost.close)
        stack.callback(kept.close)
        sink = Sink()
        for play, name in ((lost, "lost"), (kept, "kept")):
            start(play.session, play.engine, name, sink)
        lost.engine.die()
        assert "closed its connection" in failure(sink)
        kept.engine.finish("kept", 0, 1)
        assert sink.next() == Finished("kept", 0, [1], "length")
        assert kept.session.recovering is None
