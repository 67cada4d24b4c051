"""A batch's output and journal: however a run ends, the next one continues it, and each row has one line."""

import errno
import fcntl
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.batch_files import answered, ids
from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch import batch_results, journal, rows
from vllm_lite.tools.batch.batch_results import BatchResults
from vllm_lite.tools.batch.journal import RECORD_BYTES, BatchHeader, BatchRecord, Journal, RecordKind
from vllm_lite.tools.batch.rows import Bad

HEADER = BatchHeader("input", {"model": "a"})
NUM = 12


class _Killed(BaseException):
    """Simulates a process that is killed during a write."""


def fill(results: BatchResults, first: int = 1, last: int = NUM) -> None:
    for number in range(first, last + 1):
        if number not in results.done:
            failed = number % 4 == 0
            kind = RecordKind.FAILED if failed else RecordKind.ANSWERED
            results.append(number, kind, answered(f"r{number}", 400 if failed else 200), (3, 2, 1))


def written(path: Path) -> tuple[bytes, bytes, int]:
    """Six rows of a batch, with a mark behind the third: the output, the journal, and the output's size at the mark."""
    with BatchResults(str(path), HEADER) as results:
        fill(results, last=3)
        results.sync()
        marked = path.stat().st_size
        fill(results, last=6)
        return path.read_bytes(), results.paths.journal.read_bytes(), marked


def expect_each_once(path: Path) -> None:
    """Check the output and the journal: each row has one line, and the next run has nothing to do."""
    assert Counter(ids(path)) == Counter(f"r{number}" for number in range(1, NUM + 1))
    with BatchResults(str(path), HEADER) as results:
        assert [number for number in range(1, NUM + 1) if number not in results.done] == []


