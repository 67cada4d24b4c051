"""The routes of /v1/responses."""

import asyncio
import os
import time
import zlib
from collections.abc import Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vllm_lite.server.calls.response import PING_S
from vllm_lite.server.generation import Asked, Generation
from vllm_lite.server.http.application import gets, posts
from vllm_lite.server.http.auth import holder_of, name_of, owner_of
from vllm_lite.server.http.body import memory_of
from vllm_lite.server.http.disconnect import until_disconnected
from vllm_lite.server.http.long_work import through
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.bodies import MAX_MESSAGES, warned
from vllm_lite.server.openai.chunks import AnswerWriter
from vllm_lite.server.openai.errors import ApiError, in_use
from vllm_lite.server.responses import asking, bodies, history, items
from vllm_lite.server.responses.asking import ChatTurns
from vllm_lite.server.responses.bodies import ENCRYPTED, LOGPROBS, MAX_ID_CHARS, ResponseBody
from vllm_lite.server.responses.client_tools import Item
from vllm_lite.server.responses.earlier import Earlier, is_running, named
from vllm_lite.server.responses.event_log import EventLog
from vllm_lite.server.responses.output import Output, OutputStyle
from vllm_lite.server.responses.runs import Run, Runs, Sender
from vllm_lite.server.responses.store import ResponseStore, StoredResponse
from vllm_lite.server.responses.toolbox import Toolbox
from vllm_lite.server.vllm import rendered

MAX_PAGE = 100
NUM_REPEATED = 4
"""Number of events of a stream that repeat the response object, with the request's instructions and tools."""
MOST_UNPACKED = 1032
"""Maximum expansion of one byte by zlib."""
SETTLE_S = 1.0
"""Seconds for another API server to store a response that it has ended."""


