"""Measure `replay --page` on a long trace: the time to read it, the time of seeks, and memory.

    python benchmarks/replay_page.py                  # records 100,000 steps first: some minutes
    python benchmarks/replay_page.py --trace FILE   # an existing trace

A seek makes the data of one moment for the page, JSON included: first at random positions, then at consecutive ones, as
when the page plays.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NUM_BLOCKS, NUM_SEQS, NUM_LIVE, VOCAB = 600, 4, 6, 50
NUM_SEEKS, NUM_PLAYED = 500, 2000
DEADLINE_S = 3600.0
BARS = {"seek_ms": 5.0, "seek_worst_ms": 100.0, "memory_mb": 200.0}


def record(path: Path, num_steps: int) -> None:
    """Record `num_steps` steps of a scheduler that always has running and waiting requests."""
    from tests.recorded import Recorded
    from vllm_lite.engine.scheduling.scheduler import Scheduler

    dice, recorded, number = random.Random(1), Recorded(path, NUM_BLOCKS, max_num_seqs=NUM_SEQS), 0
    with patch.object(Scheduler, "check_integrity"):  # only for tests, and slow
        while recorded.scheduler.step < num_steps:
            while len(recorded.scheduler.requests) < NUM_LIVE:
                prompt = [dice.randrange(VOCAB) for _ in range(dice.randrange(5, 120))]
                recorded.add(f"r{number}", prompt, max_tokens=dice.randrange(50, 400), ignore_eos=True)
                number += 1
            recorded.loop()
    recorded.core.close()


def measure(path: Path) -> dict[str, float]:
    from vllm_lite.tools.replay.shown_trace import ShownTrace

    process, began_s = psutil.Process(), time.perf_counter()
    before_bytes, before_s = process.memory_info().rss, sum(process.cpu_times()[:2])
    shown = ShownTrace(str(path))
    shown.start()
    if not shown.wait(DEADLINE_S):
        raise SystemExit(f"the trace was not read in {DEADLINE_S:.0f} s")
    read_s, read_cpu_s = time.perf_counter() - began_s, sum(process.cpu_times()[:2]) - before_s
    dice, count = random.Random(2), len(shown)
    seeks = [_seek(shown, 1 + dice.randrange(count)) for _ in range(NUM_SEEKS)]
    first = count // 2
    played = [_seek(shown, number) for number in range(first, min(first + NUM_PLAYED, count))]
    figures = {
        "moments": count,
        "trace_mb": path.stat().st_size / 1e6,
        "read_s": read_s,
        "read_cpu_s": read_cpu_s,
        "seek_ms": statistics.median(seeks),
        "seek_p99_ms": sorted(seeks)[-NUM_SEEKS // 100],
        "seek_worst_ms": max(seeks),
        "played_ms": statistics.median(played),
        "memory_mb": (process.memory_info().rss - before_bytes) / 1e6,
    }
    shown.close()
    if shown.trouble:
        print(shown.trouble, file=sys.stderr)
    return figures


def _seek(shown: object, number: int) -> float:
    """Milliseconds of processor time, so that other load is not counted."""
    began_s = time.thread_time()
    msgspec.json.encode(shown.moment(number))  # type: ignore[attr-defined]
    return 1e3 * (time.thread_time() - began_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help="a trace, instead of one that is recorded first")
    parser.add_argument("--steps", type=int, default=100_000, help="steps to record [100,000]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = options.trace or Path(scratch) / "trace"
        if options.trace is None:
            record(path, options.steps)
        figures = measure(path)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=1))
    missed = [name for name, bar in BARS.items() if figures[name] > bar]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
