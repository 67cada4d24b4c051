"""Forks and queued tokens on the server's side, against an engine that the test plays."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from tests.unit.resumable_stage import asking
from tests.unit.test_server_response import FACTORY, STYLE, WORDS, FakeSession
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.stream import RequestStream
from vllm_lite.protocol.api import (
    MAX_CONTEXT_BYTES,
    Abort,
    AdmissionState,
    Descriptions,
    Finished,
    ForkRequest,
    Generate,
    RequestContent,
    RequestState,
    SampleState,
    TokenLogprobs,
    Tokens,
)
from vllm_lite.protocol.codec import pack_tokens, unpack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.calls.call import Call, CallContext
from vllm_lite.server.calls.dispatcher import Dispatcher
from vllm_lite.server.calls.registry import Calls, QueueLimits
from vllm_lite.server.calls.response import as_error
from vllm_lite.server.calls.resumable import ResumableCalls
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.live_requests import LiveRequests
from vllm_lite.server.openai.bodies import ForkBody
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.processes.scoreboard import Scoreboard

REFUSED = "request 'parent' is not running"


class Session2(FakeSession):
    """A session that records messages; ids in `ended` are not live."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Any] = []
        self.ended: set[str] = set()
        self.known: list[RequestState] = []

    def submit(self, message: Any, sink: Any, own: Any = None, affinity: Any = None) -> None:  # noqa: ARG002
        self.messages.append(message)
        name = message.child_id if isinstance(message, ForkRequest) else message.request_id
        self.sinks[name] = sink

    def is_live(self, request_id: str) -> bool:
        return request_id in self.sinks and request_id not in self.ended

    def describe(self, external_id: str, *, with_content: bool) -> "Future[Descriptions]":
        del external_id, with_content
        answer: Future[Descriptions] = Future()
        answer.set_result(Descriptions(self.known))
        return answer


class Desk:
    """Calls of one server."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self.session = Session2()
        self.dispatcher = Dispatcher(cast(Session, self.session), asyncio.get_running_loop())
        self.calls = Calls(self.dispatcher, QueueLimits(9, 9, 9, max_tokens))

    def call(self, name: str, num_tokens: int = 3, n: int = 1) -> Call:
        return Call(name, [FACTORY.make([5] * num_tokens, SamplingParams(n=n, max_tokens=50, seed=1), name)], STYLE)


async def settle() -> None:
    """Wait until everything sent on the session's thread has been sorted."""
    for _ in range(3):
        await asyncio.sleep(0)


@asynccontextmanager
async def begun() -> AsyncIterator[tuple[Desk, Call]]:
    """A running call that has generated two words."""
    desk = Desk()
    parent = desk.call("parent")
    with desk.calls.run(parent):
        desk.session.say(Tokens("parent", 0, WORDS[:2]))
        await settle()
        yield desk, parent


def forked(parent: RequestStream) -> Call:
    return Call("child", [FACTORY.fork(parent, None, "child")], STYLE, are_forks=True)


async def test_a_fork_is_sent_as_one() -> None:
    async with begun() as (desk, parent):
        child = forked(parent.streams[0])
        with desk.calls.run(child):
            message = desk.session.messages[-1]
            assert isinstance(message, ForkRequest)
            assert (message.request_id, message.child_id, message.have) == ("parent", "child", 2)
            assert desk.dispatcher.num_queued_tokens == 0  # its prompt is computed
            desk.session.sinks["child"]([Tokens("child", 2, WORDS[2:3])])
            await settle()
            assert child.streams[0].samples[0].token_ids == WORDS[:3]


@pytest.mark.parametrize("parent_ended", [True, False])
async def test_a_parent_that_ended_meanwhile_is_made_up_for(parent_ended: bool) -> None:
    """The engine refuses to fork a request that has ended; its tokens are then sent as a new request. Other refusals
    are errors."""

    async with begun() as (desk, parent):
        child = forked(parent.streams[0])
        with desk.calls.run(child):
            if parent_ended:
                desk.session.ended.add("parent")
            desk.session.sinks["child"]([Finished("child", 2, [], "error", error=REFUSED)])
            await settle()
            if not parent_ended:
                assert str(child.error) == REFUSED
                return
            message = desk.session.messages[-1]
            assert isinstance(message, Generate)
            assert (message.request_id, message.have, unpack_tokens(message.output)) == ("child", 2, WORDS[:2])
            desk.session.sinks["child"]([Finished("child", 2, [], "error", error="again")])
            await settle()
            assert str(child.error) == "again"  # once


