"""Parts of /v1/responses alone: the log, the stores, input as messages, output as items and events."""

import json
import random
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.response_events import check_stream, events_of
from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.text.response.events import CallDelta, Event, ReasoningDelta, TextDelta
from vllm_lite.errors import ConfigError
from vllm_lite.server.openai.bodies import Part
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.responses import history, items
from vllm_lite.server.responses.client_tools import Item
from vllm_lite.server.responses.event_log import EventLog
from vllm_lite.server.responses.history import text_in
from vllm_lite.server.responses.output import Output, OutputStyle
from vllm_lite.server.responses.store import (
    HOLDER_OF_THE_MOST,
    ResponseStore,
    StoredResponse,
)
from vllm_lite.server.responses.toolbox import Toolbox

Make = Callable[[int, int], ResponseStore]


# ---- the log


def test_a_log_is_read_from_any_place() -> None:
    log = EventLog()
    for number in range(5):
        log.add("x", n=number)
    assert log.since(0) == []  # not shown yet
    log.wake()
    events = log.since(3)
    assert events is not None
    assert [json.loads(event.split(b"data: ")[1])["sequence_number"] for event in events] == [3, 4]
    again = EventLog.of(zlib.decompress(log.packed()), 0)
    assert again.is_closed
    assert again.since(0) == log.since(0)


def test_a_log_is_bounded() -> None:
    log = EventLog(max_bytes=1000)
    for number in range(100):
        log.add("x", n=number)
        log.wake()
    assert log.num_bytes <= 1000
    assert log.num_bytes == len(zlib.decompress(log.packed()))
    assert log.end == 100
    assert log.since(0) is None
    assert len(log.since(log.first) or ()) == 100 - log.first
    log.forget(99)
    assert log.first == 99


# ---- the store


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def made(max_bytes: int, max_responses: int) -> ResponseStore:
        path = None if request.param == "memory" else str(tmp_path / "store.db")
        return ResponseStore(path, max_bytes, max_responses)

    return made


def record(name: str, size: int = 10, holder: str = "") -> StoredResponse:
    return StoredResponse(name, "", None, False, b'{"status":"completed"}', b"[]", b"x" * size, holder=holder)


async def test_the_oldest_go(make: Make) -> None:
    store = make(100_000, 3)
    for name in "abcd":
        await store.put(record(name))
    await store.put(record("b", 20))  # again: now it is the newest
    assert [await store.get(name) is not None for name in "abcd"] == [False, True, True, True]
    await store.put(record("e"))
    assert await store.get("c") is None
    found = await store.get("b")
    assert found is not None
    assert len(found.events) == 20
    assert await store.delete("b") is True
    assert await store.delete("b") is False
    store.close()


async def test_bytes_are_bounded(make: Make) -> None:
    store = make(5000, 100)
    for name in "abcdefgh":
        await store.put(record(name, 1000))
    assert [name for name in "abcdefgh" if await store.get(name)] == ["f", "g", "h"]
    await store.put(record("z", 6000))  # more than there is room for
    assert [name for name in "fghz" if await store.get(name)] == ["f", "g", "h"]
    store.close()


async def test_the_holder_of_the_most_loses_its_own(make: Make) -> None:
    """A key that stores more than the others displaces only its own responses, in bytes and in number."""

    store = make(22_000, 13)
    kept = [f"{name}{number}" for name in "abcd" for number in range(2)]
    for name in kept:
        await store.put(record(name, 1000, f"holder of {name[0]}"))
    for number in range(8):
        await store.put(record(f"large{number}", 6000, "greedy"))
    assert [name for name in kept if await store.get(name)] == kept
    assert [number for number in range(8) if await store.get(f"large{number}")] == [7]
    for number in range(40):
        await store.put(record(f"small{number}", 10, "busy"))
    assert [name for name in kept if await store.get(name)] == kept
    assert [number for number in range(8) if await store.get(f"large{number}")] == [7]
    assert [number for number in range(40) if await store.get(f"small{number}")] == list(range(36, 40))
    store.close()


@pytest.mark.parametrize("seed", range(20))
async def test_the_limits_hold_after_any_change(make: Make, seed: int) -> None:
    dice, store = random.Random(seed), make(30_000, 20)
    for _ in range(100):
        name, holder = str(dice.randrange(40)), dice.choice("xyz")
        await (store.delete(name) if dice.random() < 0.2 else store.put(record(name, dice.randrange(9000), holder)))
        kept = [each for number in range(40) if (each := await store.get(str(number))) is not None]
        assert len(kept) <= 20
        assert sum(each.size for each in kept) <= 30_000
    store.close()


async def test_a_file_of_the_first_format_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as file:
        file.execute(
            "CREATE TABLE responses(place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, "
            "size INTEGER NOT NULL, data BLOB NOT NULL)"
        )
        old = {
            name: getattr(record("old"), name)
            for name in StoredResponse.__struct_fields__
            if name not in ("holder", "status")
        }
        file.execute("INSERT INTO responses(id, size, data) VALUES ('old', 1000, ?)", (msgspec.msgpack.encode(old),))
        file.execute("PRAGMA user_version=1")
    file.close()

    stores = [ResponseStore(str(path), 5000, 100) for _ in range(2)]
    assert await stores[0].get("old") == record("old")
    for number in range(9):
        await stores[number % 2].put(record(str(number), 1000, "new"))
    assert await stores[0].get("old") == record("old")
    for store in stores:
        store.close()


