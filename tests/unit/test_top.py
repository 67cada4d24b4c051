"""`vllm-lite top`: events become what it shows, and that fits the terminal."""

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from tests.fakes import STATS, welcome
from vllm_lite.errors import RemoteError
from vllm_lite.protocol.view import EngineView, RequestRow
from vllm_lite.server.live.snapshot import EngineSnapshot
from vllm_lite.tools.cli.top import as_object
from vllm_lite.tools.top.screen import screen, sparkline
from vllm_lite.tools.top.watched import ServerLook, watched

LONG = "chatcmpl-" + "0123456789abcdef" * 12


def rows(count: int) -> list[RequestRow]:
    first = RequestRow(LONG, LONG, "running", None, None, 1, 812, 800, 812, 93, 0, 4.0, 57, 0, b"")
    more = [
        RequestRow(f"r{n}", "", "waiting", "waits_for_turn", n, 1, 9, 0, 0, 0, 0, 2.0, 0, 3, b"") for n in range(count)
    ]
    return [first, *more]


def events(count: int = 3) -> Iterator[str]:
    """Lines as a server sends them: everything, and then a change a second later, with a request gone."""
    engine, now_s = EngineSnapshot(0), time.time()
    view = EngineView(41, 16, 12, 4, count + 1, rows(count), 200, 16, 0, b"\1" * 200)
    stats = type(STATS)(num_blocks=199, num_used_blocks=57, generated_tokens=1000, prompt_tokens=10, cached_tokens=4)
    change = engine.look(welcome(), stats, view, now_s)
    yield from lines("snapshot", {"0": engine.whole()}, now_s)
    stats.generated_tokens += 500
    change = engine.look(welcome(), stats, EngineView(42, 4, 0, 4, count, rows(count - 1), 200, 16, 0, b""), now_s + 1)
    yield from lines("update", {"0": change}, now_s + 1)
    yield from lines("update", {"0": None}, now_s + 2)


def lines(kind: str, engines: dict[str, Any], now_s: float) -> list[str]:
    return [f"event: {kind}", f"data: {json.dumps({'time': now_s, 'engines': engines})}", ""]


def drawn(found: ServerLook, num_lines: int, num_columns: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=num_columns, height=num_lines, highlight=False)
    console.print(screen(found, num_lines, num_columns))
    return file.getvalue().splitlines()


def test_events_become_requests_and_speeds() -> None:
    looks = watched(events())
    first = next(looks)
    assert list(first.engines["0"].requests) == [LONG, "r0", "r1", "r2"]
    assert as_object(first)["0"]["tokens_per_s"] == 0.0
    second = next(looks)
    assert list(second.engines["0"].requests) == [LONG, "r0", "r1"]
    shown = as_object(second)["0"]
    assert shown["tokens_per_s"] == pytest.approx(500, abs=2)
    assert shown["requests"][0]["cached"] == 800
    assert json.loads(json.dumps(shown)) == shown
    assert next(looks).engines == {}
    assert drawn(ServerLook(), 24, 80) == ["no engine answers"]
    with pytest.raises(RemoteError, match="the server has ended"):
        next(looks)


@pytest.mark.parametrize(("num_lines", "num_columns"), [(24, 80), (12, 60), (50, 200)])
def test_the_screen_fits(num_lines: int, num_columns: int) -> None:
    looks = watched(events(60))
    next(looks)
    text = drawn(next(looks), num_lines, num_columns)
    assert len(text) <= num_lines
    assert max(map(len, text)) <= num_columns
    whole = "\n".join(text)
    for part in (
        "step 42: 4 sequences, 4 tokens",
        "57 of 199 KV blocks",
        "tokens/s out",
        "running",
        "812",
        "0+3",
        "turn",
    ):
        assert part in whole, whole
    assert f"and {60 - (len(text) - 6)} more" in whole


@pytest.mark.parametrize("data", ["{}", "[]", "no", '{"engines": {"0": {}}, "time": 1}', '{"engines": 3, "time": 1}'])
def test_what_is_no_event_is_said_to_be_none(data: str) -> None:
    with pytest.raises(RemoteError, match="no event of /v1/live"):
        next(watched(["event: update", f"data: {data}", ""]))


def test_a_sparkline_is_as_high_as_its_largest() -> None:
    assert sparkline([0.0, 1.0, 2.0]) == " ▄█"
    assert sparkline([0.0, 0.0]) == "  "
    assert sparkline([]) == ""
