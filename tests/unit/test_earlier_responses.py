"""Earlier responses of a small request: found and taken apart once, and counted as its own body."""

import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http.body import MAX_HELD, MAX_KEPT, SMALL_BYTES, BodyReader, memory_of
from vllm_lite.server.openai.bodies import MAX_MESSAGES
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.responses.earlier import Earlier, is_running, named
from vllm_lite.server.responses.store import StoredResponse

MB = 1_000_000


def message(name: str, text: str = "hello") -> dict[str, Any]:
    return {"type": "message", "id": name, "role": "user", "content": [{"type": "input_text", "text": text}]}


def record(name: str, own: list[Any], output: list[Any], previous: str | None = None, **more: Any) -> StoredResponse:
    response = {"id": f"resp_{name}", "status": "completed", "output": output}
    encode = msgspec.json.encode
    return StoredResponse(f"resp_{name}", "", previous, False, encode(response), encode(own), **more)


class Kept:
    """A store of responses that counts look-ups and held bytes."""

    def __init__(self, *records: StoredResponse) -> None:
        self.records = {each.id: each for each in records}
        self.asked: list[str] = []
        self.num_bytes = 0
        self.earlier = Earlier(self.find, self.hold)

    async def find(self, response_id: str) -> StoredResponse | None:
        self.asked.append(response_id)
        return self.records.get(response_id)

    async def hold(self, data: bytes | memoryview) -> None:
        self.num_bytes += len(data)


async def test_references_are_found_and_taken_apart_once() -> None:
    """400 references to a response of 28 MB take less than twice its size, and the loop is not held up by them."""
    large = record("a", [message("msg_a_i0", "x" * 28 * MB), message("msg_a_i1")], [message("msg_a_2", "out")])
    kept = Kept(large)

    tracemalloc.start()
    begin_s = time.process_time()
    found = [await kept.earlier.referred(place, f"msg_a_{('i1', '2')[place % 2]}") for place in range(400)]
    took_s, most = time.process_time() - begin_s, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [message("msg_a_i1"), message("msg_a_2", "out")] * 200
    assert kept.asked == ["resp_a"]
    assert most < 30 * MB
    assert took_s < 3.0
    assert kept.num_bytes == 200 * sum(len(msgspec.json.encode(each)) for each in found[:2])


async def test_each_reference_counts() -> None:
    """40 references to an item of 3 MB are a prompt of 120 MB: the limit refuses it, and they share one item."""
    kept = Kept(record("a", [message("msg_a_i0", "x" * 3 * MB)], []))
    found = await _all(kept, ["msg_a_i0"] * 40)
    assert kept.num_bytes > 120 * MB
    assert all(each is found[0] for each in found)


async def _all(kept: Kept, references: list[str]) -> list[Any]:
    return [await kept.earlier.referred(place, each) for place, each in enumerate(references)]


async def test_references_to_unknown_items_are_named() -> None:
    kept = Kept(record("a", [message("msg_a_i0")], []))
    for reference in ("msg_a_i1", "msg_b_i0", "anything"):
        with pytest.raises(ApiError, match=rf"input\[0\] refers to '{reference}'") as error:
            await _all(kept, [reference])
        assert error.value.status == 404
    assert kept.num_bytes == 0


async def test_of_two_items_with_one_id_the_first_counts() -> None:
    kept = Kept(record("a", [message("msg_a_i0", "first"), message("msg_a_i0", "second")], []))
    assert await _all(kept, ["msg_a_i0"]) == [message("msg_a_i0", "first")]


def chain(length: int) -> list[StoredResponse]:
    return [
        record(str(place), [message(f"i{place}")], [message(f"o{place}")], f"resp_{place - 1}" if place else None)
        for place in range(length)
    ]


