"""`vllm-lite top`: its screen shows the events and fits the terminal."""

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
from vllm_lite.tools.top.screen import plain, screen, sparkline
from vllm_lite.tools.top.watched import ServerLook, looks
from vllm_lite.tools.top.watched import events as read

HOSTILE = [
    "\x1b[2J\x1b]0;pwned\x07",
    "\x9b31mred",
    "a\rb\nc\x0bd\x0ce",
    "\u202egnp.exe",
    "\u2028\u2029\x85",
    "[bold red]markup[/] [link=x]y[/link]",
    "\x1bPq#0;2;0;0;0#0~~@@vv@@~~$\x1b\\",
    "漢字" * 30,
    "e\u0301" * 40,
    "\x00\x7f",
]
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
    found = looks(read(events()))
    first = next(found)
    assert list(first.engines["0"].requests) == [LONG, "r0", "r1", "r2"]
    assert as_object(first)["engines"]["0"]["tokens_per_s"] == 0.0
    second = next(found)
    assert list(second.engines["0"].requests) == [LONG, "r0", "r1"]
    shown = as_object(second)["engines"]["0"]
    assert shown["tokens_per_s"] == pytest.approx(500, abs=2)
    assert shown["requests"][0]["cached"] == 800
    assert json.loads(json.dumps(shown)) == shown
    assert next(found).engines == {}
    assert drawn(ServerLook(), 24, 80) == ["no engine answers"]
    with pytest.raises(RemoteError, match="the server has ended"):
        next(found)


@pytest.mark.parametrize(("num_lines", "num_columns"), [(24, 80), (12, 60), (50, 200)])
def test_the_screen_fits(num_lines: int, num_columns: int) -> None:
    found = looks(read(events(60)))
    next(found)
    text = drawn(next(found), num_lines, num_columns)
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


@pytest.mark.parametrize("num_engines", [1, 30])
def test_an_encoder_has_no_kv_cache(num_engines: int) -> None:
    watched = several(0, num_engines)
    for engine in watched.engines.values():
        engine.head["counts"] |= {"num_blocks": 1, "num_used_blocks": 0}
    whole = "\n".join(drawn(watched, 24, 80))
    assert "no KV cache" in whole
    assert "KV blocks" not in whole


@pytest.mark.parametrize("num_columns", [1, 20, 40, 80, 400])
@pytest.mark.parametrize("num_engines", [1, 3, 30])
@pytest.mark.parametrize("num_models", [0, 4, 300])
def test_any_terminal_has_its_part(num_columns: int, num_engines: int, num_models: int) -> None:
    watching = several(num_models, num_engines)
    for num_lines in (3, 6, 12, 24, 100):
        text = drawn(watching, num_lines, num_columns)
        assert len(text) <= max(num_lines, 5), (num_lines, text)
        assert max(map(len, text)) <= num_columns
    whole = "\n".join(drawn(watching, 100, 200))
    if num_models:
        assert f"{num_models} models, " in whole
        assert "2 in 3 out" in whole
    if num_engines == 30:
        assert "1,234 of 5,678 KV blocks" in whole, "a line each"


def several(num_models: int, num_engines: int) -> ServerLook:
    """A server's look with so many models and engines, the first models' if there are models."""
    look = ServerLook()
    counts = dict.fromkeys(("loads", "wakes", "sleeps", "stops"), 1) | {"stops": 2}
    row = {"memory_bytes": 3 << 30, "active": 2, "waiting": 1, "used": 90, "error": None, "hidden": None}
    states = {f"model{number}": "loaded" if number < num_engines else "unloaded" for number in range(num_models)}
    models = {name: {**row, "state": state, "counts": counts} for name, state in states.items()}
    engine = next(looks(read(events()))).engines["0"]
    counted = {**engine.head["counts"], "num_used_blocks": 1234, "num_blocks": 5678, "num_waiting": 61}
    said = {**engine.head, "counts": counted, "requests": dict(engine.requests), "blocks": None}
    names = [f"model{number}/0" if num_models else str(number) for number in range(num_engines)]
    if num_models:
        look.take("snapshot", {"time": 100.0, "models": models, "memory_limit_bytes": 9 << 30})
    look.take("snapshot", {"time": 100.0, "engines": dict.fromkeys(names, said)})
    return look


@pytest.mark.parametrize("text", HOSTILE)
def test_a_terminal_obeys_no_text_of_others(text: str) -> None:
    look = several(2, 2)
    for engine in look.engines.values():
        engine.head["state"] = text
        engine.requests = {
            "r": {**next(iter(engine.requests.values())), "id": text, "state": "waiting", "reason": text}
        }
    look.models[text] = {**look.models["model0"], "error": text}
    for num_columns in (40, 120):
        shown = "\n".join(drawn(look, 40, num_columns))
        assert all(each.isprintable() or each == "\n" for each in shown)
        assert len(shown.splitlines()) <= 40
    assert plain(text) == text or not text.isprintable()


def test_models_come_and_go_with_their_engines() -> None:
    look = several(3, 2)
    assert list(look.engines) == ["model0/0", "model1/0"]
    assert not look.has_speeds, "engines have been seen once"
    look.take("snapshot", {"time": 101.0, "model": "model0", "engines": {}})
    assert list(look.engines) == ["model1/0"], "a snapshot of one model says nothing of the others"
    assert not look.is_whole
    look.take("update", {"time": 102.0, "models": {"model1": {"state": "unloaded"}}, "memory_limit_bytes": 1})
    assert (look.engines, look.models["model1"]["active"]) == ({}, 2)
    look.take("update", {"time": 102.0, "models": {"model1": None}, "memory_limit_bytes": 1})
    assert list(look.models) == ["model0", "model2"]
    look.take("snapshot", {"time": 103.0, "models": {}, "memory_limit_bytes": 1})
    assert look.models == {}


def test_a_snapshot_forgets_an_engine_that_it_does_not_have() -> None:
    look = several(0, 2)
    assert list(look.engines) == ["0", "1"]
    look.take("snapshot", {"time": 101.0, "engines": {}})
    assert look.engines == {}


@pytest.mark.parametrize("data", ["{}", "[]", "no", '{"engines": {"0": {}}, "time": 1}', '{"engines": 3, "time": 1}'])
def test_invalid_events_are_refused(data: str) -> None:
    with pytest.raises(RemoteError, match="not an event of /v1/live"):
        next(looks(read(["event: update", f"data: {data}", ""])))


def test_a_sparkline_is_as_high_as_its_largest() -> None:
    assert sparkline([0.0, 1.0, 2.0]) == " ▄█"
    assert sparkline([0.0, 0.0]) == "  "
    assert sparkline([]) == ""
