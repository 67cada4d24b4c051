"""DataParallelSession over fake engines: which engine gets a request, and the fate of requests when an engine dies."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.fakes import DEADLINE_S, FakeEngine, welcome
from vllm_lite.client.engines.data_parallel import DataParallelSession
from vllm_lite.client.engines.session import MAX_MOVES, Session
from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.errors import EngineError, RequestError
from vllm_lite.protocol import api
from vllm_lite.protocol.api import Abort, Finished, ForkRequest, Generate, Tokens
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.operations import OperationDone, PauseGeneration, ResumeGeneration
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import DraftCounts, RestartCause, Stats

PARAMS = SamplingParams(seed=7, max_tokens=16)


class Rig:
    """Two engines with one session."""

    def __init__(self, stack: ExitStack, **welcomed: Any) -> None:
        self.engines = [stack.enter_context(FakeEngine(answer=welcome(**welcomed))) for _ in range(2)]
        members = [Session.connect(engine.address, recovery_timeout_s=DEADLINE_S) for engine in self.engines]
        self.session = DataParallelSession(members, "seed")
        stack.callback(self.session.close)
        self.events: queue.Queue[Event] = queue.Queue()

    def submit(self, name: str, *tokens: int, affinity: str | None = None, **changes: Any) -> None:
        message = Generate(name, pack_tokens(list(tokens or range(9))), PARAMS, **changes)
        self.session.submit(message, self.take, affinity=affinity)

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.events.put(event)

    def next(self) -> Event:
        return self.events.get(timeout=DEADLINE_S)

    def home(self, name: str) -> int:
        """The engine that has the request, which has to be there."""
        (found,) = [index for index, member in enumerate(self.session.members) if member.is_live(name)]
        assert self.engines[found].expect(Generate).request_id == name
        return found


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(stack)


def test_prompts_that_begin_alike_share_an_engine_and_others_the_load(rig: Rig) -> None:
    first = list(range(8))
    rig.submit("one", *first, 50)
    home = rig.home("one")
    rig.submit("two", *first, 60, 61)
    assert rig.home("two") == home
    rig.submit("three", *range(100, 109))
    assert rig.home("three") == 1 - home
    with pytest.raises(RequestError, match="'three' is in use"):
        rig.submit("three")


def test_a_session_and_a_salt_stay_at_their_engine(rig: Rig) -> None:
    for number in range(3):
        rig.submit(f"s{number}", *range(number, number + 9), affinity="session")
    assert len({rig.home(f"s{number}") for number in range(3)}) == 1


def test_streams_of_an_engine_that_dies_continue_in_the_other(rig: Rig) -> None:
    rig.submit("r")
    home = rig.home("r")
    rig.engines[home].tokens("r", 0, 11, 12)
    assert rig.next() == Tokens("r", 0, [11, 12])
    rig.engines[home].die()
    moved = rig.engines[1 - home].expect(Generate)
    assert (moved.have, moved.output, moved.params.seed) == (2, pack_tokens([11, 12]), 7)
    rig.engines[1 - home].finish("r", 2, 13)
    event = rig.next()
    assert isinstance(event, Finished)
    assert (event.start, event.token_ids) == (2, [13])
    assert rig.session.dead is None
    assert rig.session.recovering is None
    rig.submit("next")  # not to the one that is gone
    assert rig.home("next") == 1 - home


def test_an_engine_that_ends_for_good_leaves_its_streams_to_the_other(rig: Rig) -> None:
    rig.submit("r")
    home = rig.home("r")
    rig.session.members[home].fail("it was restarted too often")
    assert rig.engines[1 - home].expect(Generate).request_id == "r"
    rig.engines[1 - home].finish("r", 0, 3)
    assert isinstance(rig.next(), Finished)
    assert rig.session.dead is None


def test_requests_that_wait_for_engines_are_sent_to_the_first_that_returns(rig: Rig) -> None:
    rig.submit("r")
    home = rig.home("r")
    for engine in rig.engines:
        engine.die()
    with FakeEngine(address=rig.engines[1 - home].address, epoch=2) as back:
        assert back.expect(Generate).request_id == "r"
        back.finish("r", 0, 5)
        assert isinstance(rig.next(), Finished)


def test_a_stream_moves_a_few_times_only() -> None:
    with ExitStack() as stack:
        rig = Rig(stack, is_supervised=False)
        rig.submit("r")
        stream = rig.session.members[rig.home("r")]._streams["r"]
        stream.num_moves = MAX_MOVES
        rig.engines[[member.is_live("r") for member in rig.session.members].index(True)].die()
        event = rig.next()
        assert isinstance(event, StreamFailure)


def test_an_engine_without_workers_keeps_its_requests_and_gets_no_new_ones(rig: Rig) -> None:
    rig.submit("r")
    home = rig.home("r")
    rig.engines[home].send(api.Recovering(1, "worker 0 died", 1))
    rig.engines[home].tokens("r", 0, 1)  # behind it: it has been heard
    rig.next()
    for number in range(3):  # though it has less to do than the other has with two of them
        rig.submit(f"n{number}", *range(100 * number, 100 * number + 9))
        assert rig.home(f"n{number}") == 1 - home
    assert rig.session.recovering is None
    assert rig.session.is_live("r")


def test_aborts_and_forks_find_their_engine(rig: Rig) -> None:
    rig.submit("parent")
    home = rig.home("parent")
    own = Generate("fork", pack_tokens(list(range(9))), PARAMS)
    rig.session.submit(ForkRequest("parent", "fork", 0, PARAMS), rig.take, own)
    assert rig.engines[home].expect(ForkRequest).child_id == "fork"
    rig.session.abort("parent")
    assert rig.engines[home].expect(Abort).request_id == "parent"
    rig.session.drop("fork")
    assert rig.engines[home].expect(Abort).request_id == "fork"
    rig.engines[1 - home].expect_nothing_more()


def test_questions_are_sent_to_all_engines_and_answered_once(rig: Rig) -> None:
    asked = rig.session.request_stats()
    for count, engine in enumerate(rig.engines, 1):
        engine.expect(api.GetStats)
        restarts: dict[RestartCause, int] = {"died": count}
        places: dict[str, Any] = {"drafts_by": {"ngram": DraftCounts(count, 20, 8, [7, 1][:count])}}
        engine.send(Stats(num_running=count, restarts=restarts, life=count, recovering="died" * (count == 1), **places))
    stats = asked.result(DEADLINE_S)
    assert (stats.num_running, stats.restarts, stats.life, stats.recovering) == (3, {"died": 3}, 2, "")
    assert stats.drafts_by == {"ngram": DraftCounts(3, 40, 16, [14, 1])}
    described = rig.session.describe(external_id="x")
    for name, engine in zip("ab", rig.engines, strict=True):
        engine.expect(api.Describe)
        admission = api.AdmissionState("OK", None, 1, 1, 0, 1)
        state = api.RequestState(f"theirs-{name}", admission, [], 0, 1, 0, 0, 0, 0.0, None)
        engine.send(api.Descriptions([state]))
    assert [each.request_id for each in described.result(DEADLINE_S).requests] == ["theirs-a", "theirs-b"]
    for index, name in enumerate(("theirs-a", "theirs-b")):  # attach to them, where they are; the prompt is the same
        rig.submit(name, have=3)
        assert rig.home(name) == index
    rig.engines[0].die()
    while rig.session.members[0].has_engine:
        rig.session.members[0].link.wakeup.set()
    asked = rig.session.request_stats()
    rig.engines[1].expect(api.GetStats)
    rig.engines[1].send(Stats(num_running=9))
    assert asked.result(DEADLINE_S).num_running == 9


def test_an_operation_is_for_all_engines(rig: Rig) -> None:
    """An operation fails while an engine is being replaced: the new engine would compute while the others are paused,
    or with other weights."""
    asked = rig.session.operate(PauseGeneration())
    for engine in rig.engines:
        engine.expect(PauseGeneration)
    rig.engines[0].send(OperationDone())
    rig.engines[1].die()
    with pytest.raises(EngineError, match="is being replaced and answers no questions"):
        asked.result(DEADLINE_S)
    while rig.session.members[1].has_engine:
        rig.session.members[1].link.wakeup.set()
    with pytest.raises(EngineError, match=r"is being replaced .* nothing was done, ask again"):
        rig.session.operate(ResumeGeneration())
    rig.engines[0].expect_nothing_more()
    with FakeEngine(address=rig.engines[1].address, epoch=2) as back:
        while not rig.session.members[1].has_engine:
            rig.session.members[1].link.wakeup.set()
        asked = rig.session.operate(ResumeGeneration())
        for engine in (rig.engines[0], back):
            engine.expect(ResumeGeneration)
            engine.send(OperationDone())
        assert asked.result(DEADLINE_S) == OperationDone()


def test_the_engine_for_a_request_is_told_without_recording_it() -> None:
    with ExitStack() as stack:
        rig = Rig(stack)
        request = Generate("r", pack_tokens(list(range(64))), SamplingParams())
        routing = rig.session._router
        before = repr([(each, routing._sent[each]) for each in routing.engines])
        told = {rig.session.engine_for(request) for _ in range(5)}
        assert repr([(each, routing._sent[each]) for each in routing.engines]) == before
        assert told == {rig.session.choose(request)}
        assert repr([(each, routing._sent[each]) for each in routing.engines]) != before


def test_a_stream_gets_an_error_if_its_next_engine_also_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        rig = Rig(stack, is_supervised=False)
        for name in ("r", "s"):
            rig.submit(name, affinity="session")
        home = rig.home("r")
        choose, other = rig.session.choose, rig.session.members[1 - home]

        def choose_too_late(*args: Any) -> int:
            index = choose(*args)
            other.fail("it was restarted too often")
            while other.dead is None:
                other.link.wakeup.set()
            return index

        monkeypatch.setattr(rig.session, "choose", choose_too_late)
        rig.engines[home].die()
        ends = [rig.next(), rig.next()]
        assert sorted(end.request_id for end in ends if isinstance(end, StreamFailure)) == ["r", "s"]


def test_the_end_of_all_is_the_end() -> None:
    with ExitStack() as stack:
        rig = Rig(stack, is_supervised=False)
        rig.submit("r")
        for engine in rig.engines:
            engine.die()
        assert isinstance(rig.next(), StreamFailure)
        while rig.session.dead is None:
            pass
        with pytest.raises(EngineError):
            rig.submit("more")