class ResponsesRoutes:
    """Answers the routes of /v1/responses: one method each."""

    def __init__(self, generation: Generation, runs: Runs, store: ResponseStore) -> None:
        self._generation = generation
        self._live = generation.live
        self._runs = runs
        self._store = store

    def routes(self) -> list[Route]:
        path = "/v1/responses/{response_id}"
        of_bodies = {"": self.create, "/input_tokens": self.count, "/render": self.render}
        routes = posts({f"/v1/responses{end}": handler for end, handler in of_bodies.items()})
        routes += gets({path: self.retrieve, f"{path}/input_items": self.input_items})
        routes += posts({f"{path}/cancel": self.cancel})
        return [*routes, Route(path, self.delete, methods=["DELETE"])]

    # ---- the routes

    async def create(self, request: Request) -> Response:
        asked = await self._generation.read(request, ResponseBody)
        body = asked.body
        bodies.check(body)
        response_id = await self._new_id(body, request)
        own, shown, asked = await self._messages(asked, response_id)
        call, headers = await asking.made(self._generation, asked, shown, response_id)
        params = call.streams[0].params
        log = EventLog() if body.stream or body.background else None
        spelling = self._live.writers.spelling
        output = Output(
            asking.response_object(body, response_id, asked.model, call.created, params),
            self._live.writers.message(call, call.choices[0]),
            spelling.by_id if call.style.names_ids else spelling,
            log=log,
            shown=OutputStyle(
                params.logprobs if body.includes(LOGPROBS) else None, body.includes(ENCRYPTED), tools=shown.tools
            ),
        )
        size = memory_of(request)
        num_repeated = 0 if log is None else NUM_REPEATED * await through(size, output.num_bytes)
        own_data = await through(size, partial(msgspec.json.encode, own))
        sender = Sender(call.owner, holder_of(request), self._live.reader.keep(request, num_repeated))
        run = Run(call, output, own_data, log, sender, is_kept=body.is_kept)
        self._runs.start(run)
        if body.background:  # so that other API servers know it, and a restarted one
            try:
                await self._store.put(run.record())
            except ApiError:
                self._runs.cancel(run)
                raise
        if body.background and not body.stream:
            return as_json(output.response, headers)
        if log is not None:
            return EventStream(log, 0, self._runs.attach(run), run, headers=headers)
        return WholeResponse(run, self._runs.attach(run), headers)

    async def count(self, request: Request) -> Response:
        """Answer with the number of prompt tokens."""
        asked = await self._generation.read(request, ResponseBody)
        bodies.check(asked.body)
        response_id = _random_id()
        _, shown, asked = await self._messages(asked, response_id)
        made = await asking.made(self._generation, asked, shown, response_id)
        tokens = {"object": "response.input_tokens", "input_tokens": made.call.num_prompt_tokens}
        return as_json(tokens, made.headers)

    async def render(self, request: Request) -> Response:
        """Answer, like vLLM's other /render routes, with the prompt as a body of /inference/v1/generate. Earlier
        responses cannot be referred to."""
        asked = await self._generation.read(request, ResponseBody)
        body = asked.body
        bodies.check(body)
        if body.previous_response_id is not None:
            text = "previous_response_id: what is rendered has all of its input; repeat the earlier items in it"
            raise ApiError(400, text, "previous_response_id")
        response_id = _random_id()
        _, shown, asked = await self._messages(asked, response_id)
        chat = msgspec.structs.replace(asking.as_chat(body, shown), stream=body.stream)
        rendered.check(chat)
        made = await asking.made(self._generation, asked, shown, response_id)
        return as_json(rendered.requests(made.call, chat, asked.model)[0], made.headers)

    async def retrieve(self, request: Request) -> Response:
        """Answer with the current response, or with its stream after the event `starting_after`."""
        after = _number(request, "starting_after", -1, least=0)
        is_streamed = request.query_params.get("stream", "false").lower() in ("true", "1")
        found, response_id = await self._found(request), request.path_params["response_id"]
        if not is_streamed:
            return _json(found.response)
        log = found.log if isinstance(found, Run) else await _log_of(found)
        if log is None and isinstance(found, StoredResponse) and is_running(found):
            raise ApiError(409, f"the stream of response {response_id!r} is at another API server; connect again")
        if log is None:
            raise ApiError(
                400, f"response {response_id!r} has no stream: it was requested without stream and background"
            )
        if after >= log.end:
            text = f"starting_after is {after}, and the stream has events up to {log.end - 1} so far"
            raise ApiError(400, text, "starting_after")
        if after + 1 < log.first:
            raise ApiError(400, f"events before {log.first} are no longer kept", "starting_after")
        if isinstance(found, Run):
            return EventStream(log, after + 1, self._runs.attach(found), None)
        reader = self._live.reader  # the decompressed events count as this client's, while it reads
        return EventStream(log, after + 1, partial(reader.release, reader.keep(request, log.num_bytes)), None)

    async def delete(self, request: Request) -> Response:
        found = await self._found(request)
        if isinstance(found, Run):
            found.was_deleted = True
            self._runs.cancel(found)
        elif is_running(found):
            await self._live.end_named(found.id)
        await self._store.delete(found.name if isinstance(found, Run) else found.id)
        return as_json({"id": request.path_params["response_id"], "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response. An ended one is returned unchanged."""
        found = await self._found(request)
        if not found.is_background:
            raise ApiError(400, "only a response requested with background can be cancelled; close its connection")
        if isinstance(found, Run):
            self._runs.cancel(found)
            await asyncio.shield(found.task)
            return _json(found.response)
        if is_running(found):
            await self._live.end_named(found.id)
            found = await self._settled(found)
        return _json(found.response)

    async def input_items(self, request: Request) -> Response:
        """Answer with a page of the items that were shown to the model, without the instructions."""
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order must be asc or desc, got {order[:40]!r}", "order")
        limit = _number(request, "limit", 20, least=1, most=MAX_PAGE)
        found = await self._found(request)
        record = found.record() if isinstance(found, Run) else found
        parts = [await through(record.size, partial(named, record, has_outputs=False))]
        before = self._earlier(request).chain(record.previous)
        parts += [await through(each.size, partial(named, each)) async for each in before]
        shown = [item for part in reversed(parts) for item in part]
        if order == "desc":
            shown.reverse()
        after = request.query_params.get("after")
        if after is not None:
            places = [place for place, (name, _) in enumerate(shown) if name == after]
            if not places:
                raise ApiError(400, f"after names {after[:80]!r}, which is not an input item of this response", "after")
            shown = shown[places[0] + 1 :]
        page = shown[:limit]
        ends = {"first_id": page[0][0] if page else "", "last_id": page[-1][0] if page else ""}
        return as_json({"object": "list", "data": [data for _, data in page], **ends, "has_more": len(shown) > limit})

    # ---- ids and earlier responses

    async def _new_id(self, body: ResponseBody, request: Request) -> str:
        if body.request_id is None:
            return _random_id()
        response_id = f"resp_{body.request_id.removeprefix('resp_')}"
        if await self._known(response_id, owner_of(request, response_id)) is not None:
            raise in_use(response_id)
        return response_id

    async def _known(self, response_id: str, owner: str) -> Run | StoredResponse | None:
        """Find the owner's response of this id, even one that is hidden from clients."""
        name = name_of(response_id, owner)
        found = self._runs.get(name) or await self._store.get(name)
        if found is None and name != response_id:  # stored by an earlier version
            found = await self._store.get(response_id)
        return None if found is None or found.owner != owner else found

    async def _find(self, response_id: str, request: Request) -> Run | StoredResponse | None:
        """Find a response of the sender that this server or its store knows."""
        if len(response_id) > MAX_ID_CHARS:
            return None
        found = await self._known(response_id, owner_of(request, response_id))
        return None if isinstance(found, Run) and (found.was_deleted or not found.is_kept) else found

    async def _found(self, request: Request) -> Run | StoredResponse:
        """Find the response named in the path. Raises ApiError."""
        response_id: str = request.path_params["response_id"]
        found = await self._find(response_id, request)
        if found is None:
            raise _unknown(response_id)
        if isinstance(found, StoredResponse) and is_running(found):
            return await self._checked(found)
        return found

    async def _checked(self, record: StoredResponse) -> StoredResponse:
        """Refresh the record of a response that another API server runs, or whose server has ended."""
        try:
            await self._live.members(record.id, record.id)
        except ApiError as error:
            if error.status != 404:
                return record
            record = await self._settled(record)
            if is_running(record):
                response = msgspec.json.decode(record.response)
                error_of = {"code": "server_error", "message": "the server that generated it has ended"}
                response.update(status="failed", error=error_of)
                data = msgspec.json.encode(response)
                record = msgspec.structs.replace(record, response=data, status="failed")
                await self._store.put(record)
        return record

    async def _settled(self, record: StoredResponse) -> StoredResponse:
        """Wait up to SETTLE_S until the API server that ended the response has stored its end, and return the
        record."""
        deadline_s = time.monotonic() + SETTLE_S
        while is_running(record) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
            record = await self._store.get(record.id) or record
        return record

    async def _messages(
        self, asked: Asked[ResponseBody], response_id: str
    ) -> tuple[list[Item], ChatTurns, Asked[ResponseBody]]:
        """Return the request's own input items, the messages and tools of the whole conversation, and the request with
        a Warning about parts that are left out. Raises ApiError."""
        body, request = asked.body, asked.request
        earlier, referred = self._earlier(request), {}
        for place, reference in items.references(body.input if isinstance(body.input, list) else None):
            referred[place] = await earlier.referred(place, reference)
        own, left_out = items.read(body.input, response_id, referred, sees=self._generation.prompts.takes_images)
        before = await earlier.before(body.previous_response_id)
        if len(before) + len(own) > MAX_MESSAGES:
            raise ApiError(400, f"a conversation has at most {MAX_MESSAGES} items, and this one has more", "input")
        everything = [*before, *own]
        tools = Toolbox(body.tools or (), history.later_tools(everything))
        messages = history.messages(body.instructions, everything, tools, left_out)
        headers = warned(asked.headers, "not shown to the model", [*tools.left_out, *left_out])
        return own, ChatTurns(messages, tools), asked._replace(headers=headers)

    def _earlier(self, request: Request) -> Earlier:
        async def find(response_id: str) -> StoredResponse | None:
            found = await self._find(response_id, request)
            return found.record() if isinstance(found, Run) else found

        return Earlier(find, partial(self._live.reader.hold, request))


# ---- answers


class EventStream(Response):
    """Sends the events of a log from a position on, until the log is closed or the client disconnects."""

    def __init__(
        self,
        log: EventLog,
        start: int,
        detach: Callable[[], None],
        run: Run | None,
        *,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`run` is given for its first reader, who gets an HTTP error if the engine refuses the request."""
        more = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={"content-type": "text/event-stream; charset=utf-8", **more, **(headers or {})})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._log = log
        self._next = start
        self._detach = detach
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        watch = asyncio.ensure_future(until_disconnected(receive))
        try:
            run = self._run
            if run is not None and not run.is_background:
                await asyncio.wait((watch, run.began), return_when=asyncio.FIRST_COMPLETED)
                if run.error is not None and not run.call.has_begun:
                    raise run.error
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(watch, send)
        finally:
            watch.cancel()
            self._detach()

    async def _send_events(self, watch: "asyncio.Future[None]", send: Send) -> None:
        log, is_sole = self._log, self._run is not None and not self._run.is_kept
        while not watch.done():
            changed = log.changed()
            is_closed = log.is_closed
            events = log.since(self._next)
            if events is None:  # events were dropped before this slow reader got them
                raise ApiError(409, f"events before {log.first} are no longer kept")
            if events:
                changed.cancel()
                self._next += len(events)
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                if is_sole:
                    log.forget(self._next)
            elif is_closed:
                changed.cancel()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            else:
                done, _ = await asyncio.wait((changed, watch), timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if not done:
                    await send({"type": "http.response.body", "body": AnswerWriter.ping, "more_body": True})


class WholeResponse(Response):
    """Sends the response object when it is complete. If the client disconnects, the response is cancelled."""

    def __init__(self, run: Run, detach: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(headers={"content-type": "application/json", **headers})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._run = run
        self._detach = detach

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        run, watch = self._run, asyncio.ensure_future(until_disconnected(receive))
        try:
            await asyncio.wait((watch, run.task), return_when=asyncio.FIRST_COMPLETED)
            if not run.task.done():
                return
            if run.error is not None:
                raise run.error
            body = run.response
            headers = [*self.raw_headers, (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        finally:
            watch.cancel()
            self._detach()


# ---- small things


def _random_id() -> str:
    return f"resp_{os.urandom(16).hex()}"


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"no response {response_id[:80]!r} is kept here, or not with this API key", "response_id")


async def _log_of(record: StoredResponse) -> EventLog | None:
    if not record.events:
        return None
    unpack = partial(zlib.decompress, record.events)
    return await through(MOST_UNPACKED * len(record.events), lambda: EventLog.of(unpack(), record.first))


def _number(request: Request, name: str, default: int, *, least: int, most: int = 2**31) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) <= 10 and least <= int(given) <= most):
        raise ApiError(400, f"{name} must be a number from {least} to {most}, got {given[:40]!r}", name)
    return int(given)
