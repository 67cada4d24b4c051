"""StatePlace: the slots of one sequence's recurrent state: the current one, and the states saved on the way."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_lite.engine.states.histories import History

NO_SLOT = 0
"""Slot 0: the state before the first token. It is never written."""


@dataclass(slots=True)
class Snapshot:
    """A state saved while decoding."""

    position: int
    slot: int
    key: bytes | None = None
    """None: the sequence holds the slot; empty: the next step publishes it; otherwise its key in the prefix cache."""


@dataclass(slots=True)
class StatePlace:
    """Slots of a sequence's state. The sequence holds a reference to each, as held() lists them.

    live      slot that the steps write; NO_SLOT while the state is on the host
    host      place on the host of a swapped-out state
    history   history of the states that the sequence leaves
    source    slot to read next instead of `live`: a cached state, or one shared with forks; until it is sent to workers
    saves     (position, slot) of states that later steps will save, in order
    saved_at  last position at which the state was, or will be, saved
    is_ahead  the state may include drafts that do not count as computed, so that it cannot be reused
    """

    live: int
    history: History
    source: int = NO_SLOT
    saves: list[tuple[int, int]] = field(default_factory=list)
    saved_at: int = 0
    is_ahead: bool = False
    host: int | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    """States saved while decoding, the latest last."""

    def held(self) -> list[int]:
        """All slots to which the sequence has a reference."""
        own = [snapshot.slot for snapshot in self.snapshots if snapshot.key is None]
        return [slot for slot in (self.live, *own, self.source, *(slot for _, slot in self.saves)) if slot]


class Left(NamedTuple):
    """A saved state that is published once the step that writes it has been sent."""

    slot: int
    key: bytes
    history: History
    snapshot: Snapshot | None = None
    """The sequence's snapshot of this slot, if the sequence may still take the slot back."""
    ends_prompt: bool = False
    """Whether the state is at the end of the prompt, where a chat with another answer may continue."""