async def test_an_engines_refusal_of_a_fork_is_the_clients_error() -> None:
    """A refusal after the parent's tokens only is the client's error; after tokens of the fork itself it is the
    server's."""

    async with begun() as (desk, parent):
        for own, status in ([], 400), (WORDS[2:3], 500):
            child = forked(parent.streams[0])
            with desk.calls.run(child):
                desk.session.sinks["child"]([Tokens("child", 2, own)])
                desk.session.sinks["child"]([Finished("child", 2 + len(own), [], "error", error="max_tokens")])
                await settle()
                assert as_error(child).status == status


async def test_a_fork_without_a_token_of_its_own_has_not_begun_when_the_server_ends() -> None:
    async with begun() as (desk, parent):
        child = forked(parent.streams[0])
        with desk.calls.run(child):
            desk.calls.abort_all()
            assert (parent.was_cut, child.was_cut) == (False, True)
            assert as_error(child).status == 503
            child.was_cut = False
            desk.session.sinks["child"]([Tokens("child", 2, WORDS[2:3])])
            await settle()
            desk.calls.abort_all()
            assert not child.was_cut


def known(output: list[int], scores: list[TokenLogprobs], **params: Any) -> tuple[CallContext, RequestState]:
    """A request that runs on another server, as the engine describes it."""
    admission = AdmissionState("OK", None, 1, 1, 0, 1)
    samples, numbers = [SampleState(0, "running", None, 3, len(output), 1, 0)], (0, 3, 0, 0, 0)
    wanted = SamplingParams(max_tokens=50, seed=1, **params)
    content = RequestContent(wanted, pack_tokens([5] * 3), pack_tokens(output), scores)
    state = RequestState("parent@1", admission, samples, *numbers, 1.0, None, content=content)
    return CallContext(1, 0, 1, False, STYLE), state


async def fork(member: tuple[CallContext, RequestState], body: ForkBody) -> Call:
    desk = Desk()
    desk.session.known = [msgspec.structs.replace(member[1], context=msgspec.msgpack.encode(member[0]))]
    live = LiveRequests(desk.calls, ResumableCalls(desk.calls, 30.0), FACTORY, cast(BodyReader, None))
    request = asking("cmpl-parent")
    return await live.forks_of(*await live.parent_of("cmpl-parent", request), body, request)


async def test_a_fork_continues_from_the_engines_tokens() -> None:
    """Tokens, text and logprobs; a stop string in what is inherited does not count."""

    entries = [TokenLogprobs(-1.0, 1, ()), TokenLogprobs(-2.0, 1, ()), TokenLogprobs(-3.0, 1, ())]
    parent = known(WORDS[:3], entries, logprobs=0, stop=("upon",))
    call = await fork(parent, ForkBody(n=2, return_token_ids=True))
    assert call.style.token_ids
    assert call.id.startswith("chatcmpl-")
    for index, stream in enumerate(call.streams):
        (sample,) = stream.samples
        assert (sample.token_ids, sample.text, sample.finish_reason) == (WORDS[:3], "Once upon a", None)
        scores = [each[token].logprob for each, token in zip(sample.logprobs or (), WORDS, strict=False)]
        assert scores == [-1, -2, -3]
        message = call.message(index)
        assert isinstance(message, ForkRequest)
        assert (message.request_id, message.have, message.external_id) == ("parent@1", 3, call.id)
        context = msgspec.msgpack.decode(message.context, type=CallContext)
        assert context == CallContext(call.created, index, 2, True, call.style)


async def test_a_fork_with_logprobs_of_its_prompt_computes_them() -> None:
    call = await fork(known(WORDS[:2], [], prompt_logprobs=1), ForkBody())
    message = call.message(0)
    assert isinstance(message, Generate)
    assert (message.have, unpack_tokens(message.output)) == (2, WORDS[:2])
    assert message.params.prompt_logprobs == 1


