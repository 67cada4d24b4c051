"""Routes about running requests: state, abort, fork; and /load, /reset_prefix_cache.

The engine knows all requests, so each of several API servers can answer for any of them.
"""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.client.prompt import check_room
from vllm_lite.client.streams.stream import RequestStream, StreamFactory
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import EndedRequest, RequestState, SampleState, Tokens
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.external import MAX_FOUND
from vllm_lite.protocol.params import MAX_SAMPLES
from vllm_lite.server.calls.call import Call, CallContext
from vllm_lite.server.calls.marked import MarkedWriter
from vllm_lite.server.calls.place import MAX_CHOICES
from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.calls.response import CallResponse
from vllm_lite.server.calls.resumable import ResumableCalls
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.http.application import gets, posts
from vllm_lite.server.http.auth import name_of, names_of, owner_of, require_admin
from vllm_lite.server.http.body import BodyReader, decoded
from vllm_lite.server.openai import bodies
from vllm_lite.server.openai.bodies import ForkBody
from vllm_lite.server.openai.errors import ApiError, in_use, refused, shown
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.openai.parsed import Writers

MAX_ID_CHARS = 256
"""Maximum length of a request id: the engine accepts no longer one."""
_ORDER = ("running", "swapped", "preempted", "waiting")
"""The state of a request is the first of these that one of its samples is in."""
WHY = {
    "waits_for_row": "all rows of the batch are taken (--max-num-seqs)",
    "waits_for_adapter": "its adapter is being loaded, or others take all places for adapters (--max-loras)",
    "waits_for_budget": "the steps have no tokens left for it (--max-num-batched-tokens)",
    "waits_for_swap": "it, or what makes way for it, is moved between device and host (--max-swap-blocks-per-step)",
    "waits_for_encoder": "the images of others come first in the encoder's share of a step",
    "waits_for_load": "its beginning or vectors of its images are being loaded from disk (--kv-cache-dir)",
    "waits_for_state": "its recurrent state is being computed by another, or no slot is free (--state-cache-space)",
    "waits_for_step": "the next step takes it in",
    "waits_for_result": "it had to give way while its latest token was computed, which is on its way",
    "waits_for_resume": "the server is paused or asleep, or is about to be (/resume, /wake_up)",
    "waits_for_workers": "the processes that compute have died, and others are about to take over",
    "waits_for_trial": "those that may have killed the workers are computed apart from all others first",
}
"""Sentences for reasons of waiting that need no numbers."""
LISTED = frozenset({"embd", "decision"})
"""Kinds of calls about a list of texts, answered without generated text."""
_context = msgspec.msgpack.Decoder(CallContext)

Member = tuple[CallContext, RequestState | EndedRequest]
"""Context and state of one stream of a call, as the engine keeps them."""


