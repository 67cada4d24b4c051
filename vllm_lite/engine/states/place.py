"""StatePlace: where the state of one sequence with recurrent layers is, and what of it is kept on the way."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_lite.engine.states.histories import History

NO_SLOT = 0
"""The state before the first token; nothing is ever left there."""


@dataclass(slots=True)
class Snapshot:
    """A state that was saved while decoding."""

    position: int
    slot: int
    key: bytes | None = None
    """None: its sequence holds the slot; empty: it is about to be published; else it can be found under it."""


@dataclass(slots=True)
class StatePlace:
    """Slots of a sequence's state.

    live      the slot in which it goes on; held; none while its state is on the host
    host      its place there, while it is swapped out
    history   that of the states it leaves
    source    the cached state that it begins with, or that it shares with forks; held until the workers know of it
    saves     (position, slot) of states that steps to come leave, in order; held
    saved_at  the last position at which the state was, or will be, saved
    is_ahead  whether drafts are, or may be, taken up that its sequence does not count as computed: it is of no use
    """

    live: int
    history: History
    source: int = NO_SLOT
    saves: list[tuple[int, int]] = field(default_factory=list)
    saved_at: int = 0
    is_ahead: bool = False
    host: int | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    """The latest is the last."""

    def held(self) -> list[int]:
        """The slots to which it has a reference."""
        own = [snapshot.slot for snapshot in self.snapshots if snapshot.key is None]
        return [slot for slot in (self.live, *own, self.source, *(slot for _, slot in self.saves)) if slot]


class Left(NamedTuple):
    """A state that a step leaves, for others to find."""

    slot: int
    key: bytes
    history: History
    snapshot: Snapshot | None = None
    """Its snapshot, if a sequence may still take the slot back."""
    ends_prompt: bool = False
    """Whether it is at the end of the prompt, so that another answer may follow."""
