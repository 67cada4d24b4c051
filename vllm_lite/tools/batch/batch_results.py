"""The output of a batch and its journal, which can be appended to, resumed and finished.

JSON lines are appended to the output as answers come. A Parquet file cannot be appended to, so its answers are
collected in a file beside it (.partial) and written as Parquet at the end, which then replaces the output. A row is
answered when its record is in the journal (journal.py); bytes of the output after the last record are cut off.
"""

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import astuple, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self
from zlib import crc32

import msgspec

from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch.batch_source import is_parquet
from vllm_lite.tools.batch.journal import BatchHeader, BatchRecord, Journal, RecordKind, flush_folder, write_whole
from vllm_lite.tools.batch.line_bits import LineBits

SYNC_S = 1.0
"""Seconds between syncs: the most work that is lost if the machine dies; the death of a process loses none."""


@dataclass
class Totals:
    """Rows and tokens of all runs of a batch."""

    num_answered: int = 0
    num_failed: int = 0
    num_bad: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    busy_ms: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_answered + self.num_failed + self.num_bad

    def since(self, before: "Totals") -> "Totals":
        return Totals(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def add(self, record: BatchRecord) -> None:
        self.num_answered += record.kind is RecordKind.ANSWERED
        self.num_failed += record.kind is RecordKind.FAILED
        self.num_bad += record.kind is RecordKind.BAD
        self.busy_ms += record.busy_ms
        if record.has_line:
            self.prompt_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens
            self.output_tokens += record.output_tokens


class Paths(NamedTuple):
    """Files of a batch: the user's output, the JSON lines (the same file, unless the output is Parquet), the
    journal."""

    output: Path
    lines: Path
    journal: Path

    @classmethod
    def of(cls, output: str) -> Self:
        lines = f"{output}.partial" if is_parquet(output) else output
        return cls(Path(output).absolute(), Path(lines).absolute(), Path(f"{output}.journal").absolute())


class BatchResults:
    """Answers on disk. A context manager; `done` has the input lines that are answered."""

    def __init__(self, output: str, header: BatchHeader, *, resume: bool = True, retry_failed: bool = False) -> None:
        """With `resume`, earlier runs are continued, otherwise their files are removed; `retry_failed` removes failed
        rows. Raises ConfigError if the output does not belong to a batch, or to another batch."""
        self.paths = Paths.of(output)
        self.done = LineBits()
        self.totals = Totals()
        self.is_finished = False
        self._synced_s = time.monotonic()
        self._is_synced = True
        self._problem: str | None = None
        """The error that stopped writing: the output may end with an incomplete line, after which nothing may
        follow."""
        try:
            self._open(header, resume, retry_failed)
        except OSError as error:
            raise ConfigError(f"{output!r} cannot be written: {error.strerror or error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk, which append() has reported
            self.sync()
        self._close()

    def append(
        self, line: int, kind: RecordKind, answer: dict[str, Any], tokens: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """Write the answer of the row in `line`, with its numbers of prompt, cached and output tokens. It is kept even
        if this process dies now. Raises ConfigError if the disk is full."""
        if self._problem is not None:
            raise ConfigError(self._problem)
        data = json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        record = BatchRecord(kind, line, len(data), crc32(data), *tokens)
        try:
            write_whole(self._fd, data)
            self._journal.append(record)
            self._is_synced = False
            if time.monotonic() - self._synced_s > SYNC_S:
                self.sync()
        except OSError as error:
            what = f"{str(self.paths.lines)!r} cannot be written: {error.strerror or error}"
            self._problem = f"{what}; what was answered stays"
            raise ConfigError(self._problem) from error
        self._count(record)

    def sync(self) -> None:
        """Sync the output and the journal to disk."""
        if self._is_synced or self._problem is not None:
            return
        now_s = time.monotonic()
        os.fsync(self._fd)
        mark = BatchRecord(RecordKind.MARK, num_bytes=round((now_s - self._synced_s) * 1000))
        self._journal.append(mark)
        self._journal.flush()
        self._count(mark)
        self._synced_s, self._is_synced = now_s, True

    def finish(self) -> None:
        """Finish a batch whose rows are all answered, and write the Parquet file, if it is one. The JSON lines are kept
        if some rows failed. Raises ConfigError if it cannot be written."""
        try:
            self._finish()
        except OSError as error:
            raise ConfigError(f"{str(self.paths.output)!r} cannot be written: {error.strerror or error}") from error

    def _finish(self) -> None:
        self.sync()
        if not self.is_finished:
            if self.paths.lines != self.paths.output:
                from vllm_lite.tools.batch.parquet_file import write_parquet

                new = self.paths.output.with_name(f"{self.paths.output.name}.new")
                write_parquet(self.paths.lines, new)
                new.replace(self.paths.output)
                flush_folder(self.paths.output)
            finished = BatchRecord(RecordKind.FINISHED)
            self._journal.append(finished)
            self._journal.flush()
            self._count(finished)
        if self.paths.lines != self.paths.output and not self.totals.num_failed:
            self.paths.lines.unlink(missing_ok=True)

    # ---- opening

    def _open(self, header: BatchHeader, resume: bool, retry_failed: bool) -> None:
        self._journal = Journal(self.paths.journal)
        self._fd = -1
        try:
            found = self._journal.header() if resume else None
            if found is None:
                self._begin(header, resume)
            else:
                self._check(found, header)
                self._settle(found)
                self._resume()
                if retry_failed and self.totals.num_failed:
                    self._drop_failures(header)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._journal.close()

    def _begin(self, header: BatchHeader, resume: bool) -> None:
        if resume:
            for path in {self.paths.output, self.paths.lines}:
                if path.exists() and path.stat().st_size:
                    text = f"{str(path)!r} exists, without a journal ({self.paths.journal.name}) of how it was made"
                    if not self.paths.journal.stat().st_size:
                        self.paths.journal.unlink()
                    raise ConfigError(f"{text}; choose another --output-file, or replace it by --no-resume")
        self._journal.begin(header)
        self._fd = _open_lines(self.paths.lines)
        os.ftruncate(self._fd, 0)

    def _check(self, found: BatchHeader, header: BatchHeader) -> None:
        if changed := found.changed(header):
            text = f"{str(self.paths.output)!r} was begun with other values of {', '.join(changed)}"
            raise ConfigError(
                f"{text}; give the same again, choose another --output-file, or begin anew by --no-resume"
            )

    def _settle(self, found: BatchHeader) -> None:
        """Complete or undo a _drop_failures that was interrupted."""
        if found.replacement is not None:
            new = self.paths.lines.with_name(found.replacement)
            if new.exists():
                new.replace(self.paths.lines)
        name = re.compile(re.escape(self.paths.lines.name) + r"\.[0-9a-f]{8}\.new")
        for left in self.paths.lines.parent.iterdir():
            if name.fullmatch(left.name):
                left.unlink()

    def _resume(self) -> None:
        """Read the records for which journal and output agree, and cut both after the last."""
        lines, place, at = self.paths.lines, self._journal.start, 0
        size = lines.stat().st_size if lines.exists() else 0
        marked = self._journal.end_of_marked()
        with lines.open("rb") if size else BytesIO() as file:
            for end, record in self._journal.records():
                if record.has_line:
                    if end > marked and not _fits(file, at, record):
                        break
                    at += record.num_bytes
                place = end
                self._count(record)
        self._check_files(at, size)
        if not self.is_finished:
            self._fd = _open_lines(lines)
            os.ftruncate(self._fd, at)
            self._journal.cut(place)
            self._is_synced = False
            self.sync()

    def _check_files(self, at: int, size: int) -> None:
        """Raises ConfigError if the output was removed or shortened."""
        was_moved = self.is_finished and self.paths.lines != self.paths.output and self.paths.output.exists()
        if size < at and not (was_moved and not size):
            text = f"{str(self.paths.lines)!r} has {size} bytes, and {at} by its journal"
            raise ConfigError(f"{text}; bring it back, or begin anew by --no-resume")

    def _drop_failures(self, header: BatchHeader) -> None:
        """Remove failed rows from output and journal. Both are written anew; the new batch is in force once its journal
        replaces the old one."""
        name = f"{self.paths.lines.name}.{os.urandom(4).hex()}.new"
        if not self.paths.lines.exists():
            raise ConfigError(f"{str(self.paths.lines)!r} is gone, which --retry-failed needs for the answers so far")
        new = Journal(self.paths.journal.with_name(f"{self.paths.journal.name}.new"))
        try:
            new.begin(msgspec.structs.replace(header, replacement=name))
            kept = self.paths.lines.with_name(name)
            self._copy_kept(new, kept)
            self._journal.replace(new)
        finally:
            new.close()
        kept.replace(self.paths.lines)
        flush_folder(self.paths.lines)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = _open_lines(self.paths.lines)

    def _copy_kept(self, journal: Journal, path: Path) -> None:
        """Copy the rows that did not fail to another journal, and their lines to another file."""
        self.done, busy_ms, self.totals = LineBits(), self.totals.busy_ms, Totals()
        with self.paths.lines.open("rb") as old, path.open("xb") as file:
            for _, record in self._journal.records():
                data = old.read(record.num_bytes) if record.has_line else b""
                if record.has_line and record.kind is not RecordKind.FAILED:
                    file.write(data)
                    journal.append(record)
                    self._count(record)
            file.flush()
            os.fsync(file.fileno())
        mark = BatchRecord(RecordKind.MARK, num_bytes=busy_ms)
        journal.append(mark)
        self._count(mark)

    def _count(self, record: BatchRecord) -> None:
        self.totals.add(record)
        self.is_finished = record.kind is RecordKind.FINISHED
        if record.has_line:
            self.done.add(record.line)


def _open_lines(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)


def _fits(file: BinaryIO, at: int, record: BatchRecord) -> bool:
    """Whether the file has the record's line at offset `at`."""
    file.seek(at)
    data = file.read(record.num_bytes)
    return len(data) == record.num_bytes and crc32(data) == record.checksum