class LiveRequests:
    """Answers the routes about running requests: one method each."""

    def __init__(
        self,
        calls: Calls,
        resumable: ResumableCalls,
        factory: StreamFactory,
        reader: BodyReader,
        formats: Formats | None = None,
        *,
        forces_usage: bool = False,
    ) -> None:
        """`formats` describe the model's tool calls and reasoning; `forces_usage`: every chunk of a fork has the
        usage."""
        self.calls = calls
        self.resumable = resumable
        self.reader = reader
        self._factory = factory
        self._forces_usage = forces_usage
        self._scoreboard = calls.scoreboard
        self.writers = Writers(Spelling(factory.tokenizer), formats)

    def routes(self) -> list[Route]:
        path = "/v1/requests/{request_id}"
        changes = {f"{path}/fork": self.fork, "/reset_prefix_cache": self.reset_prefix_cache}
        end = Route(path, self.abort, methods=["DELETE"])
        return [*gets({"/load": self.load, path: self.state}), end, *posts(changes)]

    async def new_id(self, kind: str, wanted: str | None, request: Request) -> str:
        """Make the id of a new call. Raises ApiError if the sender has a call with the `wanted` id, here or at another
        server."""
        call_id = f"{kind}-{wanted or os.urandom(12).hex()}"
        name = name_of(call_id, owner_of(request, call_id))
        if self.resumable.get(name) is not None:
            raise in_use(call_id)
        if wanted is not None and self._scoreboard.num_servers > 1:
            found = await self.calls.ask_for_new(lambda session: session.describe(external_id=name))
            if found.requests:
                raise in_use(call_id)
        return call_id

    def respond(self, call: Call, *, stream: bool | None, headers: dict[str, str]) -> Response:
        """Make the response that starts `call`. Raises ApiError if the call should be resumable and cannot be."""
        if not call.style.resumable:
            made = self.writers.of(call)
            return CallResponse(call, made, self.calls.run, stream=bool(stream), headers=headers)
        if not self.resumable.resume_s:
            raise ApiError(400, "this server keeps no streams to be resumed (--stream-resume-s 0)", "resumable")
        if len(call.choices) > MAX_CHOICES:
            text = f"a resumable stream has at most {MAX_CHOICES} choices, and this one has {len(call.choices)}"
            raise ApiError(400, text, "resumable")
        marked = MarkedWriter(self.writers.of(call, one_chunk=True), call)
        return CallResponse(call, marked, self.resumable.run, stream=True, headers=headers)

    async def load(self, _: Request) -> Response:
        """Answer with the number of running requests; with several servers, also each one's, and the number of this
        one."""
        loads = self._scoreboard.loads()
        several = {"servers": loads, "server": self._scoreboard.number} if len(loads) > 1 else {}
        return as_json({"server_load": sum(loads), **several})

    async def state(self, request: Request) -> Response:
        """Answer with the state of a request, and the reason why it waits."""
        call_id = id_in(request)
        name = await self._name(call_id, request)
        members = await self.members(name, call_id)
        prompts = [_prompt(member) for _, member in members]
        states = {prompt["state"] for prompt in prompts}
        live = [member for _, member in members if isinstance(member, RequestState)]
        first = next((state for state in live if state.admission.reason is not None), live[0] if live else None)
        context = members[0][0]
        usage = {
            "prompt_tokens": sum(each["prompt_tokens"] for each in (prompts[:1] if context.are_forks else prompts)),
            "completion_tokens": sum(each["completion_tokens"] for each in prompts),
        }
        return as_json(
            {
                "id": call_id,
                "object": "request",
                "created": context.created,
                "state": next((state for state in _ORDER if state in states), "finished"),
                "admission": None if first is None else _admission(first),
                "usage": usage,
                "resumable": context.style.resumable,
                "disconnected_s": self.resumable.unread_s(name),
                "prompts": prompts,
            }
        )

    async def abort(self, request: Request) -> Response:
        """Abort a request. Its client gets the finish reason "abort"."""
        call_id = id_in(request)
        if not await self.end(call_id, request):
            raise _not_running(call_id)
        return as_json({"id": call_id, "object": "request", "deleted": True})

    async def end_first(self, groups: Sequence[Sequence[str]], request: Request) -> None:
        """For each group of ids, end the first running call that the sender of `request` may end. The engine is asked
        once for all calls that do not run here. Raises ApiError, after the others have ended."""
        wanted = [
            [name for each in ids if len(each) <= MAX_ID_CHARS for name in names_of(request, each)] for ids in groups
        ]
        running: set[str] = set()
        error: ApiError | None = None
        try:
            running = await self._running([name for names in wanted for name in names if self._own(name) is None])
        except ApiError as refusal:  # calls of this server end even while the engine is being replaced
            error = refusal
        for names in wanted:
            for name in names:
                if (name in running or self._own(name) is not None) and await self.end_named(name):
                    break
        if error is not None:
            raise error

    async def end(self, call_id: str, request: Request) -> bool:
        """End a call for the sender of `request`. False: the sender has no running call with this id. Raises
        ApiError."""
        return await self.end_named(await self._name(call_id, request))

    async def end_named(self, name: str) -> bool:
        """End the call `name`. False: it does not run. Raises ApiError."""
        own = self._own(name)
        try:
            aborted = await self.calls.ask(lambda session: session.abort_external(name))
        except ApiError:
            if own is None:
                raise
            self.calls.dispatcher.abort(own)  # ends even while the engine is being replaced
        else:
            if not aborted.num_requests and own is None:
                return False
        if own is not None and self.resumable.unread_s(name) is not None:
            self.resumable.forget(own)
        return True

    async def fork(self, request: Request) -> Response:
        """Fork a running request: each fork starts with its tokens so far."""
        data = await self.reader.receive(request)
        parent, style = await self.parent_of(id_in(request), request)
        body, headers = await decoded(data, ForkBody)
        self.calls.check()
        call = await self.forks_of(parent, style, body, request)
        return self.respond(call, stream=body.stream, headers=headers)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empty the prefix cache and, with vLLM's `reset_external=true`, the one on disk. Running requests continue."""
        require_admin(request)
        stored = request.query_params.get("reset_external", "false").lower() in ("true", "1")
        done = await self.calls.ask(lambda session: session.reset_prefix_cache(stored=stored))
        return as_json({"object": "prefix_cache.reset", **msgspec.structs.asdict(done)})

    async def members(self, name: str, call_id: str, *, with_content: bool = False) -> list[Member]:
        """The streams of the call `name`, in order. A call of this server is known until its client has the whole
        answer, another one until the engine has ended its last stream. Raises ApiError, with the id, if there is no
        such call."""
        own = self._own(name)  # before the engine is asked, which does not know a call that starts meanwhile
        found = await self.calls.ask(lambda session: session.describe(external_id=name, with_content=with_content))
        if own is not None:
            live = {state.request_id: state for state in found.requests}
            states = [live.get(stream.request_id) or _ended(stream) for stream in own.streams]
            return [(own.context(index), state) for index, state in enumerate(states)]
        known: list[RequestState | EndedRequest] = [*found.requests, *found.ended]
        try:
            members = [(_context.decode(each.context), each) for each in known]
        except msgspec.MsgspecError:  # the id belongs to a client that is not an API server
            members = []
        if not found.requests or not members:
            raise _not_running(call_id)
        return sorted(members, key=lambda member: member[0].index)

    # ---- inside

    def _own(self, name: str) -> Call | None:
        """The call, if it runs on this server, or is kept here for its reader to return."""
        return self.calls.get(name) or self.resumable.get(name)

    async def _name(self, call_id: str, request: Request) -> str:
        """Name of the call with this id that the sender may read, fork and end. An admin may have several: the first
        that runs is chosen. Raises ApiError."""
        names = names_of(request, call_id)
        here = next((name for name in names if self._own(name) is not None), None)
        if here is not None or len(names) == 1:
            return here or names[0]
        running = await self._running(names)
        return next((name for name in names if name in running), names[0])

    async def _running(self, names: Sequence[str]) -> set[str]:
        """Return those of `names` whose calls run, by the engine. Raises ApiError."""
        running = set[str]()
        for start in range(0, len(names), MAX_FOUND):
            asked = names[start : start + MAX_FOUND]
            found = await self.calls.ask(lambda session, asked=asked: session.find_external(asked))
            running.update(found.external_ids)
        return running

    async def forks_of(self, parent: RequestStream, style: AnswerStyle, body: ForkBody, request: Request) -> Call:
        """Make a call of `n` streams that start with all of `parent`'s tokens. Raises ApiError."""
        count = 1 if body.n is None else body.n
        if not 1 <= count <= MAX_SAMPLES:
            raise ApiError(400, f"n must be between 1 and {MAX_SAMPLES}, got {count}", "n")
        if body.stream and parent.params.prompt_logprobs is not None:
            raise ApiError(400, "the request has prompt_logprobs, which are not told in a stream", "stream")
        call_id = await self.new_id(style.kind, body.request_id, request)
        owner = owner_of(request, call_id)
        inherited = {**msgspec.structs.asdict(parent.params), "seed": None}
        params = bodies.sampling(body, inherited, {"n": parent.params.n})
        ids = self.calls.stream_ids(name_of(call_id, owner), count)
        try:
            check_room([parent.prompt], body.max_tokens, self._factory.limits.max_model_len)
            streams = [self._factory.fork(parent, params, each, number) for number, each in enumerate(ids)]
        except RequestError as error:
            raise refused(error, bodies.field_of(str(error))) from error
        style = style.forked(body)
        style = style.with_usage() if self._forces_usage else style
        return Call(call_id, streams, style, owner=owner, are_forks=True)

    async def parent_of(self, call_id: str, request: Request) -> tuple[RequestStream, AnswerStyle]:
        """Return the stream of the call to fork, and the call's style. Raises ApiError."""
        name = await self._name(call_id, request)
        own = self._own(name)
        if own is not None:
            num_prompts, style, stream = len(own.streams), own.style, None if own.finished else own.streams[0]
        else:
            context, state = (await self.members(name, call_id, with_content=True))[0]
            is_listed = context.style.kind in LISTED
            found = None if is_listed else restored(self._factory, state, for_fork=True)
            num_prompts, style, stream = context.num_streams, context.style, found
        if style.kind in LISTED:
            raise ApiError(400, f"request {call_id!r} generates no text; only one that does can be forked")
        if num_prompts > 1:
            raise ApiError(400, f"request {call_id!r} has {num_prompts} prompts; only one can be forked")
        if stream is None:
            raise ApiError(409, f"request {call_id!r} has finished; only one that runs can be forked")
        return stream, style


