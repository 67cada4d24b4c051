"""Checks of chaos.py itself: it is shown every kind of broken promise and has to see it, and kept ones, which it must
not take for broken."""

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance import chaos, chaos_check
from tests.acceptance.chaos_check import Ledger, Process, Use, Watch, compare, grown, processes, running
from tests.acceptance.chaos_client import Collected, Record
from tests.acceptance.chaos_faults import KINDS, draw, inject
from tests.acceptance.chaos_report import Options, Report, quantiles
from tests.acceptance.chaos_specs import Answer, Fork, make_specs
from tests.deadlines import scaled

TOKENS = [5, 6, 7, 8, 5, 9, 10, 11]
DEADLINE_S = scaled(20.0)
GOOD = {"lost": 0, "repeated": 0, "missing": 0, "different": 0}


@pytest.mark.parametrize(
    ("got", "what"),
    [
        (TOKENS, None),
        (TOKENS[:-1], "missing"),
        ([], "missing"),
        (TOKENS[:3] + TOKENS[4:], "missing"),
        (TOKENS[1:], "missing"),
        ([*TOKENS, 12], "repeated"),
        (TOKENS[:4] + TOKENS[3:], "repeated"),
        (TOKENS[:6] + TOKENS[2:], "repeated"),
        ([*TOKENS[:3], 99, *TOKENS[4:]], "different"),
        ([99], "different"),
    ],
)
def test_tokens_are_compared(got: list[int], what: str | None) -> None:
    assert compare(TOKENS, got) == what


def test_a_part_of_the_tokens_is_enough_where_the_reader_stopped() -> None:
    assert compare(TOKENS, TOKENS[:3], prefix=True) is None
    assert compare(TOKENS, [], prefix=True) is None
    assert compare(TOKENS, [5, 7], prefix=True) == "missing"
    assert compare(TOKENS, [*TOKENS, 1], prefix=True) == "repeated"


def answer(*tokens: list[int], reason: str = "length", **fields: Any) -> Answer:
    return Answer(list(tokens), [reason for _ in tokens], **fields)


EXPECTED = {
    "one": answer(TOKENS),
    "two": answer(TOKENS, TOKENS[::-1]),
    "scored": answer([5, 6], prompt_logprobs=[-1.0, -2.0], logprobs=[[-0.5, -0.25]]),
}


def told(key: str, got: Answer | None, **fields: Any) -> tuple[Ledger, dict[str, int]]:
    """A ledger that has recorded the start and end of one stream, and its counts of broken promises."""
    ledger = Ledger(EXPECTED)
    values = {"way": "python"} | fields
    ledger.take(Record("a-1", key, values["way"]))
    ledger.take(Record("a-1", key, **values, ended=True, answer=got))
    return ledger, {what: count for what, count in ledger.broken.items() if count}


