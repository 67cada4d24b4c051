"""Routes about requests that run: how one is, its end, branches of it; and what changes the server.

One that runs on another server of the family is asked for there.
"""

import os
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.client.prompt import check_room
from vllm_lite.client.stream import RequestStream, StreamFactory
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Admission, RequestState, SampleState
from vllm_lite.protocol.params import MAX_SAMPLES, SamplingParams
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.calls.response import Answer
from vllm_lite.server.http.gate import require_admin
from vllm_lite.server.http.reading import Reader, decoded
from vllm_lite.server.openai import bodies
from vllm_lite.server.openai.bodies import ForkBody
from vllm_lite.server.openai.errors import ApiError, in_use, refused
from vllm_lite.server.processes.siblings import Siblings

_ORDER = ("running", "swapped", "preempted", "waiting")
"""Of several, the first is what the whole request is said to be."""
_WHY = {
    "waits_for_seat": "all places in the batch are taken (--max-num-seqs)",
    "waits_for_budget": "the steps have no tokens left for it (--max-num-batched-tokens)",
    "waits_for_swap": "its blocks are on the host, and a step moves only so many (--max-swap-blocks-per-step)",
    "waits_for_step": "the next step takes it in",
    "waits_for_result": "it had to give way while its latest token was computed, which is on its way",
}


class Requests:
    """One method for each route."""

    def __init__(
        self, calls: Calls, factory: StreamFactory, reader: Reader, siblings: Siblings, *, is_private: bool = False
    ) -> None:
        """`is_private`: it is the other servers that ask, and are told of this one alone."""
        self.calls = calls
        self._factory = factory
        self.reader = reader
        self._siblings = siblings
        self._is_private = is_private

    def routes(self) -> list[Route]:
        """All that the other servers of a family may ask for as well."""
        path = "/v1/requests/{request_id}"
        return [
            Route("/load", self.load, methods=["GET"]),
            Route(path, self.state, methods=["GET"]),
            Route(path, self.abort, methods=["DELETE"]),
            Route(path + "/fork", self.reader.holding(self.fork), methods=["POST"]),
        ]

    async def new_id(self, kind: str, wanted: str | None) -> str:
        """What a new call is to be called. Raises ApiError if another server uses the name that is wanted."""
        call_id = f"{kind}-{wanted or os.urandom(12).hex()}"
        if wanted is not None and await self._siblings.know(f"/v1/requests/{call_id}"):
            raise in_use(call_id)
        return call_id

    async def load(self, _: Request) -> Response:
        """How many requests run; if there are several servers, on each, and which one says so."""
        if self._is_private or not self._siblings:
            return as_json({"server_load": len(self.calls)})
        loads = await self._siblings.loads(len(self.calls))
        return as_json({"server_load": sum(loads), "servers": loads, "server": self._siblings.number})

    async def state(self, request: Request) -> Response:
        """How a request is, and why it waits if it does."""
        call = self._find(request)
        if call is None:
            return self._siblings.passed_on(request)
        names = [stream.request_id for stream in call.streams]
        told = await self.calls.ask(lambda session: session.describe(names))
        known = {state.request_id: state for state in told.requests}
        prompts = [_prompt(stream, known.get(stream.request_id)) for stream in call.streams]
        states = {prompt["state"] for prompt in prompts}
        first = next((state for state in known.values() if state.admission.reason is not None), None)
        first = first or next(iter(known.values()), None)
        usage = {
            "prompt_tokens": call.num_prompt_tokens,
            "completion_tokens": sum(stream.num_tokens for stream in call.streams),
        }
        return as_json(
            {
                "id": call.id,
                "object": "request",
                "created": call.created,
                "state": next((state for state in _ORDER if state in states), "finished"),
                "admission": None if first is None else _admission(first),
                "usage": usage,
                "prompts": prompts,
            }
        )

    async def abort(self, request: Request) -> Response:
        """Its client is told so."""
        call = self._find(request)
        if call is None:
            return self._siblings.passed_on(request)
        self.calls.relay.abort(call)
        return as_json({"id": call.id, "object": "request", "deleted": True})

    async def fork(self, request: Request) -> Response:
        """Branches of a request that runs: each begins with what it has generated so far."""
        data = await self.reader.receive(request)
        parent = self._find(request)
        if parent is None:
            return self._siblings.passed_on(request, data)
        body, headers = await decoded(data, ForkBody)
        self.calls.check()
        call = await self._branches(parent, body)
        call.shape_fork = parent.shape_fork
        return Answer(call, parent.shape_fork(call, body), self.calls.run, stream=bool(body.stream), headers=headers)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Nothing computed before is found again; what runs goes on."""
        require_admin(request)
        done = await self.calls.ask(lambda session: session.reset_prefix_cache())
        return as_json({"object": "prefix_cache.reset", **msgspec.structs.asdict(done)})

    # ---- inside

    def _find(self, request: Request) -> Call | None:
        """None if another server may have it. Raises ApiError."""
        call_id = request.path_params["request_id"]
        return self.calls.get(call_id) if self._is_private or not self._siblings else self.calls.find(call_id)

    async def _branches(self, parent: Call, body: ForkBody) -> Call:
        """A call of `n` streams that begin with all that the parent's has. Raises ApiError."""
        count = 1 if body.n is None else body.n
        if not 1 <= count <= MAX_SAMPLES:
            raise ApiError(400, f"n must be between 1 and {MAX_SAMPLES}, got {count}", "n")
        if len(parent.streams) > 1:
            raise ApiError(400, f"request {parent.id!r} has {len(parent.streams)} prompts; only one can be forked")
        (trunk,) = parent.streams
        if trunk.finished:
            raise ApiError(409, f"request {parent.id!r} has finished; only one that runs can be forked")
        if body.stream and trunk.params.prompt_logprobs is not None:
            raise ApiError(400, "the request has prompt_logprobs, which are not told in a stream", "stream")
        call_id = await self.new_id(parent.id.split("-")[0], body.request_id)
        params = _params(trunk.params, body)
        ids = self.calls.stream_ids(call_id, count)
        try:
            check_room([trunk.prompt], body.max_tokens, self._factory.limits.max_model_len)
            streams = [self._factory.fork(trunk, params, each, number) for number, each in enumerate(ids)]
        except RequestError as error:
            raise refused(error, bodies.field_of(str(error))) from error
        return Call(call_id, streams, are_forks=True)