def restored(factory: StreamFactory, state: RequestState | EndedRequest, *, for_fork: bool) -> RequestStream | None:
    """Return the stream with its tokens so far, to continue it or, `for_fork`, to fork it; None if it has ended.

    A stream for forks is not ended by a stop string in its tokens, as an inherited stop string does not count. Raises
    ApiError if its logprobs are not known.
    """
    if not isinstance(state, RequestState) or state.content is None:
        return None
    name, content = state.request_id, state.content
    output, scored = unpack_tokens(content.output), content.logprobs
    if content.params.logprobs is not None and content.params.n == 1 and len(scored) < len(output):
        raise ApiError(409, f"request {name!r} has more logprobs than are kept for other API servers")
    params = content.params
    if for_fork:
        params = msgspec.structs.replace(params, stop=())
    elif state.deadline_in_s is not None:  # relative to now
        params = msgspec.structs.replace(params, deadline_ms=max(1, int(state.deadline_in_s * 1000)))
    stream = factory.make(unpack_tokens(content.prompt), params, name)
    stream.adapter = content.adapter
    stream.apply(Tokens(name, 0, output, scored or None))
    return stream


def _ended(stream: RequestStream) -> EndedRequest:
    """State of a stream of this server that has ended in the engine."""
    return EndedRequest(b"", len(stream.prompt.token_ids), stream.num_tokens, stream.params.priority)


