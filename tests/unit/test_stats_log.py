"""The engine's line of statistics: its figures and its times, against a clock that only the test moves."""

import logging
import re
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_meter import Bench
from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.observe.stats_log import NUM_HIT_LINES, StatsLog
from vllm_lite.engine.process import HEARTBEAT_MS, IDLE_LOOK_MS, EngineProcess
from vllm_lite.process_settings import EngineSettings
from vllm_lite.runtime.wakeup import Wakeup

INTERVAL_S = 10.0
LOGGER = "vllm_lite.engine.observe.stats_log"


@pytest.fixture(autouse=True)
def seen(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, LOGGER)
    return caplog


class Logged:
    """A bench that calls its log after every step, as the engine's loop does."""

    def __init__(self, seen: pytest.LogCaptureFixture, **settings: Any) -> None:
        self.bench = Bench(**settings)
        self.log = StatsLog(INTERVAL_S, "cpu")
        self.times: list[float] = []
        self._seen = seen
        self.look()

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._seen.records if record.name == LOGGER]

    def look(self) -> None:
        before = len(self.lines)
        if self.bench.now_s >= self.log.due_s:
            self.log.write(self.bench.core, self.bench.now_s)
        self.times += [self.bench.now_s] * (len(self.lines) - before)

    def step(self, took_s: float = 1.0) -> None:
        self.bench.begin()
        self.bench.now_s += took_s
        self.bench.finish()
        self.look()

    def steps(self, count: int, took_s: float = 1.0) -> None:
        for _ in range(count):
            self.step(took_s)


def numbers(line: str) -> dict[str, float]:
    return {name.strip(" ,"): float(value) for name, value in re.findall(r"([A-Za-z ]+): ([\d.]+)", line)}


def test_a_line_is_as_vllm_writes_it(seen: pytest.LogCaptureFixture) -> None:
    logged = Logged(seen, num_blocks=51)
    logged.bench.add("a", range(16), max_tokens=40)
    logged.steps(10)
    [line] = logged.lines
    assert line == (
        "Avg prompt throughput: 1.6 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 1 reqs, "
        "Waiting: 0 reqs, CPU KV cache usage: 14.0%, Prefix cache hit rate: 0.0%"
    )


def test_there_is_one_every_ten_seconds_and_one_behind_the_last(seen: pytest.LogCaptureFixture) -> None:
    logged = Logged(seen)
    logged.steps(25)  # idle
    assert logged.lines == []
    logged.bench.add("a", range(4), max_tokens=18)
    logged.steps(40)
    assert logged.times == [30, 40, 50, 60]
    assert [numbers(line)["Avg generation throughput"] for line in logged.lines] == [0.5, 1.0, 0.3, 0]
    assert [numbers(line)["Running"] for line in logged.lines] == [1, 1, 0, 0]
    assert not logged.log.owes
    logged.steps(50)
    assert len(logged.lines) == 4, "an idle engine says nothing"


def test_rates_match_the_time_that_has_passed(seen: pytest.LogCaptureFixture) -> None:
    """A step may take longer than the time between two lines."""
    logged = Logged(seen)
    logged.bench.add("a", range(8), max_tokens=40, n=4)
    logged.steps(4, took_s=20)
    assert [numbers(line)["Avg prompt throughput"] for line in logged.lines] == [0.4, 0.0, 0.0, 0.0]
    assert numbers(logged.lines[-1])["Avg generation throughput"] == 0.2


def test_a_long_prompt_counts_as_it_is_computed(seen: pytest.LogCaptureFixture) -> None:
    """Not when it is admitted: 80 tokens of 4 a step would be 8 in a second, and then nothing."""
    logged = Logged(seen, max_num_batched_tokens=4, max_num_seqs=2)
    logged.bench.add("a", [number % 50 for number in range(80)], max_tokens=5)
    logged.steps(40)
    assert [numbers(line)["Avg prompt throughput"] for line in logged.lines] == [4.0, 4.0, 0.0, 0.0]


