"""Silence: how long another process has not been heard, in the time in which this one ran.

`docker pause` or a host that stops its guests stop both at once: that the other then said nothing means nothing.
"""

import time
from collections.abc import Callable


class Silence:
    """Begins with being made. Looks that are further apart than `most_apart_s` mean that this process did not run."""

    def __init__(self, most_apart_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_apart_s = most_apart_s
        self._clock = clock
        self._heard_s = self._looked_s = clock()

    def end(self) -> None:
        """It was heard, or there was nothing that it had to say. Any thread may call this."""
        self._heard_s = self._looked_s = self._clock()

    def seconds(self) -> float:
        """Look. Of the time since the last look `most_apart_s` count at the most."""
        now_s = self._clock()
        absent_s = now_s - self._looked_s - self._most_apart_s
        if absent_s > 0:
            self._heard_s = min(self._heard_s + absent_s, now_s)  # end() may have come meanwhile
        self._looked_s = now_s
        return now_s - self._heard_s
