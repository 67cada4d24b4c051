"""Weather: how fast the machine was from moment to moment of a recording, to be lived through again.

What slows a machine down lasts: a core that another program has, a clock that falls with heat, stalls that come in
groups. Requests meet it for seconds on end, so that their tails are made by it, and not by single messages. It is
therefore kept as it was, in order, and a simulation goes through pieces of it (a stationary bootstrap): on from a
random moment, for a random amount of work, then from another.

Moments are counted in work: the seconds that the messages before would have taken on the machine as it usually is. A
long message so meets as much of it as many short ones, and times without work, when nothing is seen, are left out.
Pieces are as long in work for the same reason: of equal times, those in which the machine is slow would hold less work,
and it would be slow for less of a busy engine's work than it was.
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
"""More are not kept: of a long recording cells are longer."""
NEIGHBOURS = 15
"""Messages before and behind one which show how fast the machine is at the time."""
STALLED = 2.0
"""A message that took so many times what its neighbours did met something that has nothing to do with it."""
MEMORY_S, MIN_PIECES = 10.0, 5
"""Mean work of a piece that is lived through again, in a recording that is so many times as long."""
DIGITS = 6

Time = Annotated[float, Meta(ge=0, le=1e6)]
Length = Annotated[float, Meta(ge=1e-6, le=1e6)]


class Stall(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stall of `seconds` behind `work_s` of work."""

    work_s: Time
    seconds: Time


class Weather(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cell_s: Length
    slowness: Annotated[list[Annotated[float, Meta(gt=0, le=1e6)]], Meta(min_length=1)]
    """Time that each `cell_s` of work took, as a multiple of it, without stalls."""
    stalls: list[Stall]
    """In order of `work_s`."""
    memory_s: Length | None
    """Mean work of the pieces that are lived through again; None: all of it as it was, from its beginning."""

    @property
    def work_s(self) -> float:
        """The work of all of it."""
        return self.cell_s * len(self.slowness)


class Observed(NamedTuple):
    """The weather of a recording, and the time of each message as a multiple of what such a message would have taken
    then, stalls left out."""

    weather: Weather
    ratios: list[float]


def observe(told_s: Sequence[float], took_s: Sequence[float], *, in_pieces: bool = True) -> Observed:
    """Messages in their order, by what each takes usually and what it took. `in_pieces`: in what order they are lived
    through again is left to chance."""
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
    """The cells of a message that begins behind `work_s`, and its seconds in each."""
    end_s = work_s + told_s
    for cell in range(min(int(work_s / cell_s), count - 1), min(int(end_s / cell_s), count - 1) + 1):
        last = cell == count - 1
        yield cell, (end_s if last else min(end_s, (cell + 1) * cell_s)) - max(work_s, cell * cell_s)


def _levels(ratios: Sequence[float]) -> list[float]:
    """The median of each and its neighbours."""
    found, window = list[float](), sorted(ratios[:NEIGHBOURS])
    for place in range(len(ratios)):
        if place + NEIGHBOURS < len(ratios):
            insort(window, ratios[place + NEIGHBOURS])
        if place > NEIGHBOURS:
            del window[bisect_left(window, ratios[place - NEIGHBOURS - 1])]
        found.append(window[len(window) // 2])
    return found


class Walk:
    """Goes through a weather in pieces. The same seed goes the same way."""

    def __init__(self, weather: Weather, rng: random.Random) -> None:
        self._weather = weather
        self._random = rng
        self._ends_s = [0.0, *accumulate(weather.cell_s * each for each in weather.slowness)]
        self._places = [stall.work_s for stall in weather.stalls]
        self._stalled_s = [0.0, *accumulate(stall.seconds for stall in weather.stalls)]
        self._work_s = 0.0
        self._left_s = math.inf if weather.memory_s is None else 0.0
        """The work that is left of a piece."""

    def took_s(self, work_s: float) -> float:
        """The time that `work_s` take, behind all the work before."""
        weather = self._weather
        total_s = weather.work_s
        if weather.memory_s is not None and self._left_s <= 0:
            self._work_s = self._random.random() * total_s
            self._left_s = self._random.expovariate(1 / weather.memory_s)
        self._left_s -= work_s
        begin_s, end_s = self._work_s, self._work_s + work_s
        rounds, self._work_s = divmod(end_s, total_s)
        return self._spent_s(self._work_s) - self._spent_s(begin_s) + rounds * self._spent_s(total_s)

    def _spent_s(self, work_s: float) -> float:
        """The time from the beginning until behind `work_s`."""
        ends_s, cell_s = self._ends_s, self._weather.cell_s
        cell = min(int(work_s / cell_s), len(ends_s) - 2)
        share = work_s / cell_s - cell
        moved_s = ends_s[cell] + share * (ends_s[cell + 1] - ends_s[cell])
        return moved_s + self._stalled_s[bisect_left(self._places, work_s)]
