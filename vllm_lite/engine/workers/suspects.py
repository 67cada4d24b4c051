"""Suspects: requests that may be killing the workers, and the groups of them to run apart from the rest.

A request is a suspect after two deaths in a row: it was in the steps in flight of both, and got fewer than PROBATION
tokens in between. Suspects are tried in groups, then one by one, until each has got PROBATION tokens more. A request
that was in four deaths in a row, in the last one alone, is convicted; three deaths suffice if it was alone in all.

So one killer among any number of requests is found in four deaths. An innocent request would have to meet four deaths,
each within a few of its tokens. That can happen in the long run if workers keep dying of other causes, so each such
stray death raises the number needed for a conviction by one for a while.

This is bookkeeping only: requests are opaque names, and the caller supplies their progress in tokens.
"""

from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Generic, TypeVar

PROBATION = 8
"""Tokens after a death that clear a request of it. Small, because other requests are held during a trial, and a death
of another cause should rarely fall into it."""
MAX_PROBATION = 16
"""Tokens that clear a request which was cleared narrowly and then was in another death. A request that kills later
than that after it resumes is not found. With 64, random kills every other second convicted one time in 200."""
MIN_SUSPECT, MIN_CONVICT = 2, 4
"""Deaths in a row that make a suspect, and that convict."""
MAX_STRAYS = 3
"""Maximum additional deaths for a conviction: with the stray ones ten in all, which a default engine survives."""
STRAY_S = 300.0
"""Seconds for which a stray death is remembered."""
MAX_SINGLES = 16
"""Up to this many suspects are tried one by one at once. It takes as few deaths as groups, and a request in the third
death is then alone twice before it is convicted."""

Name = TypeVar("Name", bound=Hashable)


@dataclass(slots=True)
class SuspectRecord:
    """Record of a request that was in the batch of a death.

    mark        progress in tokens at the latest death
    num_deaths  deaths in a row
    num_alone   number of these deaths in which the request was alone
    probation   tokens beyond `mark` that clear the request
    """

    mark: int
    num_deaths: int = 0
    num_alone: int = 0
    probation: int = PROBATION

    def came_past(self, progress: int) -> bool:
        return progress >= self.mark + self.probation

    def clear(self) -> None:
        """Clear the request of its deaths. Its next probation is longer."""
        self.num_deaths = self.num_alone = 0
        self.probation = min(2 * self.probation, MAX_PROBATION)

    def add(self, progress: int, *, alone: bool) -> None:
        """Record another death with this request in the batch."""
        if progress >= self.mark + MAX_PROBATION:
            self.num_deaths, self.num_alone, self.probation = 0, 0, PROBATION
        elif self.came_past(progress):
            self.clear()
        self.mark = progress
        self.num_deaths += 1
        self.num_alone += alone

    @property
    def weight(self) -> int:
        """Number of deaths as evidence: one more counts if the request was alone in all of them."""
        return self.num_deaths + (self.num_alone == self.num_deaths)


class Suspects(Generic[Name]):
    """Records the batches in which workers died, and chooses the group to try next."""

    def __init__(self) -> None:
        self.records: dict[Name, SuspectRecord] = {}
        self.groups: deque[list[Name]] = deque()
        """Groups of suspects to be tried, the current one first. Empty: there is no suspect."""
        self._died_s: float | None = None
        """Time of the latest death, unless a conviction has explained it."""
        self._strays_s: deque[float] = deque(maxlen=MAX_STRAYS)

    def died(self, batch: Mapping[Name, int], now_s: float, *, num_ended: int = 0) -> Name | None:
        """Record a death with `batch` (live request -> progress) in the steps in flight, and `num_ended` others that
        have ended since. Returns the convicted request, if there is one."""
        if not batch:
            return None  # no request was being computed
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
            self._died_s = None  # this death is explained
        if self.groups:
            self._split(batch, suspects)
        else:
            size = 1 if len(suspects) <= MAX_SINGLES else isqrt(len(suspects) - 1) + 1
            self.groups.extend(suspects[start : start + size] for start in range(0, len(suspects), size))
        return convicted

    def _split(self, batch: Container[Name], suspects: list[Name]) -> None:
        """Split the group on trial after a death: the requests in the batch are tried one by one, then its rest."""
        rest = [name for name in self.groups.popleft() if name not in batch]
        if rest:
            self.groups.appendleft(rest)
        self.groups.extendleft([name] for name in reversed(suspects))

    def proceed(self, progress_of: Callable[[Name], int | None]) -> list[Name]:
        """Clear the groups that have passed their probation. Returns the group to try now; empty if none is left.
        `progress_of` returns None for a request that has ended."""
        while self.groups:
            for name in self.groups[0]:
                progress = progress_of(name)
                if progress is not None and not self.records[name].came_past(progress):
                    return self.groups[0]
            for name in self.groups.popleft():
                self.records[name].clear()
        return []

    def num_deaths(self, name: Name) -> int:
        """Number of deaths in a row that `name` was in."""
        record = self.records.get(name)
        return 0 if record is None else record.num_deaths

    def forget(self, live: Container[Name]) -> None:
        """Drop the records of requests that are not `live` any more."""
        self.records = {name: record for name, record in self.records.items() if name in live}
        for group in self.groups:
            group[:] = [name for name in group if name in live]