async def test_a_conversation_is_read_oldest_first_and_counts() -> None:
    records = chain(5)
    kept = Kept(*records)
    found = await kept.earlier.before("resp_4")
    assert [item["id"] for item in found] == [f"{part}{place}" for place in range(5) for part in "io"]
    assert kept.num_bytes == sum(len(each.items) + len(each.response) for each in records)
    assert await Kept().earlier.before(None) == []


async def test_a_conversation_has_an_end() -> None:
    circle = [record("a", [], [], "resp_b"), record("b", [], [], "resp_a")]
    with pytest.raises(ApiError, match="is not kept here"):
        await Kept(*circle).earlier.before("resp_a")
    many = [message(str(place)) for place in range(MAX_MESSAGES + 1)]
    with pytest.raises(ApiError, match="a conversation has at most"):
        await Kept(record("a", many, [])).earlier.before("resp_a")


@pytest.mark.parametrize("status", ["queued", "in_progress", "completed", ""])
async def test_only_ended_responses_can_be_continued(status: str) -> None:
    before = record("a", [], [], status=status)
    assert is_running(before) == (status in ("queued", "in_progress"))
    if is_running(before):
        with pytest.raises(ApiError, match="has not ended"):
            await Kept(before).earlier.before("resp_a")


def test_items_are_listed_as_they_are_stored() -> None:
    stored = record("a", [message("i0"), message("i0")], [message("o0")])
    assert [name for name, _ in named(stored)] == ["i0", "i0", "o0"]
    assert msgspec.json.decode(msgspec.json.encode([data for _, data in named(stored, has_outputs=False)])) == [
        message("i0"),
        message("i0"),
    ]


# ---- the limits


def reader(most: int = 1 << 20) -> BodyReader:
    return BodyReader(ServeConfig(max_request_bytes=most))


def request() -> Request:
    return Request({"type": "http", "method": "POST", "headers": []})


async def test_memory_held_by_a_request_counts_as_its_body() -> None:
    limits, one = reader(), request()
    for _ in range(7):
        await limits.hold(one, bytes(1 << 17))
    assert limits.held_bytes == memory_of(one) - SMALL_BYTES == 7 * (1 << 17) - SMALL_BYTES
    with pytest.raises(ApiError, match=r"with its body, 1179648 bytes.*; at most 1048576") as error:
        await limits.hold(one, bytes(1 << 18))
    assert error.value.status == 400
    with pytest.raises(ApiError, match=r"commas and .* lists, objects and named fields") as error:
        await reader(1 << 24).hold(request(), b"[{,," * (1 << 19))
    assert error.value.status == 400


async def test_all_requests_together_take_so_much() -> None:
    limits = reader()
    requests = [request() for _ in range(MAX_HELD + 1)]
    for each in requests[:MAX_HELD]:
        await limits.hold(each, bytes(1 << 20))
    with pytest.raises(ApiError) as error:
        await limits.hold(requests[-1], bytes(1 << 20))
    assert error.value.status == 429


async def test_kept_bodies_have_a_limit_of_their_own() -> None:
    """Requests that wait for long keep no other body from being read."""

    limits = reader()
    kept = []
    for _ in range(MAX_KEPT):
        one = request()

        async def endpoint(one: Request) -> Response:
            await limits.hold(one, bytes(1 << 20))
            kept.append(limits.keep(one))
            return Response()

        await limits.holding(endpoint)(one)
    assert kept == [(1 << 20) - SMALL_BYTES] * MAX_KEPT
    assert limits.held_bytes == 0
    another = request()
    await limits.hold(another, bytes(1 << 20))
    limits.keep(request())  # a small one
    assert limits.kept_bytes == MAX_KEPT * kept[0]
    limits.kept_bytes += MAX_KEPT * SMALL_BYTES  # now it is full
    with pytest.raises(ApiError, match="requests that wait or run keep 4194304 bytes") as error:
        limits.keep(another)
    assert error.value.status == 429
    with pytest.raises(ApiError):
        limits.keep(request(), SMALL_BYTES + 1)  # decoded small responses count as well
    limits.release(kept.pop())
    limits.keep(another)
