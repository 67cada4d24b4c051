"""Moments of a start: how they are written, and what `bench startup` makes of them."""

import time
from pathlib import Path

import pytest
from micro.startup import StartupPart, read_parts, table, with_ready

from vllm_lite.client.engines.launch import SPAWNS_ENGINE
from vllm_lite.executor.multiproc import SPAWNS_WORKERS
from vllm_lite.runtime import log


def test_moments_are_read_in_order() -> None:
    lines = ["12.5\tworker\tb", "10.5\tserver\ta", f"11.0\tserver\t{SPAWNS_ENGINE}", "11.75\tengine\tpython"]
    assert read_parts("\n".join([*lines, "11.5\tserver\tc", f"12\tengine\t{SPAWNS_WORKERS}"]) + "\n", 10.0) == [
        StartupPart("server", "a", 0.5, 0.5),
        StartupPart("server", SPAWNS_ENGINE, 1.0, 0.5),
        StartupPart("server", "c", 1.5, 0.5),
        StartupPart("engine", "python", 1.75, 0.75),
        StartupPart("engine", SPAWNS_WORKERS, 2.0, 0.25),
        StartupPart("worker", "b", 2.5, 0.5),
    ]


def test_no_part_is_negative_where_a_parent_notes_its_moment_late() -> None:
    assert read_parts(f"10.5\tengine\tpython\n11.0\tserver\t{SPAWNS_ENGINE}\n", 10.0) == [
        StartupPart("engine", "python", 0.5, 0.0),
        StartupPart("server", SPAWNS_ENGINE, 1.0, 1.0),
    ]


def test_a_moment_may_be_recorded_after_the_ready_line() -> None:
    before, after = StartupPart("server", "HTTP", 0.5, 0.5), StartupPart("engine", "late", 1.5, 0.25)
    reads = StartupPart("client", "reads the ready line", 1.0, 0.5)
    assert with_ready([before, after], 1.0) == [before, reads, after]


def test_moments_are_recorded_if_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(log.MOMENTS_VARIABLE, raising=False)
    log.moment("server", "nothing")
    monkeypatch.setenv(log.MOMENTS_VARIABLE, str(tmp_path / "no" / "folder"))
    log.moment("server", "nothing, and the start goes on")
    monkeypatch.setenv(log.MOMENTS_VARIABLE, str(tmp_path / "moments"))
    begin_s = time.monotonic()
    log.moment("server", "one")
    log.moment("engine", "two")
    one, two = read_parts((tmp_path / "moments").read_text(), begin_s)
    assert [(part.process, part.what) for part in (one, two)] == [("server", "one"), ("engine", "two")]
    assert 0 <= one.end_s <= two.end_s


def test_the_table() -> None:
    parts = [("server", "python", 0.5, 0.5), ("engine", "waits for all", 2.0, 1.0), ("client", "first chunk", 4.0, 2.0)]
    figures = {
        "command": ["vllm-lite", "serve"],
        "idle_s": 0.0,
        "all_ready_s": [2.5, 2.0, 3.0],
        "all_processor_s": [6.0, 5.0, 7.0],
        "all_first_token_s": [4.0, 3.0, 5.0],
        "ready_s": 2.5,
        "first_token_s": 4.0,
        "again_s": 0.001,
        "parts": [dict(zip(("process", "what", "end_s", "took_s"), part, strict=True)) for part in parts],
    }
    lines = table(figures).splitlines()
    assert lines[0].startswith("vllm-lite serve: 3 starts")
    assert lines[2].split() == ["first", "token", "4.000", "(3.000", "to", "5.000)"]
    assert lines[-3].split() == ["server", "0.500", "0.500", "#####", "python"]
    assert lines[-2].split() == ["engine", "2.000", "1.000", "." * 10, "waits", "for", "all"]
    assert lines[-1].index("#") == lines[-3].index("#") + 20
    assert lines[-1].count("#") == 20
