"""Weather: the speed of the machine over the time of a recording, which a simulation replays.

A machine is slow for longer periods: another program uses a core, the clock rate falls with heat, stalls come in
groups. Requests are affected for seconds, so the tails of their times come from such periods and not from single
messages. Therefore the weather is stored in its order, and a simulation replays pieces of it (a stationary bootstrap):
from a random moment, for a random amount of work, then from another moment.

The unit of time in the weather is work: the seconds that the messages so far would have taken at the machine's usual
speed. So a long message meets as much weather as many short ones, and idle times, in which the speed is unknown, are
left out. The length of pieces is in work for the same reason: pieces of equal time would contain less work when the
machine is slow, and so a smaller share of the work would be slow than in the recording.
"""

import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

CELL_S = 0.05
MAX_CELLS = 4000
"""Maximum number of cells; a longer recording has longer cells."""
NEIGHBOURS = 15
"""Messages before and after a message from which the speed of the machine is taken."""
STALLED = 2.0
"""A message that took at least this multiple of its neighbours' time was stalled by something unrelated to it."""
MEMORY_S, MIN_PIECES = 10.0, 5
"""Mean work of a replayed piece, in seconds, and the minimum number of such pieces in a recording; a shorter recording
has shorter pieces."""
DIGITS = 6

Time = Annotated[float, Meta(ge=0, le=1e6)]
Length = Annotated[float, Meta(ge=1e-6, le=1e6)]


class Stall(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stall of `seconds` after `work_s` of work."""

    work_s: Time
    seconds: Time


class Weather(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cell_s: Length
    slowness: Annotated[list[Annotated[float, Meta(gt=0, le=1e6)]], Meta(min_length=1)]
    """Time that each `cell_s` of work took, as a multiple of it, without stalls."""
    stalls: list[Stall]
    """Stalls, in order of `work_s`."""
    memory_s: Length | None
    """Mean work of replayed pieces; None: the weather is replayed in its order, from its beginning."""

    @property
    def work_s(self) -> float:
        """Work of the whole weather."""
        return self.cell_s * len(self.slowness)


class Observed(NamedTuple):
    """The weather of a recording, and the ratio of each message's time, without stalls, to its expected time in this
    weather."""

    weather: Weather
    ratios: list[float]


def observe(told_s: Sequence[float], took_s: Sequence[float], *, in_pieces: bool = True) -> Observed:
    """Observe the weather from messages in order: the usual and the measured time of each. `in_pieces`: it is to be
    replayed in random pieces."""
    levels = _levels([took / told for told, took in zip(told_s, took_s, strict=True)])
    total_s = sum(told_s)
    cell_s = max(CELL_S, total_s / MAX_CELLS)
    count = max(1, round(total_s / cell_s))
    cell_s = total_s / count
    spent_s, kept_s, stalls, work_s = [0.0] * count, list[float](), list[Stall](), 0.0
    for told, took, level in zip(told_s, took_s, levels, strict=True):
        if took >= STALLED * level * told:
            stalls.append(Stall(round(work_s + told / 2, DIGITS), round(took - level * told, DIGITS)))
            took = level * told  # noqa: PLW2901
        kept_s.append(took)
        for cell, share_s in _cells(work_s, told, cell_s, count):
            spent_s[cell] += took * share_s / told
        work_s += told
    slowness = [max(round(spent / cell_s, DIGITS), 10**-DIGITS) for spent in spent_s]
    memory_s = min(MEMORY_S, total_s / MIN_PIECES) if in_pieces else None
    weather = Weather(cell_s, slowness, stalls, memory_s)
    return Observed(weather, _ratios(told_s, kept_s, weather))


def _ratios(told_s: Sequence[float], kept_s: Sequence[float], weather: Weather) -> list[float]:
    found, work_s = list[float](), 0.0
    cell_s, slowness = weather.cell_s, weather.slowness
    for told, kept in zip(told_s, kept_s, strict=True):
        expected_s = sum(share_s * slowness[cell] for cell, share_s in _cells(work_s, told, cell_s, len(slowness)))
        found.append(kept / expected_s)
        work_s += told
    return found


def _cells(work_s: float, told_s: float, cell_s: float, count: int) -> Iterator[tuple[int, float]]:
    """The cells of a message that begins after `work_s` of work, and its seconds in each."""
    end_s = work_s + told_s
    for cell in range(min(int(work_s / cell_s), count - 1), min(int(end_s / cell_s), count - 1) + 1):
        last = cell == count - 1
        yield cell, (end_s if last else min(end_s, (cell + 1) * cell_s)) - max(work_s, cell * cell_s)


def _levels(ratios: Sequence[float]) -> list[float]:
    """For each ratio, the median of it and its neighbours."""
    found, window = list[float](), sorted(ratios[:NEIGHBOURS])
    for place in range(len(ratios)):
        if place + NEIGHBOURS < len(ratios):
            insort(window, ratios[place + NEIGHBOURS])
        if place > NEIGHBOURS:
            del window[bisect_left(window, ratios[place - NEIGHBOURS - 1])]
        found.append(window[len(window) // 2])
    return found


class Walk:
    """Replays a weather in pieces. The same seed gives the same pieces."""

    def __init__(self, weather: Weather, rng: random.Random) -> None:
        self._weather = weather
        self._random = rng
        self._ends_s = [0.0, *accumulate(weather.cell_s * each for each in weather.slowness)]
        self._places = [stall.work_s for stall in weather.stalls]
        self._stalled_s = [0.0, *accumulate(stall.seconds for stall in weather.stalls)]
        self._work_s = 0.0
        self._left_s = math.inf if weather.memory_s is None else 0.0
        """Work that is left of the current piece."""

    def took_s(self, work_s: float) -> float:
        """The time for the next `work_s` of work."""
        weather = self._weather
        total_s = weather.work_s
        if weather.memory_s is not None and self._left_s <= 0:
            self._work_s = self._random.random() * total_s
            self._left_s = self._random.expovariate(1 / weather.memory_s)
        self._left_s -= work_s
        begin_s, end_s = self._work_s, self._work_s + work_s
        rounds, self._work_s = divmod(end_s, total_s)
        took_s = self._spent_s(self._work_s) - self._spent_s(begin_s)
        return took_s + rounds * self._spent_s(total_s) if rounds else took_s

    def _spent_s(self, work_s: float) -> float:
        """The time from the beginning of the weather until `work_s` of work is done."""
        ends_s, cell_s = self._ends_s, self._weather.cell_s
        cell = min(int(work_s / cell_s), len(ends_s) - 2)
        share = work_s / cell_s - cell
        moved_s = ends_s[cell] + share * (ends_s[cell + 1] - ends_s[cell])
        return moved_s + self._stalled_s[bisect_left(self._places, work_s)]