def _params(base: SamplingParams, body: ForkBody) -> SamplingParams:
    """`base` with what is given in `body`; its seed is not passed on. Raises ApiError."""
    defaults = {**msgspec.structs.asdict(base), "seed": None}
    return bodies.sampling(body, defaults, {"n": base.n})


def _prompt(stream: RequestStream, state: RequestState | None) -> dict[str, Any]:
    """How one prompt of a call is. The engine does not know (any more) what has ended."""
    told = {
        "prompt_tokens": len(stream.prompt.token_ids),
        "completion_tokens": stream.num_tokens,
        "priority": stream.params.priority,
    }
    if state is None:
        return {"state": "finished", **told}
    states = {sample.status for sample in state.samples}
    return {
        "state": next(name for name in _ORDER if name in states),
        **told,
        "cached_tokens": state.num_cached,
        "age_s": round(state.age_s, 6),
        "deadline_in_s": state.deadline_in_s,
        "preemptions": state.num_preemptions,
        "admission": _admission(state),
        "samples": [_sample(sample) for sample in state.samples],
        "samples_to_come": state.num_unforked,
    }


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
        "why": _why(state, found),
        "blocks": {
            "required": found.required,
            "free": found.free,
            "watermark": found.watermark,
            "total": found.total,
        },
    }


def _why(state: RequestState, found: Admission) -> str | None:
    """In words."""
    if found.reason == "waits_for_turn":
        place = next(sample.place for sample in state.samples if sample.place is not None)
        return f"{place} {'stands' if place == 1 else 'stand'} before it in the queue"
    if found.reason == "waits_for_blocks":
        kept = f", of which {found.watermark} are kept for requests that run" if found.watermark else ""
        return f"it needs {found.required} KV blocks and {found.free} of {found.total} are free{kept}"
    return None if found.reason is None else _WHY.get(found.reason, found.reason)


def as_json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
