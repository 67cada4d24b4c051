"""GET /v1/requests/{id}/stream: continues a resumable stream where its last connection broke.

The API server that started the request has its whole stream, even after its end. Another server takes a running request
over: the engine knows the tokens of a request with one sample, and sends later ones to the new server.
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.client.streams.stream import StreamFactory
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import EndedRequest
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.marked import MarkedWriter
from vllm_lite.server.calls.response import CallResponse
from vllm_lite.server.http.application import gets
from vllm_lite.server.http.auth import name_of, owner_of
from vllm_lite.server.live_requests import LiveRequests, Member, id_in, restored
from vllm_lite.server.openai.errors import ApiError, refused


class Resumption:
    def __init__(self, live: LiveRequests, factory: StreamFactory) -> None:
        self._live = live
        self._factory = factory
        self._resumable = live.resumable
        self._calls = live.calls

    def routes(self) -> list[Route]:
        return gets({"/v1/requests/{request_id}/stream": self.stream})

    async def stream(self, request: Request) -> Response:
        """Continue a resumable stream after the event named by the header Last-Event-ID."""
        call_id = id_in(request)
        call = await self._found(call_id, owner_of(request, call_id))
        marked = MarkedWriter(
            self._live.writers.of(call, one_chunk=True), call, request.headers.get("last-event-id", "")
        )
        if marked.place.is_end:
            return Response(status_code=204)  # a browser's EventSource reconnects after a 200, but not after this
        run = partial(self._resumable.resume, place=marked.place)
        return CallResponse(call, marked, run, stream=True, headers={})

    async def _found(self, call_id: str, owner: str) -> Call:
        """Return the owner's call, kept here or taken over from another server. Raises ApiError. Calls of other owners
        are not found."""
        name = name_of(call_id, owner)
        own = self._resumable.get(name)
        if own is not None:
            if own.error is None or not await self._runs_elsewhere(name):
                return own
        elif self._calls.get(name) is not None:
            raise _not_resumable(call_id)
        elif self._calls.scoreboard.num_servers == 1:
            raise self._unknown(call_id)
        taken = await self._taken_over(call_id, owner)
        now = self._resumable.get(name)
        if now is not None and now is not own:  # taken over by another connection, while the engine was asked
            return now
        if own is not None:
            self._resumable.forget(own)
        self._resumable.add(taken)
        return taken

    async def _runs_elsewhere(self, name: str) -> bool:
        """Whether another server has taken over a failed call of this server."""
        if self._calls.scoreboard.num_servers == 1 or self._calls.death is not None:
            return False
        found = await self._calls.ask(lambda session: session.describe(external_id=name))
        return bool(found.requests)

    async def _taken_over(self, call_id: str, owner: str) -> Call:
        """Rebuild another server's call, without starting it. Raises ApiError if the engine does not know all of it."""
        try:
            members = await self._live.members(name_of(call_id, owner), call_id, with_content=True)
        except ApiError as error:
            raise (self._unknown(call_id) if error.status == 404 else error) from error
        context = members[0][0]
        if not context.style.resumable:
            raise _not_resumable(call_id)
        try:
            stream = restored(self._factory, members[0][1], for_fork=False) if _is_whole(members) else None
        except RequestError as error:
            raise refused(error) from error
        if stream is None:
            text = f"the stream of request {call_id!r} is at another API server, and the engine does not know all of it"
            raise ApiError(409, f"{text}; connect again, and that one may answer")
        call = Call(call_id, [stream], context.style, owner=owner, are_forks=context.are_forks, num_inherited=0)
        call.created = context.created
        return call

    def _unknown(self, call_id: str) -> ApiError:
        which = f'those that were sent with "resumable": true can, for {self._resumable.resume_s:g} s'
        return ApiError(404, f"no request {call_id!r} can be resumed; {which} after their connection broke")


def _not_resumable(call_id: str) -> ApiError:
    return ApiError(404, f'request {call_id!r} cannot be resumed: it was sent without "resumable": true')


def _is_whole(members: list[Member]) -> bool:
    """Whether the engine knows the whole output. It does for a single sample, unless the request is a fork with stop
    strings, as these are searched from a position that the engine does not know."""
    context, state = members[0]
    if len(members) > 1 or context.num_streams > 1 or isinstance(state, EndedRequest) or state.content is None:
        return False
    params = state.content.params
    return params.n == 1 and not params.use_beam_search and not (context.are_forks and params.stop)
