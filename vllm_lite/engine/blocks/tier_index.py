"""TierIndex: the keys of all contents of the disk tier, with an observer of changes."""

from collections.abc import Callable, Iterable


class TierIndex(set[bytes]):
    """A set of keys. Use only gain() and lose() to change it."""

    on_change: Callable[[Iterable[bytes], Iterable[bytes]], None] | None = None
    """Called with (added keys, removed keys)."""

    def gain(self, keys: Iterable[bytes]) -> None:
        """Add keys that the tier has from now on."""
        new = set(keys) - self
        if new:
            self.update(new)
            if self.on_change is not None:
                self.on_change(new, ())

    def lose(self, keys: Iterable[bytes]) -> None:
        """Remove keys that the tier has no longer."""
        gone = self.intersection(keys)
        if gone:
            self.difference_update(gone)
            if self.on_change is not None:
                self.on_change((), gone)