def test_a_full_file_is_not_read_through(tmp_path: Path) -> None:
    """The holders' sums are found in an index: behind the records they would take reading all of these."""
    path = tmp_path / "store.db"
    ResponseStore(str(path), 5000, 100).close()
    with sqlite3.connect(path) as file:
        for by in ("count(*)", "sum(size)"):
            plan = [row[-1] for row in file.execute(f"EXPLAIN QUERY PLAN {HOLDER_OF_THE_MOST.format(by)}")]
            assert "SCAN responses USING COVERING INDEX holdings" in plan
    file.close()


def test_a_file_that_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=r"responses_store .* cannot be used: file is not a database"):
        ResponseStore(str(path), 1000)
    with pytest.raises(ConfigError, match="responses_store"):
        ResponseStore(str(tmp_path / "no" / "folder"), 1000)
    other = tmp_path / "newer.db"
    with sqlite3.connect(other) as file:
        file.execute("PRAGMA user_version=7")
    with pytest.raises(ConfigError, match="its format is 7"):
        ResponseStore(str(other), 1000)


# ---- input


def read(*given: Any) -> list[Item]:
    return items.read(list(given), "resp_1", {}).items


def test_input_of_which_nothing_is_shown_names_what_was_left_out() -> None:
    found = items.read([{"type": "hologram"}], "resp_1", {})
    with pytest.raises(
        ApiError, match=r"^nothing of input is shown to the model \(left out: input\[0\] hologram\); give"
    ):
        history.messages(None, found.items, Toolbox([]), found.left_out)
    with pytest.raises(ApiError, match=r"^input is empty"):
        history.messages(None, [], Toolbox([]))


def test_items_become_messages() -> None:
    found = history.messages(
        "Be brief.",
        read(
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "ask", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "bear"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "fox"}]},
            {"role": "system", "content": "Now end."},
            {"role": "developer", "content": "In rhymes."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ),
        Toolbox([]),
    )
    assert [(message.role, message.content) for message in found] == [
        ("system", "Be brief.\n\nBe kind."),
        ("user", [Part("text", "a"), Part("text", "b")]),
        ("assistant", "I look."),
        ("tool", "bear"),
        ("tool", "fox"),
        ("system", "Now end."),
        ("developer", "In rhymes."),
        ("assistant", "No."),
    ]
    assert found[2].reasoning == "Hm."
    assert [call.function.name for call in found[2].tool_calls or ()] == ["look", "ask"]
    assert found[4].tool_call_id == "2"


def test_packed_reasoning_is_read_back() -> None:
    packed = items.encrypted("Hm \N{BEAR FACE}.")
    one, other, broken = read(
        {"type": "reasoning", "summary": [], "encrypted_content": packed},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-of-another-server"},
        {"type": "reasoning", "summary": [], "encrypted_content": packed[:-3]},
    )
    assert text_in(one) == "Hm \N{BEAR FACE}."
    assert text_in(other) == text_in(broken) == ""


def test_an_item_knows_its_response() -> None:
    for is_input in (True, False):
        assert items.response_of(items.item_id("message", "resp_a_b_2", 3, is_input=is_input)) == "resp_a_b_2"
    assert items.response_of("msg_1") is None
    assert items.response_of("fc_" + "x" * 5000 + "_1") is None


def test_an_output_without_its_call() -> None:
    with pytest.raises(ApiError, match="no function_call before it has the call_id 'x'"):
        history.messages(None, read({"type": "function_call_output", "call_id": "x", "output": ""}), Toolbox([]))


# ---- output


class Spoken:
    """A fake parser that returns given events, some for each delta."""

    num_reasoning = 3

    def __init__(self, *events: list[Event]) -> None:
        self._events = list(events)

    def feed(self, delta: CompletionOutput) -> list[Event]:
        del delta
        return self._events.pop(0)

    def id_of(self, call: CallDelta) -> str:
        return f"call_{call.index}"


def test_reasoning_text_and_calls_are_items() -> None:
    deltas: list[list[Event]] = [
        [ReasoningDelta("Hm")],
        [ReasoningDelta(", yes.")],
        [TextDelta("I ")],
        [],
        [TextDelta("look.")],
        [CallDelta(0, "look", "")],
        [CallDelta(0, None, '{"a":')],
        [CallDelta(0, None, "1}"), CallDelta(1, "ask", "{}"), TextDelta("Done.")],
    ]
    log = EventLog()
    response: dict[str, Any] = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "demo",
        "status": "in_progress",
        "output": [],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    parser: Any = Spoken(*deltas)
    output = Output(response, parser, Spelling(None), log=log, shown=OutputStyle(None, True, Toolbox([])))
    output.begin()
    for _ in deltas:
        output.feed(CompletionOutput(0, "", [1]))
    usage = {
        "input_tokens": 1,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output.num_tokens,
        "output_tokens_details": {"reasoning_tokens": output.num_reasoning},
        "total_tokens": 11,
    }
    output.finish("incomplete", usage, incomplete_details={"reason": "max_output_tokens"})
    found = check_stream(events_of(log))["output"]
    assert [item["type"] for item in found] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert found[0]["content"] == [{"type": "reasoning_text", "text": "Hm, yes."}]
    assert text_in(read({**found[0], "content": None})[0]) == "Hm, yes."
    assert [item.get("arguments") for item in found[2:4]] == ['{"a":1}', "{}"]
    assert [item["status"] for item in found] == ["completed"] * 4 + ["incomplete"]
