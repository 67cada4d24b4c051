"""A call as a response, against an engine that the test plays: what is written when, and what is left behind."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.resources import files
from typing import Any, cast

import pytest

from tests.deadlines import scaled
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.stream import Event, StreamFactory, StreamFailure
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import EngineDeadError, EngineError, RequestError
from vllm_lite.protocol.api import Abort, Finished, TokenLogprobs, Tokens, Welcome
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import Stats
from vllm_lite.server.calls import registry as calls_module
from vllm_lite.server.calls import response as answer_module
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.dispatcher import Dispatcher
from vllm_lite.server.calls.registry import Calls, QueueLimits
from vllm_lite.server.calls.response import CallResponse
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.openai import logprobs as logprobs_module
from vllm_lite.server.openai.bodies import ChatBody, ChatMessage, StreamOptions
from vllm_lite.server.openai.chunks import writer
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.logprobs import Spelling

DEADLINE_S = scaled(30.0)
TOKENIZER = Tokenizer.load(str(files("vllm_lite") / "demo_model"))
WELCOME = Welcome(1, 1, "demo", 2048, 2048, (1, 4), 100, 16)
FACTORY = StreamFactory(WELCOME, TOKENIZER)
STYLE = AnswerStyle("chatcmpl", "demo")
WORDS = TOKENIZER.encode("Once upon a time there was a bear", add_special_tokens=False)


class FakeSession:
    """A fake session that records requests; the test plays the engine."""

    def __init__(self) -> None:
        self.dead: EngineError | None = None
        self.recovering: str | None = None
        self.stats = Stats()
        self.sinks: dict[str, Callable[[list[Event]], None]] = {}
        self.dropped: list[str] = []
        self.aborted: list[str] = []
        self.heard: list[Abort] = []

    def submit(self, message: Any, sink: Callable[[list[Event]], None], own: Any = None, affinity: Any = None) -> None:  # noqa: ARG002
        if self.dead is not None:
            raise self.dead
        self.sinks[message.request_id] = sink

    def request_stats(self) -> Future[Stats]:
        future = Future[Stats]()
        future.set_result(self.stats)
        return future

    def is_live(self, request_id: str) -> bool:
        return request_id in self.sinks and request_id not in self.dropped

    def drop(self, request_id: str, *, stopped: bool) -> None:
        del stopped
        self.dropped.append(request_id)

    def abort(self, request_id: str, samples: Sequence[int] = (), *, stopped: bool = False) -> None:
        self.aborted.append(request_id)
        self.heard.append(Abort(request_id, stopped, tuple(samples)))

    def say(self, *events: Event) -> None:
        self.sinks[events[0].request_id](list(events))


class Talk:
    """One streamed or whole answer, sent and received by the test."""

    def __init__(
        self, *, n: int = 1, stream: bool = True, usage: bool = False, max_queued: int = 10, logprobs: int | None = None
    ) -> None:
        self.logprobs = logprobs
        self.session = FakeSession()
        self.dispatcher = Dispatcher(cast(Session, self.session), asyncio.get_running_loop())
        self.calls = Calls(self.dispatcher, QueueLimits(1, max_queued, max_queued))
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.task = asyncio.create_task(self.answer("chatcmpl-1", n=n, stream=stream, usage=usage))

    async def answer(self, call_id: str, *, n: int = 1, stream: bool = True, usage: bool = False) -> None:
        options = StreamOptions(include_usage=True) if usage else None
        logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": self.logprobs} if self.logprobs else {}
        body = ChatBody(messages=[ChatMessage("user", "Hi")], stream=stream, stream_options=options, **logprobs)
        params = SamplingParams(n=n, max_tokens=100, seed=1, logprobs=self.logprobs)
        call = Call(call_id, [FACTORY.make([5, 6, 7], params, call_id)], AnswerStyle.of(body, "demo"))
        made = writer(call, Spelling(TOKENIZER))
        response = CallResponse(call, made, self.calls.run, stream=stream, headers={})
        await response({"type": "http"}, self._receive, self._send)  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.may_write.wait()
        self.sent.append(message)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - conditions of several kinds
                await asyncio.sleep(0)

    async def started(self) -> None:
        await self.until(lambda: bool(self.session.sinks))

    async def writes(self, count: int) -> bytes:
        """The body's last write, once there are `count` (headers not counted)."""
        await self.until(lambda: len(self.sent) > count)
        assert len(self.sent) == count + 1
        return bytes(self.sent[-1]["body"])

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.task
        assert len(self.calls) == 0
        assert self.dispatcher.num_sequences == 0
        assert self.session.dropped.count("chatcmpl-1") == 1


