"""TierIndex: the keys of all that a tier below memory has, with an observer of what comes and goes."""

from collections.abc import Callable, Iterable


class TierIndex(set[bytes]):
    """Is read like any set, and changed by gain() and lose() alone."""

    on_change: Callable[[Iterable[bytes], Iterable[bytes]], None] | None = None
    """Called with the keys that have come and those that have gone."""

    def gain(self, keys: Iterable[bytes]) -> None:
        """The tier has these from now on."""
        new = set(keys) - self
        if new:
            self.update(new)
            if self.on_change is not None:
                self.on_change(new, ())

    def lose(self, keys: Iterable[bytes]) -> None:
        """The tier has these no more."""
        gone = self.intersection(keys)
        if gone:
            self.difference_update(gone)
            if self.on_change is not None:
                self.on_change((), gone)