@pytest.fixture(autouse=True)
def _no_marks_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off time-based flushes, and fsync, which would take most of the time."""
    monkeypatch.setattr(batch_results, "SYNC_S", 1e9)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_a_reopened_output_knows_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchResults(str(path), HEADER) as results:
        fill(results, last=5)
        results.append(6, RecordKind.BAD, rows.failure(Bad(6, None, "invalid_url", "no")))
        assert 5 in results.done
    with BatchResults(str(path), HEADER) as results:
        assert {number for number in range(20) if number in results.done} == {1, 2, 3, 4, 5, 6}
        totals = results.totals
        assert (totals.num_answered, totals.num_failed, totals.num_bad, totals.num_rows) == (4, 1, 1, 6)
        assert (totals.prompt_tokens, totals.cached_tokens, totals.output_tokens) == (15, 10, 5)
        fill(results, first=7)
    assert len(ids(path)) == NUM


def test_a_run_continues_from_any_torn_end_of_the_journal(tmp_path: Path) -> None:
    """A process that dies leaves a whole output and a part of the journal."""
    path, log = tmp_path / "out", tmp_path / "out.journal"
    whole, records, _ = written(path)
    for end in range(records.index(b"\n") + 1, len(records) + 1):
        path.write_bytes(whole)
        log.write_bytes(records[:end])
        with BatchResults(str(path), HEADER) as results:
            kept = results.totals.num_rows
            assert kept == min((end - records.index(b"\n") - 1) // RECORD_BYTES, 7) - (end >= len(records) - 96)
            fill(results)
        expect_each_once(path)


def test_a_run_continues_from_any_torn_end_of_the_output_after_the_mark(tmp_path: Path) -> None:
    """After a machine crash the journal may have records whose lines are missing in the output, or are zeros."""
    path, log = tmp_path / "out", tmp_path / "out.journal"
    whole, records, marked = written(path)
    for end in range(marked, len(whole), 7):
        for zeros in (0, len(whole) - end):
            path.write_bytes(whole[:end] + bytes(zeros))
            log.write_bytes(records)
            with BatchResults(str(path), HEADER) as results:
                assert 3 <= results.totals.num_rows <= 5
                fill(results)
            expect_each_once(path)


def test_a_flipped_bit_of_the_journal_ends_it(tmp_path: Path) -> None:
    path, log = tmp_path / "out", tmp_path / "out.journal"
    with BatchResults(str(path), HEADER) as results:
        fill(results, last=6)
    whole, records = path.read_bytes(), log.read_bytes()
    draw = random.Random(0)
    start = records.index(b"\n") + 1
    for _ in range(60):
        damaged = bytearray(records)
        place = draw.randrange(start, len(records))
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(whole)
        log.write_bytes(damaged)
        with BatchResults(str(path), HEADER) as results:
            assert results.totals.num_rows == min((place - start) // RECORD_BYTES, 6)
            fill(results)
        expect_each_once(path)


def test_lines_without_a_record_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchResults(str(path), HEADER) as results:
        fill(results, last=3)
    with path.open("ab") as file:
        file.write(json.dumps(answered("r4")).encode() + b"\n" + b'{"id": "torn')
    with BatchResults(str(path), HEADER) as results:
        assert 4 not in results.done
        fill(results)
    expect_each_once(path)


def test_an_output_that_lost_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchResults(str(path), HEADER) as results:
        fill(results, last=3)
    path.write_bytes(path.read_bytes()[:-1])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"has \d+ bytes, and \d+ by its journal; bring it back"):
        BatchResults(str(path), HEADER)
    assert path.read_bytes() == before
    path.unlink()
    with pytest.raises(ConfigError, match="has 0 bytes"):
        BatchResults(str(path), HEADER)


def test_a_file_without_a_journal_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("mine\n")
    with pytest.raises(ConfigError, match=r"without a journal \(out.journal\)"):
        BatchResults(str(path), HEADER)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert path.read_text() == "mine\n"
    with BatchResults(str(path), HEADER, resume=False) as results:
        fill(results)
    expect_each_once(path)


@pytest.mark.parametrize("text", ['{"custom_id": 1}\n', "hello\n", '{"input": "x", "version": 9}\n'])
def test_another_file_is_no_journal(tmp_path: Path, text: str) -> None:
    (tmp_path / "out.journal").write_text(text)
    with pytest.raises(ConfigError, match=r"not a journal of run-batch|another version"):
        BatchResults(str(tmp_path / "out"), HEADER)
    assert (tmp_path / "out.journal").read_text() == text


def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    with BatchResults(path, HEADER), pytest.raises(ConfigError, match="another run-batch"):
        BatchResults(path, HEADER)
    with BatchResults(path, HEADER):
        pass


def test_a_lock_is_of_the_journal_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that was replaced between its opening and its locking is opened again."""
    path = tmp_path / "journal"
    path.write_bytes(b"old")
    real = fcntl.flock
    moved = list[int]()

    def flock(fd: int, how: int) -> None:
        if not moved:
            moved.append(1)
            (tmp_path / "new").write_bytes(b"new")
            (tmp_path / "new").replace(path)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    fd = journal.open_locked(path)
    assert os.pread(fd, 3, 0) == b"new"
    os.close(fd)


def test_changes_are_named() -> None:
    now = BatchHeader("other", {"dtype": "b", "model_name": "c"})
    assert HEADER.changed(HEADER) == []
    assert HEADER.changed(now) == ["--input-file", "--dtype", "--model", "--model-name"]