@pytest.mark.parametrize(
    ("key", "got", "fields", "broken"),
    [
        ("one", answer(TOKENS), {}, {}),
        ("one", answer(TOKENS[:-1]), {}, {"missing": 1}),
        ("one", answer(TOKENS[:2] + TOKENS), {}, {"repeated": 1}),
        ("one", answer([4, *TOKENS[1:]]), {}, {"different": 1}),
        ("one", answer(TOKENS, reason="abort"), {}, {"different": 1}),
        ("one", answer(TOKENS[:3], reason="abort"), {"intent": "abort"}, {}),
        ("one", answer([6], reason="abort"), {"intent": "abort"}, {"missing": 1}),
        ("one", answer(TOKENS[:2]), {"error": "EngineDeadError: it died"}, {"lost": 1}),
        ("one", None, {"error": "no end within 3 s"}, {"lost": 1}),
        ("one", answer(TOKENS[:2]), {"intent": "deadline", "error": "RequestError: its deadline has passed"}, {}),
        ("one", answer([99]), {"intent": "deadline", "error": "its deadline has passed"}, {"different": 1}),
        ("one", answer(TOKENS), {"error": "its deadline has passed"}, {"lost": 1}),
        ("one", answer(TOKENS), {"faults": ["sample 0 got tokens behind its end"]}, {"repeated": 1}),
        ("two", answer(TOKENS, TOKENS[::-1]), {}, {}),
        ("two", answer(TOKENS), {}, {"missing": 1, "different": 1}),
        ("two", answer(TOKENS, TOKENS), {}, {"different": 1}),
        ("scored", EXPECTED["scored"], {}, {}),
        ("scored", answer([5, 6], prompt_logprobs=[-1.0, -2.0] * 2, logprobs=[[-0.5, -0.25]]), {}, {"repeated": 1}),
        ("scored", answer([5, 6], prompt_logprobs=[-1.0], logprobs=[[-0.5, -0.25]]), {}, {"missing": 1}),
        ("scored", answer([5, 6], prompt_logprobs=[-1.0, -2.1], logprobs=[[-0.5, -0.25]]), {}, {"different": 1}),
        ("scored", answer([5, 6], prompt_logprobs=[-1.0, -2.0], logprobs=[[-0.5]]), {}, {"missing": 1}),
        ("one", answer(TOKENS, reason=""), {"way": "raw"}, {}),
    ],
)  # fmt: skip
def test_every_broken_stream_is_counted(key: str, got: Answer, fields: dict[str, Any], broken: dict[str, int]) -> None:
    ledger, found = told(key, got, **fields)
    assert found == broken
    assert bool(ledger.examples) == bool(broken)
    assert not ledger.open


def test_a_stream_without_an_end_is_lost() -> None:
    ledger = Ledger(EXPECTED)
    ledger.take(Record("a-1", "one", "http"))
    ledger.lose_open()
    assert ledger.broken == GOOD | {"lost": 1}


def test_a_stream_that_ends_twice_is_seen() -> None:
    ledger, _ = told("one", answer(TOKENS))
    ledger.take(Record("a-1", "one", "python", ended=True, answer=answer(TOKENS)))
    assert ledger.broken == GOOD | {"repeated": 1}


def test_the_streams_of_a_killed_client_are_dropped() -> None:
    ledger = Ledger(EXPECTED)
    for stream in ("a-1", "a-2", "ab-1"):
        ledger.take(Record(stream, "one", "python"))
    ledger.vanished("a")
    assert list(ledger.open) == ["ab-1"]
    assert ledger.streams["vanished"] == 2


def test_forks_wait_for_their_reference() -> None:
    ledger, broken = told("one", answer([5, 6, 1]), fork=Fork("one", 2, 7, 3))
    assert not broken
    (record,) = ledger.forks
    ledger.judge(record, answer([5, 6, 2]))
    assert ledger.broken == GOOD | {"different": 1}


def test_a_conviction_is_counted_apart() -> None:
    error = "RequestError: request 'a-1' was in flight each time a worker was killed"
    ledger, broken = told("one", answer([]), error=error)
    assert not broken
    assert ledger.streams["convicted"] == 1


class TestCollected:
    def faults(self, *shown: tuple[list[int], str | None], is_delta: bool = False) -> list[str]:
        record = Record("a-1", "one", "python")
        collected = Collected(record, is_delta=is_delta)
        for tokens, reason in shown:
            collected.add(0, tokens, reason)
        return record.faults

    def test_answers_must_grow(self) -> None:
        assert not self.faults(([1], None), ([1, 2], None), ([1, 2], "length"))
        assert not self.faults(([1], None), ([2], "length"), is_delta=True)

    def test_a_token_that_changes_is_seen(self) -> None:
        (fault,) = self.faults(([1, 2], None), ([1, 3], None))
        assert "then shown" in fault

    def test_a_token_that_disappears_is_seen(self) -> None:
        assert self.faults(([1, 2], None), ([1], None))

    @pytest.mark.parametrize("is_delta", [False, True])
    def test_a_token_behind_the_end_is_seen(self, *, is_delta: bool) -> None:
        assert any("behind its end" in fault for fault in self.faults(([1], "stop"), ([1, 2], None), is_delta=is_delta))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