def tokens(start: int, count: int, index: int = 0) -> Tokens:
    return Tokens("chatcmpl-1", start, WORDS[start : start + count], index=index)


def end(start: int, index: int = 0, **settings: Any) -> Finished:
    return Finished("chatcmpl-1", start, WORDS[start : start + 1], "length", index=index, **settings)


def told(data: bytes) -> list[Any]:
    """The events of a write."""
    events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


async def test_one_write_for_all_that_one_message_brings() -> None:
    talk = Talk(n=2, usage=True)
    await talk.started()
    talk.session.say(tokens(0, 2), tokens(0, 1, index=1))
    first = told(await talk.writes(1))
    assert [chunk["choices"][0]["delta"].get("role") for chunk in first] == ["assistant", "assistant", None, None]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in first[2:]] == ["Once upon", "Once"]
    talk.session.say(end(2), tokens(1, 1, index=1))
    assert [chunk["choices"][0]["finish_reason"] for chunk in told(await talk.writes(2))] == ["length", None]
    talk.session.say(end(2, index=1, num_cached_tokens=2))
    *_, last, done = told(await talk.writes(3))
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert talk.sent[-1]["more_body"] is False
    await talk.ended()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("event", "status"),
    [
        (Finished("chatcmpl-1", 0, [], "error", error="max_tokens is wrong"), 400),
        (StreamFailure("chatcmpl-1", EngineDeadError("the engine at ipc:///tmp/x/engine died")), 503),
    ],
)
async def test_an_error_before_any_output_is_a_status(stream: bool, event: Event, status: int) -> None:
    talk = Talk(stream=stream)
    await talk.started()
    talk.session.say(event)
    with pytest.raises(ApiError) as caught:
        await talk.ended()
    assert caught.value.status == status
    assert "ipc://" not in caught.value.message
    assert caught.value.param == ("max_tokens" if status == 400 else None)
    assert talk.sent == []
    assert len(talk.calls) == 0


async def test_an_error_in_the_middle_is_sent_in_the_stream() -> None:
    talk = Talk()
    await talk.started()
    talk.session.say(tokens(0, 1))
    await talk.writes(1)
    talk.session.say(StreamFailure("chatcmpl-1", EngineDeadError("it died")))
    (error,) = told(await talk.writes(2))
    assert error == {"error": {"message": "it died", "type": "ServiceUnavailableError", "param": None, "code": 503}}
    assert talk.sent[-1]["more_body"] is False
    await talk.ended()


async def started_talk(*, stream: bool, begun: bool) -> Talk:
    """A call that runs; if it has begun, a token has come, and a stream has shown it."""
    talk = Talk(stream=stream)
    await talk.started()
    if begun:
        talk.session.say(tokens(0, 1))
        if stream:
            await talk.writes(1)
    return talk


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_goes_leaves_nothing(stream: bool, begun: bool) -> None:
    talk = await started_talk(stream=stream, begun=begun)
    before = len(talk.sent)
    talk.gone.set()
    await talk.ended()
    assert len(talk.sent) == before


async def test_events_for_a_client_that_does_not_read_are_one_write() -> None:
    talk = Talk()
    await talk.started()
    talk.session.say(tokens(0, 1))
    await talk.writes(1)
    talk.may_write.clear()
    for place in range(1, 5):
        talk.session.say(tokens(place, 1))
        await asyncio.sleep(0)
    talk.may_write.set()
    await talk.until(lambda: len(talk.sent) > 3)
    texts = [chunk["choices"][0]["delta"]["content"] for sent in talk.sent[2:] for chunk in told(sent["body"])]
    assert "".join(texts) == TOKENIZER.decode(WORDS[:5]).removeprefix("Once")
    assert len(texts) == 2
    talk.gone.set()
    await talk.ended()


