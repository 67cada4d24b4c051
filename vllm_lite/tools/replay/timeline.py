"""Timeline: a few numbers for each moment of a trace, sorted by time, 72 bytes per moment."""

from array import array
from typing import Any

from vllm_lite.protocol.stats import Stats

GAUGES = ("num_running", "num_waiting", "num_used_blocks", "num_cached_blocks")
NUM_BEFORE = 120
"""Number of moments sent before a moment, for its sparklines."""


class Timeline:
    """A list of moments. With more than `most` entries (unless None), pairs of neighbours are merged."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.stride = 1
        """Number of steps per entry."""
        self._num_in_last = 0
        self.times_s = array("d")
        self.gauges = {name: array("L") for name in GAUGES}
        self.generated = array("Q")
        self.first_tokens = array("d"), array("Q")
        """Sum of times to first token in seconds, and their count, since the start."""

    def __len__(self) -> int:
        return len(self.times_s)

    def add(self, time_s: float, stats: Stats) -> None:
        """Add a moment, or merge it into the last entry: the maximum of gauges, the last of counts."""
        first = None if stats.requests is None else stats.requests.first_token_s
        total, count = (0.0, 0) if first is None else (first.sum, sum(first.counts))
        if 0 < self._num_in_last < self.stride:
            self._num_in_last += 1
            for name, values in self.gauges.items():
                values[-1] = max(values[-1], getattr(stats, name))
            for last, value in self._counts(time_s, stats, total, count):
                last[-1] = value
        else:
            self._num_in_last = 1
            for name, values in self.gauges.items():
                values.append(getattr(stats, name))
            for last, value in self._counts(time_s, stats, total, count):
                last.append(value)
        if self._most is not None and len(self) > self._most:
            self._thin()

    def _counts(self, time_s: float, stats: Stats, total: float, count: int) -> list[tuple[Any, float]]:
        sums, counts = self.first_tokens
        return [(self.times_s, time_s), (self.generated, stats.generated_tokens), (sums, total), (counts, count)]

    def _thin(self) -> None:
        """Double the number of steps per entry."""
        is_odd = len(self) % 2 == 1
        ends = [*range(1, len(self), 2), *([len(self) - 1] if is_odd else [])]
        for values in self.gauges.values():
            values[:] = array("L", map(max, values[::2], [*values[1::2], 0]))
        for counted in (self.times_s, self.generated, *self.first_tokens):
            counted[:] = array(counted.typecode, [counted[end] for end in ends])
        self._num_in_last += 0 if is_odd else self.stride
        self.stride *= 2

    def overview(self, most: int, count: int | None = None) -> dict[str, list[float]]:
        """The first `count` entries, or all, reduced to at most `most`, for a figure: the maximum of gauges, and tokens
        per second. Another thread may append entries meanwhile."""
        count = len(self) if count is None else count
        size = max(1, -(-count // most))
        starts = range(0, count, size)
        ends = [min(start + size, count) - 1 for start in starts]
        found: dict[str, list[float]] = {
            name: [max(values[start : end + 1]) for start, end in zip(starts, ends, strict=True)]
            for name, values in self.gauges.items()
        }
        found["times_s"] = [self.times_s[end] for end in ends]
        found["tokens_per_s"] = [self.speed(before, end) for before, end in zip([0, *ends], ends, strict=False)]
        return found

    def speed(self, before: int, end: int) -> float:
        """Tokens generated per second between two entries. An engine that replaced another counts from zero."""
        took_s, gained = self.times_s[end] - self.times_s[before], self.generated[end] - self.generated[before]
        return gained / took_s if took_s > 0 and gained > 0 else 0.0

    def until(self, index: int) -> list[dict[str, Any]]:
        """The entries before `index`, in the format of a moment's own numbers."""
        sums, counts = self.first_tokens
        return [
            {
                "time": self.times_s[each],
                "counts": {
                    "generated_tokens": self.generated[each],
                    "num_waiting": self.gauges["num_waiting"][each],
                    "num_used_blocks": self.gauges["num_used_blocks"][each],
                },
                "times": {"first_token_s": [sums[each], counts[each]]},
            }
            for each in range(max(0, index - NUM_BEFORE + 1), index + 1)
        ]
