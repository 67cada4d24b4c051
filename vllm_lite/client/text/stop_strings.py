"""Finds stop strings in a text that arrives in pieces. Text that could still become one is held back."""

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that ends first; of several that end there, the longest.

    So the result depends on the text alone, not on how it was cut into pieces. Each string has an automaton (Knuth,
    Morris, Pratt). Its state is the number of characters at the end of the text that begin the string, so the longest
    of the states must be held back, and each character costs constant time however long the strings are.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`stops` are not empty strings; if `include`, the one that is found stays in the text."""
        self.found: str | None = None
        self._include = include
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> str:
        """Take text, and return all held text that cannot be part of a stop string. If not `armed`, no stop string that
        ends in `text` counts."""
        held = self._held + text
        for place, character in enumerate(text, len(self._held) + 1):
            match = self._step(character)
            if match is not None and armed:
                self.found = match
                self._held = ""
                return held[:place] if self._include else held[: place - len(match)]
        keep = max(automaton.state for automaton in self._automata)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return the text that was held back. Call it after the last text."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        found = None
        for automaton in self._automata:  # longest first
            if automaton.step(character) and found is None:
                found = automaton.stop
        return found


class _Automaton:
    __slots__ = ("_borders", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0  # always below len(stop): a whole match falls back at once
        self._borders = _borders(stop)

    def step(self, character: str) -> bool:
        """Take one character; True if the string ends with it."""
        state = self.state
        while state and self.stop[state] != character:
            state = self._borders[state - 1]
        if self.stop[state] == character:
            state += 1
        whole = state == len(self.stop)
        self.state = self._borders[state - 1] if whole else state
        return whole


def _borders(stop: str) -> list[int]:
    """Compute, for each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        if stop[place] == stop[length]:
            length += 1
        borders[place] = length
    return borders
