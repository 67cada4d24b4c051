"""A server's resumable calls on a stage: the test plays the engine, the clients and the clock."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tests.deadlines import scaled
from tests.unit.test_server_response import FACTORY, TOKENIZER, FakeSession
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.stream import Event
from vllm_lite.protocol.api import Descriptions, Finished, RequestState, TokenLogprobs, Tokens
from vllm_lite.protocol.external import ExternalAborted, ExternalFound
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.dispatcher import Dispatcher
from vllm_lite.server.calls.registry import Calls, QueueLimits
from vllm_lite.server.calls.resumable import ResumableCalls
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.http.auth import name_of, owner_of
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.live_requests import LiveRequests
from vllm_lite.server.openai.bodies import ChatBody, ChatMessage
from vllm_lite.server.processes.scoreboard import Scoreboard
from vllm_lite.server.resumption import Resumption

DEADLINE_S = scaled(30.0)
RESUME_S = 30.0
WORDS = TOKENIZER.encode("Once \N{BEAR FACE} upon a bear", add_special_tokens=False)
"""The bear is one character of several tokens."""
CHAT: dict[str, Any] = {"messages": [ChatMessage("user", "Hi")], "stream": True, "resumable": True}
COMPLETION: dict[str, Any] = {"prompt": "Say: ", "stream": True, "resumable": True}


class StageSession(FakeSession):
    """A session that answers questions about requests with `known`."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Any] = []
        self.known: list[RequestState] = []
        self.ended_externally: list[str] = []
        self.looked_for: list[list[str]] = []
        self.external_ids: set[str] = set()
        """Ids of live requests of other API servers."""

    def submit(self, message: Any, sink: Callable[[list[Event]], None], own: Any = None, _: Any = None) -> None:
        super().submit(message, sink, own)
        self.messages.append(message)

    def describe(self, *, external_id: str, with_content: bool = False) -> "Future[Descriptions]":
        del with_content
        known = [each for each in self.known if f"{each.request_id.partition('@')[0]}-".startswith(f"{external_id}-")]
        return _answered(Descriptions(known))

    def find_external(self, external_ids: Sequence[str]) -> "Future[ExternalFound]":
        self.looked_for.append(list(external_ids))
        return _answered(ExternalFound([each for each in external_ids if each in self.external_ids]))

    def abort_external(self, external_id: str) -> "Future[ExternalAborted]":
        self.ended_externally.append(external_id)
        return _answered(ExternalAborted(0))


def _answered(value: Any) -> "Future[Any]":
    answer: Future[Any] = Future()
    answer.set_result(value)
    return answer


