"""RestartLimit: bounds the restarts of a process that keeps dying."""

from collections import deque

WINDOW_S = 300.0
"""The window, in seconds, in which max_restarts counts deaths."""


class RestartLimit:
    """Counts deaths of the workers of an engine, or of the engines at one address. Time is an argument."""

    def __init__(self, max_restarts: int, window_s: float = WINDOW_S) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._deaths: deque[tuple[float, str]] = deque()

    def allows(self, cause: str, now_s: float) -> bool:
        """Count a death. Returns whether another start is allowed; `now_s` must never decrease."""
        self._deaths.append((now_s, cause))
        while now_s - self._deaths[0][0] > self._window_s:
            self._deaths.popleft()
        return len(self._deaths) <= self._max_restarts

    @property
    def causes(self) -> str:
        """Summary of the deaths in the window: the first cause, which likely caused the others, and the last if it
        differs. The bare cause of a single death; "" if there was none."""
        if not self._deaths:
            return ""
        (_, first), (_, last) = self._deaths[0], self._deaths[-1]
        if len(self._deaths) == 1:
            return first
        others = "" if last == first else f"; the last one: {last}"
        return f"{first} (the first of {len(self._deaths)} deaths within {self._window_s:g} s{others})"