def id_in(request: Request) -> str:
    call_id: str = request.path_params["request_id"]
    if len(call_id) > MAX_ID_CHARS:
        raise _not_running(call_id)
    return call_id


def _not_running(call_id: str) -> ApiError:
    return ApiError(404, f"no request '{shown(call_id)}' is running")


def _prompt(member: RequestState | EndedRequest) -> dict[str, Any]:
    if isinstance(member, EndedRequest):
        counts = _counts(member.num_prompt, member.num_output, member.priority)
        return {"state": "finished", **counts}
    states = {sample.status for sample in member.samples}
    num_output = member.num_ended_output + sum(sample.num_output for sample in member.samples)
    return {
        "state": next(name for name in _ORDER if name in states),
        **_counts(member.num_prompt, num_output, member.priority),
        "cached_tokens": member.num_cached,
        "age_s": round(member.age_s, 6),
        "deadline_in_s": member.deadline_in_s,
        "preemptions": member.num_preemptions,
        "admission": _admission(member),
        "samples": [_sample(sample) for sample in member.samples],
        "samples_to_come": member.num_unforked,
    }


def _counts(num_prompt: int, num_output: int, priority: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "priority": priority}


def _sample(sample: SampleState) -> dict[str, Any]:
    return {
        "index": sample.index,
        "state": sample.status,
        "place_in_queue": sample.place,
        "computed_tokens": sample.num_computed,
        "completion_tokens": sample.num_output,
        "blocks": sample.num_blocks,
        "host_blocks": sample.num_host_blocks,
    }


def _admission(state: RequestState) -> dict[str, Any]:
    found = state.admission
    return {
        "verdict": found.verdict,
        "reason": found.reason,
        "why": why(state),
        "blocks": {name: getattr(found, name) for name in ("required", "free", "watermark", "total")},
    }


def why(state: RequestState) -> str | None:
    """Return the reason why a request waits as a sentence; None if it runs."""
    found = state.admission
    if found.reason == "waits_for_turn":
        place = next(sample.place for sample in state.samples if sample.place is not None)
        return f"{place} {'stands' if place == 1 else 'stand'} before it in the queue"
    if found.reason == "waits_for_blocks":
        kept = f", of which {found.watermark} are kept for requests that run" if found.watermark else ""
        return f"it needs {found.required} KV blocks and {found.free} of {found.total} are free{kept}"
    return None if found.reason is None else WHY.get(found.reason, found.reason)


def as_json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