class TestProcesses:
    def test_an_orphan_is_found(self, sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
        watch = Watch(sleeper.pid, tmp_path)
        watch.look()
        (left,) = watch.left()
        assert left.startswith(f"process {sleeper.pid} (sleep")
        sleeper.kill()
        sleeper.wait(DEADLINE_S)
        assert watch.left() == []

    def test_a_file_that_is_left_is_found(self, sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
        watch = Watch(sleeper.pid, tmp_path)
        (tmp_path / "socket").touch()
        assert watch.left() == [f"file {tmp_path / 'socket'}"]

    def test_a_segment_that_is_left_is_found(
        self, sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shared, run = tmp_path / "shm", tmp_path / "t"
        shared.mkdir()
        run.mkdir()
        (shared / "vl-before").touch()
        monkeypatch.setattr(chaos_check, "SHARED", shared)
        watch = Watch(sleeper.pid, run)
        (shared / "vl-group").touch()
        assert watch.left() == ["shared memory vl-group"]

    def test_growth_is_found(self, sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
        watch = Watch(sleeper.pid, tmp_path)
        watch.uses[7] = Use("engine", (100.0, 20), (400.0, 60), (400.0, 60))
        watch.uses[8] = Use("server", (100.0, 20), (400.0, 60), (120.0, 22))
        assert len(watch.growth()) == 2
        assert all("engine (pid 7)" in sentence for sentence in watch.growth())
        assert list(grown("one", (1.0, 1), (1.0, 100)))
        assert list(grown("one", (1.0, 1), (1000.0, 1)))
        assert not list(grown("one", (1.0, 1), (100.0, 10)))

    def test_descendants_are_found(self) -> None:
        own = processes(os.getpid())
        assert (own[0].pid, own[0].role) == (os.getpid(), "server")

    def test_a_fault_hits_its_victim_only(self, sleeper: subprocess.Popen[bytes]) -> None:
        other = Process(os.getpid(), "server", "tests")
        victim = Process(sleeper.pid, "worker", "vl-worker 0")
        fault = inject("kill-worker", random.Random(0), [other, victim], 0.1)
        assert fault is not None
        assert (fault.role, fault.is_deadly) == ("worker", True)
        assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
        assert inject("kill-engine", random.Random(0), [other, victim], 0.1) is None

    @pytest.mark.parametrize("kind", ["pause-worker", "slow-worker"])
    def test_a_paused_process_continues(
        self, sleeper: subprocess.Popen[bytes], kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.acceptance.chaos_faults.SLOW_S", 0.05)
        fault = inject(kind, random.Random(0), [Process(sleeper.pid, "worker", "w")], 0.06)
        assert fault is not None
        assert not fault.is_deadly
        assert running(sleeper.pid)
        assert Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"

    def test_one_seed_draws_the_same_faults(self) -> None:
        one, other = ([draw(random.Random(seed), list(KINDS)) for seed in range(20)] for _ in range(2))
        assert one == other
        assert len(set(one)) > 1


def test_one_seed_makes_the_same_requests() -> None:
    one, other, third = (make_specs(seed, 384, 2, 100) for seed in (1, 1, 2))
    assert one == other
    assert one != third
    assert len({spec.key for spec in one}) == len(one)


def test_one_broken_promise_makes_the_report_bad() -> None:
    fields: dict[str, Any] = {"options": Options(), "streams": {}, "faults": {}, "restarts": {}, "recovery_s": {}}
    fields |= {"num_specs": 1, "seconds": 1.0, "examples": []}
    assert Report(broken=dict(GOOD), **fields).is_good
    for what in GOOD:
        assert not Report(broken=GOOD | {what: 1}, **fields).is_good


def test_quantiles() -> None:
    assert quantiles([3.0, 1.0, 2.0]) == {"count": 3, "p50": 2.0, "p90": 3.0, "max": 3.0}


@pytest.mark.parametrize("flags", [["--seconds", "0"], ["--kinds", "kill-all"], ["--tensor-parallel-size", "0"]])
def test_flags_that_cannot_be(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chaos.parse_args(flags)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err
