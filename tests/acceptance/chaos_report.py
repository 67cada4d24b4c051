"""The options of chaos.py, and the report of a run: its table and its JSON."""

from collections.abc import Sequence

import msgspec

from tests.acceptance.chaos_client import WAYS
from tests.acceptance.chaos_faults import KINDS


class Options(msgspec.Struct, kw_only=True):
    """Settings of a run; the flags of the command line."""

    seconds: float = 120.0
    seed: int = 0
    tensor_parallel_size: int = 1
    kinds: list[str] = msgspec.field(default_factory=lambda: list(KINDS))
    ways: list[str] = msgspec.field(default_factory=lambda: list(WAYS))
    model: str | None = None
    max_restarts: int = 1_000_000
    heartbeat_timeout_s: float = 3.0
    every_s: float = 1.5
    """Mean seconds between a recovery and the next fault."""
    num_streams: int = 10
    """Streams of each client."""
    per_kind: int = 6
    longest: int = 240
    stream_s: float = 120.0
    """Maximum seconds of a stream, recoveries included."""
    flags: list[str] = []
    """More flags for the server."""


class Report(msgspec.Struct):
    """Result of a run: `broken` counts every broken promise, all of which must be 0."""

    options: Options
    broken: dict[str, int]
    streams: dict[str, int]
    faults: dict[str, int]
    restarts: dict[str, int]
    """Deaths that engines noticed, by cause; "engine": engines that were replaced."""
    recovery_s: dict[str, dict[str, float]]
    """Role of the process that died -> seconds from its death to the next token of a running stream, without faults
    during a recovery."""
    num_specs: int
    seconds: float
    examples: list[str]

    @property
    def is_good(self) -> bool:
        return not any(self.broken.values())


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(part: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3)

    return {"count": len(ordered), "p50": at(0.5), "p90": at(0.9), "max": round(ordered[-1], 3)}


def show(report: Report) -> None:
    for title, counts in (
        ("broken promises", report.broken),
        ("streams that ended", report.streams),
        ("faults", report.faults),
        ("deaths noticed, by cause", report.restarts),
    ):
        print(f"\n{title}")
        for name, count in sorted(counts.items()):
            print(f"  {name:<16}{count:>8}")
    print("\nseconds from a death to the next token")
    for who, figures in report.recovery_s.items():
        print(f"  {who:<16}" + "".join(f"{name} {value:g}   " for name, value in figures.items()))
    for example in report.examples:
        print(f"  {example[:600]}")
