"""Earlier: earlier responses that a request refers to.

A request of 100 bytes can refer to a conversation of megabytes. So each response is looked up and decoded once per
request, in a thread if it is long, and its bytes count as part of the request's body.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec
from msgspec import Raw

from vllm_lite.server.http.long_work import through
from vllm_lite.server.openai.bodies import MAX_MESSAGES
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.responses import items
from vllm_lite.server.responses.client_tools import Item
from vllm_lite.server.responses.store import StoredResponse

Find = Callable[[str], Awaitable[StoredResponse | None]]
"""Finds a stored response of the sender by its id."""
Hold = Callable[[bytes | memoryview], Awaitable[None]]
"""Counts bytes as a part of the request. Raises ApiError (400, 429)."""
_RUNNING = ("queued", "in_progress")


class Earlier:
    """The earlier responses of one request. Every method raises ApiError."""

    def __init__(self, find: Find, hold: Hold) -> None:
        self._find = find
        self._hold = hold
        self._records: dict[str, StoredResponse | None] = {}
        self._named: dict[str, dict[str, Raw]] = {}
        self._items: dict[str, Item] = {}

    async def referred(self, place: int, reference: str) -> Item:
        """The item that `input[place]` refers to. Its bytes count for each reference, as each becomes part of the
        prompt."""
        response_id = items.response_of(reference)
        record = None if response_id is None else await self._record(response_id)
        data = None if record is None else (await self._by_id(record)).get(reference)
        if data is None:
            raise ApiError(404, f"input[{place}] refers to {reference[:80]!r}, which is not kept", f"input[{place}].id")
        await self._hold(memoryview(data))
        if reference not in self._items:
            decode = partial(msgspec.json.decode, data, type=Item)
            self._items[reference] = await through(len(memoryview(data)), decode)
        return self._items[reference]

    async def before(self, previous: str | None) -> list[Item]:
        """Items of the conversation up to the output of the response `previous`, oldest first."""
        parts, count = list[list[Item]](), 0
        async for record in self.chain(previous):
            parts.append(await through(record.size, partial(_decoded, record)))
            count += len(parts[-1])
            if count > MAX_MESSAGES:
                text = f"a conversation has at most {MAX_MESSAGES} items, and this one has more"
                raise ApiError(400, text, "previous_response_id")
        return [item for part in reversed(parts) for item in part]

    async def chain(self, previous: str | None) -> AsyncIterator[StoredResponse]:
        """Yield the response `previous` and its predecessors, newest first. Their bytes count."""
        field, seen = "previous_response_id", set[str]()
        while previous is not None:
            record = await self._record(previous)
            if record is None or previous in seen:
                text = f"previous response {previous[:80]!r} is not kept here, or not with this API key"
                raise ApiError(404, text, field, code="previous_response_not_found")
            if is_running(record):
                raise ApiError(400, f"previous response {previous!r} has not ended; wait for its end", field)
            seen.add(previous)
            await self._hold(record.items)
            await self._hold(record.response)
            yield record
            previous = record.previous

    async def _record(self, response_id: str) -> StoredResponse | None:
        if response_id not in self._records:
            self._records[response_id] = await self._find(response_id)
        return self._records[response_id]

    async def _by_id(self, record: StoredResponse) -> dict[str, Raw]:
        if record.id not in self._named:
            stored = await through(record.size, partial(named, record))
            self._named[record.id] = dict(reversed(stored))  # the first of two items with the same id wins
        return self._named[record.id]


class _Status(msgspec.Struct):
    status: str


class _Id(msgspec.Struct):
    id: str


class _Outputs(msgspec.Struct):
    output: list[Item]


class _StoredOutputs(msgspec.Struct):
    output: list[Raw]


def is_running(record: StoredResponse) -> bool:
    """Whether the response was still running when it was stored."""
    status = record.status or msgspec.json.decode(record.response, type=_Status).status
    return status in _RUNNING


def named(record: StoredResponse, *, has_outputs: bool = True) -> list[tuple[str, Raw]]:
    """Return ids and items of a response. Items stay encoded, in the record's memory."""
    stored = msgspec.json.decode(record.items, type=list[Raw])
    if has_outputs:
        stored += msgspec.json.decode(record.response, type=_StoredOutputs).output
    id_of = msgspec.json.Decoder(_Id)
    return [(id_of.decode(data).id, data) for data in stored]


def _decoded(record: StoredResponse) -> list[Item]:
    output = msgspec.json.decode(record.response, type=_Outputs).output
    return [*msgspec.json.decode(record.items, type=list[Item]), *output]
