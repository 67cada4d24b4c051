"""Reports of a batch: progress with the time left, and finally tokens, hits, time and failures."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch.batch_results import Totals
from vllm_lite.tools.batch.batch_run import BatchRun

PLAIN_S = 10.0
"""Seconds between lines of progress if stderr is not a terminal."""


def summary(batch: BatchRun, totals: Totals, num_rows: int, elapsed_s: float) -> str:
    """One sentence on the rows this process answered, and those still open."""
    own = batch.own
    others = {
        "failed": own.num_failed,
        "bad lines": own.num_bad,
        "from earlier runs": batch.before.num_rows,
        "open": num_rows - batch.num_done,
    }
    parts = [f"{own.num_answered} answered", *(f"{count} {what}" for what, count in others.items() if count > 0)]
    hits = f" ({own.cached_tokens / own.prompt_tokens:.0%} cached)" if own.cached_tokens else ""
    tokens = f"{own.prompt_tokens} prompt{hits} and {own.output_tokens} output tokens"
    rate = f"{own.output_tokens / max(elapsed_s, 1e-9):.0f} tokens/s"
    failures = totals.num_failed + totals.num_bad
    failed = f"; {failures} failures are in the file" if failures else ""
    return f"{', '.join(parts)} in {elapsed_s:.1f} s: {tokens}, {rate}{failed}"


def report(batch: BatchRun, totals: Totals, num_rows: int, elapsed_s: float) -> dict[str, Any]:
    """The content of --report: `run` is this process, `batch` all runs on these files."""
    names = ("num_answered", "num_failed", "num_bad", "prompt_tokens", "cached_tokens", "output_tokens")
    run, whole = ({name: getattr(each, name) for name in names} for each in (batch.own, totals))
    return {
        "num_rows": num_rows,
        "num_open": num_rows - batch.num_done,
        "run": {**run, "elapsed_s": round(elapsed_s, 3)},
        "batch": {**whole, "elapsed_s": totals.busy_ms / 1000},
    }


def write_report(path: str, content: dict[str, Any]) -> None:
    """Write a report as JSON. Raises ConfigError if it cannot be written."""
    try:
        Path(path).write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--report {path!r} cannot be written: {error.strerror or error}") from error


@contextmanager
def progress(num_rows: int) -> Iterator[Callable[[BatchRun], None]]:
    """Show progress on stderr: a bar on a terminal, otherwise a line every PLAIN_S."""
    if not sys.stderr.isatty():
        yield _plain(num_rows)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=num_rows)

        def show(batch: BatchRun) -> None:
            own = batch.own
            bad = own.num_failed + own.num_bad
            text = f"{own.output_tokens} tokens" + (f", {bad} failed" if bad else "")
            bar.update(task, completed=batch.num_done, description=text)

        yield show


def _plain(num_rows: int) -> Callable[[BatchRun], None]:
    began_s = shown_s = time.monotonic()

    def show(batch: BatchRun) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s >= PLAIN_S and batch.num_done < num_rows:
            shown_s = now_s
            sys.stderr.write(f"{progress_line(batch, num_rows, now_s - began_s)}\n")
            sys.stderr.flush()

    return show


def progress_line(batch: BatchRun, num_rows: int, elapsed_s: float) -> str:
    own = batch.own
    rate = own.num_rows / max(elapsed_s, 1e-9)
    left_s = round((num_rows - batch.num_done) / max(rate, 1e-9))
    bad = own.num_failed + own.num_bad
    left = f"{left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"
    return f"{batch.num_done} of {num_rows} rows, {rate:.1f} a second, {left}" + (f", {bad} failed" if bad else "")