@pytest.mark.parametrize(("max_tokens", "status"), [(2048, None), (2049, 400), (10**9, 400)])
async def test_a_fork_may_ask_for_the_context_and_no_more(max_tokens: int, status: int | None) -> None:
    """As for any request; tokens that do not fit after the prompt are cut off by the engine."""

    parent = known(WORDS[:2], [])
    if status is None:
        call = await fork(parent, ForkBody(max_tokens=max_tokens))
        assert call.streams[0].params.max_tokens == max_tokens
        return
    with pytest.raises(ApiError, match="maximum context length is 2048 tokens") as caught:
        await fork(parent, ForkBody(max_tokens=max_tokens))
    assert (caught.value.status, caught.value.param) == (status, "max_tokens")
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("num_kept", [0, 2])
async def test_a_fork_without_all_logprobs_is_refused(num_kept: int) -> None:
    """Each of its tokens has to have some, and the engine keeps only so many."""

    with pytest.raises(ApiError, match="more logprobs than are kept") as refused:
        await fork(known(WORDS[:3], [TokenLogprobs(-1.0, 1, ())] * num_kept, logprobs=0), ForkBody())
    assert refused.value.status == 409


async def test_a_call_of_this_server_is_known_until_its_answer_is_sent() -> None:
    """Also after the engine has ended the call; it is then finished and cannot be forked."""

    desk = Desk()
    live = LiveRequests(desk.calls, ResumableCalls(desk.calls, 30.0), FACTORY, cast(BodyReader, None))
    call = Call("parent", desk.call("parent").streams, AnswerStyle("cmpl", "demo", ("Once",)))
    with desk.calls.run(call):
        desk.session.say(Tokens("parent", 0, WORDS[:1]))
        await settle()
        assert await live.parent_of("parent", asking("parent")) == (call.streams[0], call.style)
        desk.session.say(Finished("parent", 1, WORDS[1:2], "length"))
        await settle()
        ((context, state),) = await live.members("parent", "parent")
        assert context == call.context(0)
        assert (state.num_prompt, state.num_output, state.priority) == (3, 2, 0)  # type: ignore[union-attr]
        with pytest.raises(ApiError, match="has finished") as refused:
            await live.parent_of("parent", asking("parent"))
        assert refused.value.status == 409
    with pytest.raises(ApiError, match="no request 'parent' is running"):
        await live.members("parent", "parent")


async def test_a_call_that_starts_while_the_engine_is_asked_is_not_said_to_have_finished() -> None:
    desk = Desk()
    live = LiveRequests(desk.calls, ResumableCalls(desk.calls, 30.0), FACTORY, cast(BodyReader, None))
    answer: Future[Descriptions] = Future()
    desk.session.describe = lambda **_: answer  # type: ignore[method-assign]
    asked = asyncio.ensure_future(live.members("parent", "parent"))
    await settle()
    with desk.calls.run(desk.call("parent")):
        answer.set_result(Descriptions([]))
        with pytest.raises(ApiError, match="no request 'parent' is running"):
            await asked


@pytest.mark.parametrize(("length", "is_kept"), [(15_000, True), (16_000, False)])
async def test_a_context_fits_with_the_longest_echo(length: int, is_kept: bool) -> None:
    call = Call("call", Desk().call("call").streams, AnswerStyle("cmpl", "demo", ("\U0001f600" * length,)))
    message = call.message(0)
    assert len(message.context) < MAX_CONTEXT_BYTES
    assert bool(call.context(0).style.echo) == is_kept


# ---- how many may wait