class Client:
    """One connection and the data that it has received. `go()` breaks it; writes wait until `may_write` is set."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""
        self.is_complete = False
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._gone = asyncio.Event()
        self.task: asyncio.Task[None]

    def go(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.may_write.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.data += message["body"]
            self.is_complete = not message.get("more_body", False)

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.task


class Stage:
    """One API server. `now_s` is its clock."""

    def __init__(self, *, num_servers: int = 1, max_queued: int = 9, resume_s: float = RESUME_S) -> None:
        self.session = StageSession()
        self.now_s = 1000.0
        dispatcher = Dispatcher(cast(Session, self.session), asyncio.get_running_loop())
        self.calls = Calls(dispatcher, QueueLimits(9, max_queued, max_queued), Scoreboard(num_servers))
        self.kept = ResumableCalls(self.calls, resume_s, lambda: self.now_s)
        self.live = LiveRequests(self.calls, self.kept, FACTORY, cast(BodyReader, None))
        self.resumption = Resumption(self.live, FACTORY)

    def start(
        self, body: Any = None, *, name: str = "1", num_prompts: int = 1, key: bytes = b"", **params: Any
    ) -> Client:
        """Send a request for tokens. The call is `chatcmpl-1` where nothing else is said."""
        style = AnswerStyle.of(ChatBody(**CHAT) if body is None else body, "demo")
        if getattr(body, "echo", None):
            style = msgspec.structs.replace(style, echo=("Say: ",))
        call_id = f"{style.kind}-{name}"
        wanted = SamplingParams(**{"max_tokens": 100, "seed": 1, **params})
        owner = owner_of(asking(call_id, key=key), call_id)
        names = self.calls.stream_ids(name_of(call_id, owner), num_prompts)
        streams = [FACTORY.make([5, 6, 7], wanted, each) for each in names]
        call = Call(call_id, streams, style, owner=owner)
        call.created = 1
        return self._reads(self.live.respond(call, stream=True, headers={}))

    async def resume(self, call_id: str = "chatcmpl-1", last: str = "", key: bytes = b"") -> Client:
        """Ask for the stream. Raises ApiError."""
        return self._reads(await self.resumption.stream(asking(call_id, last, key)))

    def _reads(self, response: Response) -> Client:
        client = Client()
        client.task = asyncio.create_task(response({"type": "http"}, client.receive, client.send))  # type: ignore[arg-type]
        return client

    async def say(self, *events: Event) -> None:
        """Send the next message of the engine for each stream, and run everything that follows from it."""
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for name, its_events in by_request.items():
            self.session.sinks[name](its_events)
        await settle()


def asking(call_id: str, last: str = "", key: bytes = b"") -> Request:
    headers = [(b"last-event-id", last.encode("latin-1"))] if last else []
    params = {"request_id": call_id}
    return Request(
        {"type": "http", "headers": headers, "path_params": params, "vllm_lite.key": key, "vllm_lite.reach": [key]}
    )


async def settle() -> None:
    """All that can run has run."""
    for _ in range(12):
        await asyncio.sleep(0)


def steps(names: Sequence[str], n: int, logprobs: int | None, reason: Any = "length") -> list[list[Event]]:
    """Events that an engine sends for these streams with `n` samples each, token by token."""
    found: list[list[Event]] = []
    for place, token in enumerate(WORDS):
        entries = None if logprobs is None else [TokenLogprobs(-0.5 - place, 1, ((token, -0.5), (5, -2.0))[:logprobs])]
        for index in range(n):
            for name in names:
                if place < len(WORDS) - 1:
                    found.append([Tokens(name, place, [token], entries, index)])
                else:
                    score = -1.0 - index
                    found.append(
                        [
                            Finished(
                                name, place, [token], reason, None, None, 2, entries, index, cumulative_logprob=score
                            )
                        ]
                    )
    return found


def events_in(data: bytes) -> list[tuple[str, str]]:
    """The events of a stream that has come so far, as browsers find them: each with the last id until then."""
    found, last = [], ""
    for block in data.decode("utf-8", "ignore").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        last = fields.get("id", last)
        if "data" in fields:
            found.append((last, fields["data"]))
    return found


def content(data: Sequence[str]) -> dict[Any, Any]:
    """Join these events to the content that a client was shown, however it was cut; choices by their index."""
    found: dict[Any, Any] = {"done": 0, "usage": [], "errors": []}
    for each in data:
        if each == "[DONE]":
            found["done"] += 1
            continue
        chunk = json.loads(each)
        if "error" in chunk:
            found["errors"].append(chunk["error"]["message"])
            continue
        if not chunk["choices"]:
            found["usage"].append(chunk["usage"])
        for choice in chunk["choices"]:
            of = found.setdefault(choice["index"], {"text": "", "ids": [], "scores": [], "roles": 0, "ends": []})
            delta = choice.get("delta", choice)
            of["text"] += delta.get("content") or delta.get("text") or ""
            of["roles"] += "role" in delta
            of["ids"] += choice.get("token_ids") or []
            scores = choice["logprobs"] or {}
            of["scores"] += scores.get("content") or list(zip(*scores.values(), strict=True)) if scores else []
            if choice["finish_reason"] is not None:
                of["ends"].append(choice["finish_reason"])
    return found