def test_waiting_requests_are_work(seen: pytest.LogCaptureFixture) -> None:
    logged = Logged(seen, max_num_seqs=1)
    for name in "abc":
        logged.bench.add(name, range(4), max_tokens=30)
    logged.steps(10)
    assert (numbers(logged.lines[0])["Running"], numbers(logged.lines[0])["Waiting"]) == (1, 2)
    logged.bench.core.lose_workers("killed")
    for number in (1, 2, 3):
        logged.bench.now_s += 10
        logged.look()
        assert (numbers(logged.lines[number])["Running"], numbers(logged.lines[number])["Waiting"]) == (0, 3)


def test_a_preemption_is_shown_in_its_line_alone(seen: pytest.LogCaptureFixture) -> None:
    logged = Logged(seen, num_blocks=9, enable_prefix_caching=False, preemption_mode="recompute")
    for name, start in (("a", 0), ("b", 30)):
        logged.bench.add(name, range(start, start + 8), max_tokens=12)
    logged.steps(40, took_s=5)
    shown = [numbers(line).get("Preemptions") for line in logged.lines]
    assert sum(filter(None, shown)) == logged.bench.stats.preemptions > 0
    assert None in shown
    assert all("hit rate" not in line for line in logged.lines)
    rates = [numbers(line)["Avg prompt throughput"] for line in logged.lines]
    assert rates == [1.6, *[0.0] * (len(rates) - 1)], "a prompt that is computed again counts once"


def test_the_hit_rate_covers_the_last_lines(seen: pytest.LogCaptureFixture) -> None:
    logged = Logged(seen)
    for number in range(2):
        logged.bench.add(f"same {number}", range(17), max_tokens=1)
        logged.steps(10)
    assert [numbers(line)["Prefix cache hit rate"] for line in logged.lines] == [0.0, 47.1]  # 16 of 34
    logged.steps(10)
    assert numbers(logged.lines[2])["Prefix cache hit rate"] == 47.1
    for number in range(NUM_HIT_LINES):
        logged.bench.add(f"other {number}", [number % 50, 49, 48, 47, number // 50], max_tokens=1)
        logged.steps(10)
    assert numbers(logged.lines[-1])["Prefix cache hit rate"] < 1, "both lines of before are forgotten"


def test_a_gpu_is_called_so(seen: pytest.LogCaptureFixture) -> None:
    logged = Logged(seen)
    logged.log = StatsLog(INTERVAL_S, "cuda")
    logged.look()
    logged.bench.add("a", range(4), max_tokens=40)
    logged.steps(10)
    assert "GPU KV cache usage: " in logged.lines[0]


# ---- in the engine's loop


@pytest.mark.parametrize(
    ("settings", "interval_s"),
    [({}, 10.0), ({"log_stats_interval_s": 2}, 2.0), ({"disable_log_stats": True, "log_stats_interval_s": 2}, None)],
)
def test_settings(settings: dict[str, Any], interval_s: float | None) -> None:
    config = EngineConfig.check(settings)
    assert config.stats_interval_s == interval_s
    assert StatsLog(config.stats_interval_s, "cpu").due_s == (inf if interval_s is None else -inf)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_loop_writes_it_when_it_is_due(*, is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.check({"disable_log_stats": not is_on}).resolve(
        max_position_embeddings=1000, dtype="float32", model_path="m"
    )
    stop = Wakeup()
    engine = EngineProcess(EngineSettings(config, f"ipc://{tmp_path}/engine", "none"), stop)
    times_s, written = [100.0, 109.9, 110.0, 119.0, 121.0], list[float]()
    clock = iter(times_s)
    monkeypatch.setattr("vllm_lite.engine.process.time", SimpleNamespace(monotonic=lambda: next(clock)))
    write = engine.stats_log.write
    core = Bench().core

    def noted(core: EngineCore, at_s: float) -> None:
        written.append(at_s)
        write(core, at_s)

    monkeypatch.setattr(engine.stats_log, "write", noted)
    try:
        assert engine.patience_ms_of(core) == IDLE_LOOK_MS
        engine.stats_log.owes = True
        assert engine.patience_ms_of(core) == HEARTBEAT_MS, "its last line comes in time"
        for _ in times_s:
            engine._publish(core, [])
    finally:
        engine.port.close()
        stop.close()
    assert written == ([100.0, 110.0, 121.0] if is_on else [])
