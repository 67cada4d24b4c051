"""RestartLimit: how often that which dies is started again, before its deaths count as the end."""

from collections import deque

WINDOW_S = 300.0
"""max_restarts counts the deaths of so many seconds."""


class RestartLimit:
    """Counts deaths, of the workers of one engine or of the engines at one address. Time is an argument."""

    def __init__(self, max_restarts: int, window_s: float = WINDOW_S) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._deaths: deque[tuple[float, str]] = deque()

    def allows(self, cause: str, now_s: float) -> bool:
        """Count a death. Returns whether it may be answered by another start; `now_s` never goes back."""
        self._deaths.append((now_s, cause))
        while now_s - self._deaths[0][0] > self._window_s:
            self._deaths.popleft()
        return len(self._deaths) <= self._max_restarts

    @property
    def causes(self) -> str:
        """The deaths counted in the window, with the first cause, which is likely to be the root of all others, and the
        last one if it is another. Of a single death it is just its cause, and "" before the first."""
        if not self._deaths:
            return ""
        (_, first), (_, last) = self._deaths[0], self._deaths[-1]
        if len(self._deaths) == 1:
            return first
        others = "" if last == first else f"; the last one: {last}"
        return f"{first} (the first of {len(self._deaths)} deaths within {self._window_s:g} s{others})"
