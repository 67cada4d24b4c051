"""Forks and queued tokens on the server's side, against an engine that does as it is told."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from tests.unit.test_server_answer import FACTORY, WORDS, FakeSession
from vllm_lite.client.session import Session
from vllm_lite.client.stream import RequestStream
from vllm_lite.protocol.api import Finished, ForkRequest, Generate, Tokens
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.call import Call
from vllm_lite.server.calls import Calls, Limits
from vllm_lite.server.errors import ApiError
from vllm_lite.server.relay import Relay

REFUSED = "request 'parent' is not running"


class Session2(FakeSession):
    """Remembers the messages as well; what the test has ended is not live."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Any] = []
        self.ended: set[str] = set()

    def submit(self, message: Any, sink: Any) -> None:
        self.messages.append(message)
        name = message.child_id if isinstance(message, ForkRequest) else message.request_id
        self.sinks[name] = sink

    def is_live(self, request_id: str) -> bool:
        return request_id in self.sinks and request_id not in self.ended


class Desk:
    """Calls of one server."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self.session = Session2()
        self.relay = Relay(cast(Session, self.session), asyncio.get_running_loop())
        self.calls = Calls(self.relay, Limits(9, 9, 9, max_tokens), write_timeout_s=1.0)

    def call(self, name: str, num_tokens: int = 3, n: int = 1) -> Call:
        return Call(name, [FACTORY.make([5] * num_tokens, SamplingParams(n=n, max_tokens=50, seed=1), name)])


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


async def settle() -> None:
    """What was said on the session's thread has been sorted."""
    for _ in range(3):
        await asyncio.sleep(0)


def forked(desk: Desk, trunk: RequestStream) -> Call:
    return Call("child", [FACTORY.fork(trunk, None, "child")], are_forks=True)


def test_a_fork_is_sent_as_one() -> None:
    async def main() -> None:
        desk = Desk()
        parent = desk.call("parent")
        with desk.calls.run(parent):
            desk.session.say(Tokens("parent", 0, WORDS[:2]))
            await settle()
            child = forked(desk, parent.streams[0])
            with desk.calls.run(child):
                message = desk.session.messages[-1]
                assert isinstance(message, ForkRequest)
                assert (message.request_id, message.child_id, message.have) == ("parent", "child", 2)
                assert desk.relay.num_queued_tokens == 0  # its prompt is computed
                desk.session.sinks["child"]([Tokens("child", 2, WORDS[2:3])])
                await settle()
                assert child.streams[0].samples[0].token_ids == WORDS[:3]

    run(main)


@pytest.mark.parametrize("parent_ended", [True, False])
def test_a_parent_that_ended_meanwhile_is_made_up_for(parent_ended: bool) -> None:
    """The engine refuses the fork of what it has ended; the tokens are sent instead. Any other refusal stands."""

    async def main() -> None:
        desk = Desk()
        parent = desk.call("parent")
        with desk.calls.run(parent):
            desk.session.say(Tokens("parent", 0, WORDS[:2]))
            await settle()
            child = forked(desk, parent.streams[0])
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

    run(main)


# ---- queued tokens


def test_prompts_wait_until_their_first_token() -> None:
    async def main() -> None:
        desk = Desk(max_tokens=10)
        with desk.calls.run(desk.call("a", 6)):
            assert desk.relay.num_queued_tokens == 6
            says = "prompts of 6 tokens are waiting, and 5 more are too many"
            with pytest.raises(ApiError, match=says) as refused, desk.calls.run(desk.call("b", 5)):
                pass
            assert refused.value.status == 429
            assert refused.value.headers == {"Retry-After": "1"}
            assert len(desk.calls) == 1
            with desk.calls.run(desk.call("c", 4)):
                assert desk.relay.num_queued_tokens == 10
                desk.session.say(Tokens("a", 0, []))  # logprobs of its prompt, say
                await settle()
                assert desk.relay.num_queued_tokens == 10
                desk.session.say(Tokens("a", 0, WORDS[:1]))
                await settle()
                assert desk.relay.num_queued_tokens == 4
                desk.session.say(Tokens("a", 1, WORDS[1:2]))
                await settle()
                assert desk.relay.num_queued_tokens == 4
            assert desk.relay.num_queued_tokens == 0
        assert desk.relay.num_queued_tokens == 0

    run(main)


def test_a_prompt_that_finds_the_queue_empty_is_served_however_long() -> None:
    async def main() -> None:
        desk = Desk(max_tokens=10)
        with desk.calls.run(desk.call("a", 40)), pytest.raises(ApiError), desk.calls.run(desk.call("b", 1)):
            pass
        with desk.calls.run(desk.call("b", 1)):
            pass

    run(main)


def test_streams_of_several_servers_have_names_of_their_own() -> None:
    async def main() -> None:
        relay = Relay(cast(Session, FakeSession()), asyncio.get_running_loop())
        names = []
        for number in range(3):
            calls = Calls(relay, Limits(9, 9, 9), write_timeout_s=1.0, number=number)
            names += calls.stream_ids("cmpl-x", 1) + calls.stream_ids("cmpl-x", 2)
        assert names[:3] == ["cmpl-x", "cmpl-x-0", "cmpl-x-1"]
        assert len(set(names)) == 9

    run(main)


def test_a_count_of_the_past_refuses_nobody_when_the_queue_is_empty() -> None:
    async def main() -> None:
        desk = Desk()
        desk.calls = Calls(desk.relay, Limits(4, 2, 2), write_timeout_s=1.0)
        desk.calls._num_waiting = 5  # they have gone since
        with desk.calls.run(desk.call("a", n=2)), desk.calls.run(desk.call("b")):
            desk.calls.check()
            desk.calls._num_waiting = 2
            with pytest.raises(ApiError, match="max-num-queued-reqs 2"):
                desk.calls.check()

    run(main)