def test_failures_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchResults(str(path), HEADER) as results:
        fill(results)
        results.append(NUM + 1, RecordKind.BAD, rows.failure(Bad(NUM + 1, "bad", "invalid_url", "no")))
        results.finish()
        busy_ms = results.totals.busy_ms
    with BatchResults(str(path), HEADER, retry_failed=True) as results:
        assert [number for number in range(1, NUM + 2) if number not in results.done] == [4, 8, 12]
        assert (results.totals.num_failed, results.totals.num_bad, results.is_finished) == (0, 1, False)
        assert results.totals.busy_ms >= busy_ms
        for number in (4, 8, 12):
            results.append(number, RecordKind.ANSWERED, answered(f"r{number}"))
    assert Counter(ids(path)) == Counter([*(f"r{number}" for number in range(1, NUM + 1)), "bad"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "out.journal"]
    with BatchResults(str(path), HEADER) as results:
        assert results.totals.num_rows == NUM + 1


@pytest.mark.parametrize("calls", range(1, 40))
def test_a_death_while_failures_are_taken_out_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The process dies at one of the calls that change files."""
    path = tmp_path / "out"
    with BatchResults(str(path), HEADER) as results:
        fill(results)
    left = calls

    def counted(real):
        def call(*arguments, **more):
            nonlocal left
            left -= 1
            if left == 0:
                raise _Killed
            return real(*arguments, **more)

        return call

    with monkeypatch.context() as patched:
        for name in ("fsync", "replace", "write", "ftruncate", "rename"):
            patched.setattr(os, name, counted(getattr(os, name)))
        died = False
        try:
            BatchResults(str(path), HEADER, retry_failed=True).__exit__()
        except _Killed:
            died = True
    assert died or left > 0
    with BatchResults(str(path), HEADER) as results:
        lost = [number for number in range(1, NUM + 1) if number not in results.done]
        assert lost in ([], [4, 8, 12])
        fill(results)
        results.finish()
    expect_each_once(path)
    assert {each.name for each in tmp_path.iterdir()} <= {"out", "out.journal", "out.journal.new"}


def test_a_death_while_parquet_is_written_leaves_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "out.parquet"
    for place in ("fsync", "replace"):
        with BatchResults(str(path), HEADER, resume=False) as results:
            fill(results)
            results.sync()
            with monkeypatch.context() as patched:

                def killed(*_: object) -> None:
                    raise _Killed

                patched.setattr(os, place, killed)
                with pytest.raises(_Killed):
                    results.finish()
        with BatchResults(str(path), HEADER) as results:
            assert results.totals.num_rows == NUM
            results.finish()
        names = [row["custom_id"] for row in parquet.read_table(path).to_pylist()]
        assert Counter(names) == Counter(f"r{number}" for number in range(1, NUM + 1))
        with BatchResults(str(path), HEADER) as results:
            assert results.is_finished


def test_a_lone_surrogate_is_still_a_line(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchResults(str(path), HEADER) as results:
        results.append(1, RecordKind.ANSWERED, answered("\ud800"))
    assert json.loads(path.read_bytes())["custom_id"] == "\ud800"


def test_records_are_read_as_they_were_packed(tmp_path: Path) -> None:
    draw = random.Random(3)
    made = [
        BatchRecord(draw.choice(list(RecordKind)), *(draw.randrange(1 << 32) for _ in range(6)))
        for _ in range(journal.RECORDS_AT_ONCE + 3)
    ]
    kept = Journal(tmp_path / "journal")
    kept.begin(HEADER)
    for record in made:
        kept.append(record)
    assert kept.header() == HEADER
    assert [record for _, record in kept.records()] == made
    kept.close()
    assert BatchRecord(RecordKind.ANSWERED, 1, 1 << 40).pack()[4:8] == b"\xff\xff\xff\xff"


def test_nothing_is_written_after_a_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows' answers come before the run knows that it is over."""
    path = tmp_path / "out"
    with BatchResults(str(path), HEADER) as results:
        fill(results, last=3)

        def write_part(fd: int, data: bytes) -> None:
            os.write(fd, data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(batch_results, "write_whole", write_part)
            with pytest.raises(ConfigError, match="No space left on device"):
                results.append(4, RecordKind.ANSWERED, answered("r4", 200))
        with pytest.raises(ConfigError, match="No space left on device"):
            results.append(5, RecordKind.ANSWERED, answered("r5", 200))
    with BatchResults(str(path), HEADER) as results:
        assert results.totals.num_rows == 3
        fill(results)
    expect_each_once(path)


def test_a_table_that_cannot_be_written_in_the_end_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BatchResults(str(tmp_path / "out"), HEADER) as results:
        fill(results)
        monkeypatch.setattr(results, "sync", lambda: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(ConfigError, match="cannot be written: Input/output error"):
            results.finish()
        monkeypatch.undo()
