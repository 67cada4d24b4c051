"""A resumable stream that is requested at another API server than its own. That server restores it from the engine's
state."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.unit.resumable_stage import CHAT, WORDS, Client, Stage, asking, content, events_in, settle
from vllm_lite.errors import EngineDeadError
from vllm_lite.protocol.api import (
    AdmissionState,
    Finished,
    Generate,
    RequestContent,
    RequestState,
    SampleState,
    TokenLogprobs,
    Tokens,
)
from vllm_lite.protocol.codec import pack_tokens, unpack_tokens
from vllm_lite.server.calls import registry
from vllm_lite.server.openai.bodies import ChatBody, ChatMessage, CompletionBody
from vllm_lite.server.openai.errors import ApiError

SCORES = [TokenLogprobs(-0.5 - place, 1, ((5, -2.0),)) for place in range(len(WORDS))]
TAKEN = "another client took over request 'chatcmpl-1' by sending it again"


def described(
    message: Generate, num_output: int, scores: Sequence[TokenLogprobs] = (), output: list[int] = WORDS
) -> RequestState:
    """Describe the request that `message` has started, as an engine does."""
    content = RequestContent(message.params, message.prompt, pack_tokens(output[:num_output]), list(scores))
    admission, sample = AdmissionState("OK", None, 1, 1, 0, 1), SampleState(0, "running", None, 3, num_output, 1, 0)
    numbers = (0, 3, 0, 0, 0, 1.0, None)
    return RequestState(message.request_id, admission, [sample], *numbers, context=message.context, content=content)


class Pair:
    """Two API servers of one engine; the first has the call, and its client has two tokens."""

    def __init__(self) -> None:
        self.first, self.second = Stage(num_servers=2), Stage(num_servers=2)

    async def begin(self, body: Any = None, **settings: Any) -> Client:
        client = self.first.start(body, **settings)
        await settle()
        (message,) = self.first.session.messages
        scores = SCORES[:2] if message.params.logprobs is not None else None
        await self.first.say(Tokens(message.request_id, 0, WORDS[:2], scores))
        client.go()
        await client.ended()
        self.know(3)
        return client

    def know(self, num_output: int, scores: Sequence[TokenLogprobs] = (), output: list[int] = WORDS) -> None:
        (message,) = self.first.session.messages[:1]
        for stage in (self.first, self.second):
            stage.session.known = [described(message, num_output, scores, output)]


def last_id(client: Client) -> str:
    return events_in(client.data)[-1][0]


@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_it_continues_from_the_engines_state(with_logprobs: bool) -> None:
    pair = Pair()
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if with_logprobs else {}
    client = await pair.begin(ChatBody(**CHAT, **more), key=b"k", logprobs=1 if with_logprobs else None)
    scores = SCORES if with_logprobs else None
    pair.know(3, SCORES[:3] if with_logprobs else ())
    again = await pair.second.resume(last=last_id(client), key=b"k")
    await settle()
    (original,), (message,) = pair.first.session.messages, pair.second.session.messages
    assert (message.request_id, message.prompt, message.params) == (
        original.request_id,
        original.prompt,
        original.params,
    )
    assert (message.have, unpack_tokens(message.output)) == (3, WORDS[:3])
    assert (message.external_id, message.context) == (original.external_id, original.context)
    assert message.external_id.startswith("chatcmpl-1~")
    name = message.request_id
    await pair.second.say(Finished(name, 3, WORDS[3:], "length", logprobs=scores and scores[3:]))
    await again.ended()
    found = content([data for _, data in events_in(client.data) + events_in(again.data)])
    assert (found[0]["text"], found[0]["roles"], found["done"]) == ("Once \N{BEAR FACE} upon a bear", 1, 1)
    assert len(found[0]["scores"]) == (len(WORDS) if with_logprobs else 0)
    assert pair.second.kept.unread_s(name) == 0.0


async def test_the_first_server_takes_it_back() -> None:
    """The engine has ended the first server's stream, and its error is not shown to anybody."""

    pair = Pair()
    client = await pair.begin()
    other = await pair.second.resume(last=last_id(client))
    await pair.first.say(Finished("chatcmpl-1", 2, [], "error", error=TAKEN))
    await pair.second.say(Tokens("chatcmpl-1", 3, WORDS[3:6]))
    other.go()
    await other.ended()
    pair.know(6)
    again = await pair.first.resume(last=last_id(other))
    await settle()
    assert pair.first.session.messages[1].have == 6
    await pair.first.say(Finished("chatcmpl-1", 6, WORDS[6:], "length"))
    await again.ended()
    found = content([data for each in (client, other, again) for _, data in events_in(each.data)])
    assert (found[0]["text"], found["errors"], found["done"]) == ("Once \N{BEAR FACE} upon a bear", [], 1)
    assert len(pair.first.kept) == 1


async def test_an_error_of_its_own_is_shown_if_it_runs_nowhere() -> None:
    pair = Pair()
    client = await pair.begin()
    await pair.first.say(Finished("chatcmpl-1", 2, [], "error", error="it took too much"))
    pair.first.session.known = []
    again = await pair.first.resume(last=last_id(client))
    await again.ended()
    assert "it took too much" in content([data for _, data in events_in(again.data)])["errors"]


