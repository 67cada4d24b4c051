"""Suspects: which requests may be what kills the workers, and which of them to compute apart from the rest.

A request is a suspect after two deaths in a row: it was in the steps in flight of both, and got fewer than PROBATION
tokens in between. Suspects are tried in groups, then one by one, until each has got that many tokens beyond where it
stood. One that was in four deaths in a row, at last alone, is convicted; three are enough if it was alone in all.

So one request among any number is found in four deaths. One that is there by chance would have to meet four deaths that
each fall into a few tokens of its own. Where workers die of other causes all the time that could happen at last, so
every such death, a stray one, asks for one more for a while.

This is bookkeeping only: requests are names here, and their progress is a number that the caller knows.
"""

from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Generic, TypeVar

PROBATION = 8
"""A request that got so many tokens after a death has come past it. It is small: others are held while a trial lasts,
and a death of another cause must hardly ever fall into it."""
MAX_PROBATION = 16
"""A request that comes past a death only just, and then is in another one, has to get so many. One that kills later
than that after it goes on is not found. With 64, kills at random every other second convicted one time in 200."""
MIN_SUSPECT, MIN_CONVICT = 2, 4
"""Deaths in a row that make a suspect, and that convict."""
MAX_STRAYS = 3
"""Deaths more that are needed to convict, at most: with the stray ones ten in all, which a default engine survives."""
STRAY_S = 300.0
"""So long a stray death is remembered."""
MAX_SINGLES = 16
"""Up to so many suspects are tried one by one at once: it takes as few deaths, and whom the third one meets is alone
twice before it is convicted."""

Name = TypeVar("Name", bound=Hashable)


@dataclass(slots=True)
class SuspectRecord:
    """Record of a request that was in the batch of a death.

    mark        its progress at the last one
    num_deaths  deaths in a row
    num_alone   those of them in which it was alone
    probation   tokens beyond `mark` with which it has come past it
    """

    mark: int
    num_deaths: int = 0
    num_alone: int = 0
    probation: int = PROBATION

    def came_past(self, progress: int) -> bool:
        return progress >= self.mark + self.probation

    def clear(self) -> None:
        """It has come past the last death. If it is in another one soon, that takes longer."""
        self.num_deaths = self.num_alone = 0
        self.probation = min(2 * self.probation, MAX_PROBATION)

    def add(self, progress: int, *, alone: bool) -> None:
        """It was in the batch of another death."""
        if progress >= self.mark + MAX_PROBATION:
            self.num_deaths, self.num_alone, self.probation = 0, 0, PROBATION
        elif self.came_past(progress):
            self.clear()
        self.mark = progress
        self.num_deaths += 1
        self.num_alone += alone

    @property
    def weight(self) -> int:
        """Deaths that speak against it. Nothing else was there in any of them: that is as good as one more."""
        return self.num_deaths + (self.num_alone == self.num_deaths)


class Suspects(Generic[Name]):
    """Learns who was there when the workers died, and says who is to be tried next."""

    def __init__(self) -> None:
        self.records: dict[Name, SuspectRecord] = {}
        self.groups: deque[list[Name]] = deque()
        """Those to be tried, the first group now. Empty: there is no suspect."""
        self._died_s: float | None = None
        """The time of the last death, if it is not explained yet."""
        self._strays_s: deque[float] = deque(maxlen=MAX_STRAYS)

    def died(self, batch: Mapping[Name, int], now_s: float, *, num_ended: int = 0) -> Name | None:
        """The workers died with `batch` in the steps in flight: every live request with its progress. `num_ended`
        others were there as well and have ended since. Returns the convicted one, if there is one."""
        if not batch:
            return None  # nothing was computed, so it was none of them
        alone = len(batch) == 1 and not num_ended
        for name, progress in batch.items():
            self.records.setdefault(name, SuspectRecord(progress)).add(progress, alone=alone)
        suspects = [name for name in batch if self.records[name].num_deaths >= MIN_SUSPECT]
        if not suspects and self._died_s is not None:
            self._strays_s.append(self._died_s)
        self._died_s = now_s
        num_strays = sum(now_s - stray_s <= STRAY_S for stray_s in self._strays_s)
        convicted = None
        if alone and suspects and self.records[suspects[0]].weight >= MIN_CONVICT + num_strays:
            convicted = suspects.pop()
            del self.records[convicted]
            self._died_s = None  # which explains it
        if self.groups:
            self._split(batch, suspects)
        else:
            size = 1 if len(suspects) <= MAX_SINGLES else isqrt(len(suspects) - 1) + 1
            self.groups.extend(suspects[start : start + size] for start in range(0, len(suspects), size))
        return convicted

    def _split(self, batch: Container[Name], suspects: list[Name]) -> None:
        """The group on trial has died: those that were there are tried one by one, the rest of it behind them."""
        rest = [name for name in self.groups.popleft() if name not in batch]
        if rest:
            self.groups.appendleft(rest)
        self.groups.extendleft([name] for name in reversed(suspects))

    def proceed(self, progress_of: Callable[[Name], int | None]) -> list[Name]:
        """Clear the groups that have come past their trial. Returns the group to be tried now; empty if none is left.
        `progress_of` says None for a request that has ended."""
        while self.groups:
            for name in self.groups[0]:
                progress = progress_of(name)
                if progress is not None and not self.records[name].came_past(progress):
                    return self.groups[0]
            for name in self.groups.popleft():
                self.records[name].clear()
        return []

    def num_deaths(self, name: Name) -> int:
        """Deaths in a row in which `name` was."""
        record = self.records.get(name)
        return 0 if record is None else record.num_deaths

    def forget(self, live: Container[Name]) -> None:
        """Drop what is known of requests that are not `live` any more."""
        self.records = {name: record for name, record in self.records.items() if name in live}
        for group in self.groups:
            group[:] = [name for name in group if name in live]
