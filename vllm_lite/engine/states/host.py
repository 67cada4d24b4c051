"""HostStates: recurrent states in CPU memory. One pool of places serves two uses: states of swapped-out sequences,
which are pinned, and demoted saved states, which are kept until a more valuable one needs the place.

Ids are global: the device's slots are [0, first_id), the host's places [first_id, first_id + num_states).
"""

from collections.abc import Iterable

from vllm_lite.engine.states.histories import History, StateHistories
from vllm_lite.protocol.step import BlockOp


class HostStates:
    """Chooses places, and writes the ops by which workers move states, at most `max_moves` per step. `ops` are those of
    the step being scheduled."""

    def __init__(self, num_states: int, first_id: int, max_moves: int, histories: StateHistories) -> None:
        self.num_states = num_states
        self.first_id = first_id
        self.num_demoted = self.num_promoted = 0
        """Saved states moved to the host, and back to the device, since the start."""
        self.ops: list[tuple[int, int, int]] = []
        self._max_moves = self._left = max_moves
        self._histories = histories
        self._free = list(range(first_id + num_states - 1, first_id - 1, -1))
        self._places: dict[bytes, int] = {}
        self._pinned: set[int] = set()
        self._reserved: bytes | None = None
        """Key of the saved state that reserve() chose for loading; it is not evicted."""

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def num_cached(self) -> int:
        return len(self._places)

    @property
    def may_move(self) -> bool:
        """Whether the step being scheduled may move one more state."""
        return self._left > 0

    def begin_step(self) -> None:
        """Reset the limit of moves, less the moves since the last step was made: a fork, or diverging beams, may have
        demoted a saved state in between."""
        self._left = self._max_moves - len(self.ops)

    def take_ops(self) -> list[tuple[int, int, int]]:
        ops, self.ops = self.ops, []
        return ops

    # ---- saved states

    def find(self, key: bytes) -> int | None:
        """Place of the saved state with this key, or None."""
        return self._places.get(key)

    def demote(self, key: bytes, history: History, slot: int) -> None:
        """Move the saved state in `slot`, which is about to be reused, to the host, if its chat is likely to continue
        from it and no state that it would evict is worth more."""
        if history.worth(key) < 2 or not self.may_move or key in self._places:
            return
        if not self._free:
            worst = self._histories.worst(self._histories.demoted, self._may_go)
            if worst is None or not self._histories.is_better(history, worst):
                return
            self._drop(worst, is_remembered=True)
        self._places[key] = place = self._free.pop()
        self._histories.demoted[key] = history
        self._move_out(slot, place)
        self.num_demoted += 1

    def reserve(self, key: bytes | None = None) -> None:
        """Reserve one move for loading a state: the saved one of `key`, or a sequence's own (None). Call it only if
        `may_move`."""
        self._left -= 1
        self._reserved = key

    def load(self, key: bytes, slot: int) -> None:
        """Copy the reserved saved state to the device; it stays on the host, too."""
        self.ops.append((BlockOp.STATE_IN, self._places[key], slot))
        self.num_promoted += 1

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._places:
                self._drop(key)

    def clear(self) -> None:
        """Drop all saved states."""
        self._free += self._places.values()
        self._places = {}

    def _may_go(self, key: bytes) -> bool:
        return key != self._reserved

    def _drop(self, key: bytes, *, is_remembered: bool = False) -> None:
        self._free.append(self._places.pop(key))
        self._histories.remove(self._histories.demoted, key, is_remembered=is_remembered)

    # ---- states of sequences

    def pin(self, slot: int) -> int | None:
        """Move a sequence's state to the host. Returns its place; None: the step may not move it, or there is none."""
        if not self.may_move:
            return None
        if not self._free:
            worst = self._histories.worst(self._histories.demoted, self._may_go)
            if worst is None:
                return None
            self._drop(worst, is_remembered=True)
        place = self._free.pop()
        self._pinned.add(place)
        self._move_out(slot, place)
        return place

    def unpin(self, place: int, slot: int | None = None) -> None:
        """Free the place of a sequence's state, after moving the state back into `slot` unless that is None."""
        if slot is not None:
            self.ops.append((BlockOp.STATE_IN, place, slot))
        self._pinned.remove(place)
        self._free.append(place)

    # ---- inside

    def _move_out(self, slot: int, place: int) -> None:
        self.ops.append((BlockOp.STATE_OUT, slot, place))
        self._left -= 1

    def check_integrity(self, pinned: Iterable[int]) -> None:
        """Raise RuntimeError unless each place is free, has one saved state or is one of `pinned`."""
        if set(pinned) != self._pinned:
            raise RuntimeError(f"places {self._pinned} are pinned, and sequences have {set(pinned)}")
        places = [*self._free, *self._places.values(), *self._pinned]
        if sorted(places) != list(range(self.first_id, self.first_id + self.num_states)):
            raise RuntimeError("a place for a state on the host is lost, or has two uses")
        if self._places.keys() != self._histories.demoted.keys():
            raise RuntimeError("the states on the host are not those with a history")