async def test_a_stop_string_in_known_text_ends_it() -> None:
    pair = Pair()
    client = await pair.begin(stop=(" a",))
    pair.know(len(WORDS))
    again = await pair.second.resume(last=last_id(client))
    await again.ended()
    assert pair.second.session.messages == []
    found = content([data for _, data in events_in(client.data) + events_in(again.data)])
    assert (found[0]["text"], found[0]["ends"], found["done"]) == ("Once \N{BEAR FACE} upon", ["stop"], 1)
    assert len(pair.second.calls) == 0


async def test_a_deadline_stays_where_it_is() -> None:
    """The deadline counts from the arrival, which is then at the second server."""

    pair = Pair()
    client = await pair.begin(deadline_ms=60_000)
    (state,) = pair.second.session.known
    pair.second.session.known = [msgspec.structs.replace(state, deadline_in_s=12.5)]
    (await pair.second.resume(last=last_id(client))).go()
    await settle()
    assert pair.second.session.messages[0].params.deadline_ms == 12_500


async def test_a_stream_that_was_taken_over_has_begun_when_the_server_ends() -> None:
    pair = Pair()
    client = await pair.begin()
    again = await pair.second.resume(last=last_id(client))
    pair.second.calls.abort_all()
    await pair.second.say(Finished("chatcmpl-1", 3, [], "abort"))
    await again.ended()
    assert content([data for _, data in events_in(again.data)])[0]["ends"] == ["abort"]


async def test_two_connections_take_it_over_once() -> None:
    pair = Pair()
    client = await pair.begin()
    one, two = await asyncio.gather(*(pair.second.resume(last=last_id(client)) for _ in range(2)))
    await settle()
    assert len(pair.second.session.messages) == 1
    await pair.second.say(Finished("chatcmpl-1", 3, WORDS[3:], "length"))
    await asyncio.gather(one.ended(), two.ended())
    assert [b"DONE" in each.data for each in (one, two)] == [False, True]


LONG_ECHO = CompletionBody(prompt="x", stream=True, resumable=True, echo=True)


@pytest.mark.parametrize(
    ("settings", "status", "says"),
    [
        ({"n": 2}, 409, "the engine does not know all of it; connect again"),
        ({"use_beam_search": True, "seed": None}, 409, "connect again"),
        ({"num_prompts": 2}, 409, "connect again"),
        ({"logprobs": 1}, 409, "more logprobs than are kept"),
        ({"body": ChatBody(messages=[ChatMessage("user", "Hi")], stream=True)}, 404, 'without "resumable": true'),
        ({"key": b"other"}, 404, "no request 'chatcmpl-1' can be resumed"),
        ({"key": b"other", "n": 2}, 404, "no request 'chatcmpl-1' can be resumed"),
    ],
)
async def test_streams_that_cannot_be_taken_over(settings: dict[str, Any], status: int, says: str) -> None:
    pair = Pair()
    pair.first.start(**settings)
    await settle()
    messages = pair.first.session.messages
    pair.second.session.known = [described(each, 2) for each in messages]
    with pytest.raises(ApiError, match=says) as caught:
        await pair.second.resume()
    assert caught.value.status == status
    assert len(pair.second.kept) == len(pair.second.calls) == 0
    pair.second.session.known = []
    with pytest.raises(ApiError, match="can be resumed") as caught:
        await pair.second.resume()
    assert caught.value.status == 404


@pytest.mark.parametrize(("stop", "status"), [((), None), (("x",), 409)])
async def test_the_stop_strings_of_a_fork_count_from_its_own_tokens(stop: tuple[str, ...], status: int | None) -> None:
    pair = Pair()
    await pair.begin(stop=stop)
    call = pair.first.kept.get("chatcmpl-1")
    assert call is not None
    forked = msgspec.msgpack.encode(msgspec.structs.replace(call.context(0), are_forks=True))
    (state,) = pair.second.session.known
    pair.second.session.known = [msgspec.structs.replace(state, context=forked)]
    if status is None:
        (await pair.second.resume()).go()
        return
    with pytest.raises(ApiError, match="connect again") as caught:
        await pair.second.resume()
    assert caught.value.status == status


async def test_a_stream_whose_echo_is_not_known_elsewhere_is_resumed_at_its_own_server_only() -> None:
    pair = Pair()
    client = pair.first.start(LONG_ECHO)
    await settle()
    call = pair.first.kept.get("cmpl-1")
    assert call is not None
    assert call.context(0).style.resumable
    call.style = msgspec.structs.replace(call.style, echo=("x" * 100_000,))
    assert not call.context(0).style.resumable
    client.go()


async def test_a_chosen_id_waits_while_the_engine_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another server has it is to be asked first; a request without one waits in the session."""

    stage = Stage(num_servers=2)
    monkeypatch.setattr(registry, "LOOK_S", 0.0)
    answer, asked = stage.session.describe, asyncio.Event()

    def describe(**which: Any) -> Any:
        asked.set()
        if stage.session.recovering is not None:
            raise EngineDeadError("the engine is being replaced")
        return answer(**which)

    monkeypatch.setattr(stage.session, "describe", describe)
    stage.session.recovering = "the engine died"
    waiting = asyncio.create_task(stage.live.new_id("cmpl", "mine", asking("")))
    await asked.wait()
    await settle()
    assert not waiting.done()
    stage.session.recovering = None
    assert await waiting == "cmpl-mine"
    stage.session.recovering, stage.session.dead = "the engine died", EngineDeadError("for good")
    with pytest.raises(ApiError, match="is being replaced"):
        await stage.live.new_id("cmpl", "mine", asking(""))