async def test_every_sample_of_a_request_counts() -> None:
    desk = Desk()
    desk.calls = Calls(desk.dispatcher, QueueLimits(2, 4, 4))
    many = Call("many", [FACTORY.make([5], SamplingParams(seed=1), f"many-{place}") for place in range(7)], STYLE)
    says = "7 sequences, n for each prompt; at most 6 may run and wait here .--max-num-queued-reqs 4.: send fewer"
    for call in (many, desk.call("many", n=7)):
        with pytest.raises(ApiError, match=says) as refused, desk.calls.run(call):
            pass
        assert refused.value.status == 400
    with desk.calls.run(desk.call("a", n=4)):
        with (
            pytest.raises(ApiError, match="the maximum number of requests is waiting") as refused,
            desk.calls.run(desk.call("b", n=3)),
        ):
            pass
        assert refused.value.status == 429
        with desk.calls.run(desk.call("c", n=2)):
            assert desk.dispatcher.num_sequences == 6
    desk.calls = Calls(desk.dispatcher, QueueLimits(9, 4, 4))
    with desk.calls.run(desk.call("a", n=5)):
        desk.calls.num_waiting = 3  # for blocks, not for a place in the batch
        desk.calls.check(1)
        with pytest.raises(ApiError, match="the maximum number of requests is waiting"):
            desk.calls.check(2)


# ---- queued tokens


async def test_prompts_wait_until_their_first_token() -> None:
    desk = Desk(max_tokens=10)
    with desk.calls.run(desk.call("a", 6)):
        assert desk.dispatcher.num_queued_tokens == 6
        says = "prompts of 6 tokens are waiting, and 5 more are too many"
        with pytest.raises(ApiError, match=says) as refused, desk.calls.run(desk.call("b", 5)):
            pass
        assert refused.value.status == 429
        assert refused.value.headers == {"Retry-After": "1"}
        assert len(desk.calls) == 1
        with desk.calls.run(desk.call("c", 4)):
            assert desk.dispatcher.num_queued_tokens == 10
            desk.session.say(Tokens("a", 0, []))  # logprobs of its prompt, say
            await settle()
            assert desk.dispatcher.num_queued_tokens == 10
            desk.session.say(Tokens("a", 0, WORDS[:1]))
            await settle()
            assert desk.dispatcher.num_queued_tokens == 4
            desk.session.say(Tokens("a", 1, WORDS[1:2]))
            await settle()
            assert desk.dispatcher.num_queued_tokens == 4
        assert desk.dispatcher.num_queued_tokens == 0
    assert desk.dispatcher.num_queued_tokens == 0


async def test_a_prompt_that_finds_the_queue_empty_is_served_however_long() -> None:
    desk = Desk(max_tokens=10)
    with desk.calls.run(desk.call("a", 40)), pytest.raises(ApiError), desk.calls.run(desk.call("b", 1)):
        pass
    with desk.calls.run(desk.call("b", 1)):
        pass


async def test_streams_of_several_servers_have_names_of_their_own() -> None:
    dispatcher = Dispatcher(cast(Session, FakeSession()), asyncio.get_running_loop())
    names, board = [], Scoreboard(3)
    for number in range(3):
        calls = Calls(dispatcher, QueueLimits(9, 9, 9), Scoreboard(3, number, board.fd))
        names += calls.stream_ids("cmpl-x", 1) + calls.stream_ids("cmpl-x", 2)
    assert names[:3] == ["cmpl-x", "cmpl-x-0", "cmpl-x-1"]
    assert len(set(names)) == 9


async def test_an_outdated_count_refuses_no_request_if_the_queue_is_empty() -> None:
    desk = Desk()
    desk.calls = Calls(desk.dispatcher, QueueLimits(4, 2, 2))
    desk.calls.num_waiting = 5  # they have gone since
    with desk.calls.run(desk.call("a", n=2)), desk.calls.run(desk.call("b")):
        desk.calls.check()
        desk.calls.num_waiting = 2
        with pytest.raises(ApiError, match="max-num-queued-reqs 2"):
            desk.calls.check()


async def test_a_sample_that_met_a_stop_string_is_ended_in_the_engine() -> None:
    desk = Desk()
    params = SamplingParams(n=2, max_tokens=50, seed=1, stop=("bear",))
    call = Call("call", [FACTORY.make([5], params, "call")], STYLE)
    with desk.calls.run(call):
        desk.session.say(Tokens("call", 0, WORDS, index=1), Tokens("call", 0, WORDS[:1]))
        await settle()
        desk.session.say(Tokens("call", 1, WORDS[1:2]))
        await settle()
        assert desk.session.heard == [Abort("call", stopped=True, samples=(1,))]
        assert [sample.finish_reason for sample in call.streams[0].samples] == [None, "stop"]