async def test_a_silent_stream_gets_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (answer_module, calls_module):
        monkeypatch.setattr(module, "PING_S", 0.0)
    monkeypatch.setattr(calls_module, "LOOK_S", 0.0)
    talk = Talk()
    watch = asyncio.create_task(talk.calls.watch())
    await talk.until(lambda: len(talk.sent) > 3)
    assert told(talk.sent[1]["body"])[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {sent["body"] for sent in talk.sent[2:]} == {b": ping\n\n"}
    talk.gone.set()
    await talk.ended()
    watch.cancel()


async def test_the_queue_has_an_end() -> None:
    talk = Talk(max_queued=1)
    await talk.started()
    other = asyncio.create_task(talk.answer("chatcmpl-2"))
    await talk.until(lambda: len(talk.session.sinks) == 2)
    with pytest.raises(ApiError) as caught:
        await talk.answer("chatcmpl-3")
    assert caught.value.status == 429
    assert int(caught.value.headers["Retry-After"]) >= 1
    with pytest.raises(ApiError) as caught:
        talk.calls.check()
    talk.gone.set()
    await talk.ended()
    await other
    talk.calls.check()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_answers_without_a_token_are_refused_when_the_server_ends(stream: bool, begun: bool) -> None:
    """An answer without a token is refused; one that has begun ends with its tokens so far."""

    talk = await started_talk(stream=stream, begun=begun)
    if begun:
        await talk.until(lambda: bool(talk.calls.running["chatcmpl-1"].streams[0].num_tokens))
    talk.calls.abort_all()
    assert talk.session.aborted == ["chatcmpl-1"]
    if not begun:
        with pytest.raises(ApiError, match="had not begun") as caught:
            await talk.ended()
        assert caught.value.status == 503
        assert talk.sent == []
        return
    talk.session.say(Finished("chatcmpl-1", 1, [], "abort"))
    await talk.ended()
    assert talk.sent[0]["status"] == 200
    assert b'"finish_reason":"abort"' in talk.sent[-1]["body"]


async def test_a_stream_that_has_got_a_comment_ends_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status has been sent with a comment, before there was a token."""

    monkeypatch.setattr(answer_module, "PING_S", 0.0)
    talk = Talk()
    await talk.started()
    talk.calls.running["chatcmpl-1"].wake()
    await talk.until(lambda: len(talk.sent) > 1)
    talk.calls.abort_all()
    talk.session.say(Finished("chatcmpl-1", 0, [], "abort"))
    await talk.ended()
    assert b"[DONE]" in talk.sent[-1]["body"]


@pytest.mark.parametrize("stream", [True, False])
async def test_many_logprobs_are_encoded_beside_the_loop(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[bool] = set()
    of_chat = logprobs_module.of_chat

    def seen(*args: Any) -> Any:
        threads.add(threading.current_thread() is threading.main_thread())
        return of_chat(*args)

    monkeypatch.setattr(logprobs_module, "of_chat", seen)
    talk = Talk(stream=stream, logprobs=2)
    await talk.started()
    (sample,) = talk.calls.running["chatcmpl-1"].streams[0].samples
    entries = [TokenLogprobs(-1.0, 1, ((5, -1.0), (6, -2.0)))] * 1000
    talk.session.say(Finished("chatcmpl-1", 0, [5] * 1000, "length", logprobs=entries))
    await talk.ended()
    assert len(sample.token_ids) == 1000
    assert threads == {False}
    body = b"".join(sent["body"] for sent in talk.sent[1:])
    assert body.count(b'"top_logprobs":[{') == 1000


async def test_an_id_is_used_once() -> None:
    talk = Talk()
    await talk.started()
    with pytest.raises(ApiError) as caught:
        await talk.answer("chatcmpl-1")
    assert caught.value.status == 409
    assert talk.session.dropped == []
    talk.gone.set()
    await talk.ended()


@pytest.mark.parametrize("draining", [True, False])
async def test_nothing_starts_when_nothing_is_served(draining: bool) -> None:
    talk = Talk()
    await talk.started()
    if draining:
        talk.calls.is_draining = True
    else:
        talk.session.dead = EngineDeadError("it died")
    with pytest.raises(ApiError) as caught:
        await talk.answer("chatcmpl-2")
    assert caught.value.status == 503
    with pytest.raises(ApiError):
        await talk.calls.probe()
    talk.gone.set()
    await talk.ended()


@pytest.mark.parametrize("who", ["engine", "workers"])
async def test_an_engine_in_recovery_is_unhealthy_and_accepts_requests(who: str) -> None:
    talk = Talk()
    await talk.started()
    assert await talk.calls.probe() is talk.session.stats
    if who == "engine":
        talk.session.recovering = "the engine at ipc:///tmp/secret/e died"
    else:
        talk.session.stats = Stats(recovering="worker 0 at ipc:///tmp/secret/e died")
    with pytest.raises(ApiError) as caught:
        await talk.calls.probe()
    assert caught.value.status == 503
    assert caught.value.message.startswith("streams pause: ")
    assert "died" in caught.value.message
    assert "secret" not in caught.value.message
    assert await talk.calls.stats() is talk.session.stats, "it can still be watched"
    talk.calls.check()
    talk.gone.set()
    await talk.ended()


async def test_a_stream_that_cannot_be_applied_harms_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(stream=False)
    other = asyncio.create_task(talk.answer("chatcmpl-2", stream=False))
    await talk.until(lambda: len(talk.session.sinks) == 2)
    stream = talk.dispatcher._streams["chatcmpl-2"][0]
    monkeypatch.setattr(stream.samples[0], "apply", lambda _: 1 / 0)
    talk.session.say(Finished("chatcmpl-2", 0, WORDS[:1], "length"), end(0))
    with pytest.raises(ApiError) as caught:
        await other
    assert caught.value.status == 500
    await talk.ended()
    assert json.loads(talk.sent[-1]["body"])["choices"][0]["message"]["content"] == "Once"


async def test_the_engine_is_asked_how_many_wait() -> None:
    """The engine counts waiting sequences, because the batch may have room where the KV cache has none."""

    talk = Talk(max_queued=0)
    await talk.started()
    talk.session.stats = Stats(num_running=1, num_waiting=3, recovering="a worker died")
    assert await talk.calls.count_waiting() == 3
    await talk.calls.look_at_queue()
    assert talk.calls.num_waiting == 0  # they may have come just now, and wait for the next step only
    await talk.calls.look_at_queue()
    assert talk.calls.num_waiting == 3
    talk.gone.set()
    await talk.ended()
    assert await talk.calls.count_waiting() == 0


async def test_a_sessions_refusal_is_the_clients_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(message: Any, sink: Any, own: Any, affinity: Any) -> None:
        raise RequestError("request id is in use")

    talk = Talk()
    await talk.started()
    call = Call("chatcmpl-9", [FACTORY.make([5], SamplingParams(), "chatcmpl-9")], STYLE)
    monkeypatch.setattr(talk.session, "submit", refuse)
    with pytest.raises(ApiError) as caught, talk.calls.run(call):
        pass
    assert caught.value.status == 400
    talk.gone.set()
    await talk.ended()


async def test_long_writes_have_one_thread() -> None:
    """Each of several would keep the interpreter from the loop."""
    may_end = threading.Event()

    def write() -> int:
        assert may_end.wait(DEADLINE_S)
        return threading.get_ident()

    writes = [asyncio.ensure_future(answer_module.beside_the_loop(write)) for _ in range(8)]
    await asyncio.sleep(0)  # all are submitted
    may_end.set()
    threads = set(await asyncio.gather(*writes))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
