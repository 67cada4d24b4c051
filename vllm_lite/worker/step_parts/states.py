"""RowStates: the slot of each row's recurrent state, as the scheduler's entries and the steps change it."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.step import Entry, States
from vllm_lite.worker.batch.part import Handler, StepPart, StepResult
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs, StepStates

TakeUp = Callable[[Int64s, StepStates], None]
"""Updates states with accepted tokens, given by their indices among the step's tentative ones."""

NO_SLOT = 0
"""The state before the first token; states written to it are dropped."""


class RowStates(StepPart):
    """Columns: the slot to read each row's state from (`sources`), and the slot to write it to (`live`)."""

    def __init__(self, num_slots: int, take_up: TakeUp) -> None:
        self.num_slots = num_slots
        self._take_up = take_up
        self._saves: dict[int, list[tuple[int, int]]] = {}  # of rows that have any: (position, slot), in order

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        self.sources = np.zeros(rows.max_num_seqs, np.int32)
        self.live = np.zeros(rows.max_num_seqs, np.int32)

    def handlers(self) -> Mapping[type, Handler]:
        return {States: self._set}

    def _set(self, entry: States) -> None:
        """Apply an entry. Raises ProtocolError, naming the handle, for slots that do not exist."""
        row = self.rows.row_of(entry.handle, "States")
        written = [entry.live, *(slot for _, slot in entry.saves)]
        if not (0 <= entry.source < self.num_slots and all(0 < slot < self.num_slots for slot in written)):
            raise ProtocolError(
                f"handle {entry.handle} got state slots {[entry.source, *written]}, there are [1, {self.num_slots})"
            )
        self.sources[row], self.live[row] = entry.source, entry.live
        self._saves.pop(row, None)
        if entry.saves:
            self._saves[row] = list(entry.saves)
        self.rows.changed = True

    def remove(self, row: int, last: int) -> None:
        self._saves.pop(row, None)
        if row == last:
            return
        self.sources[row], self.live[row] = self.sources[last], self.live[last]
        if last in self._saves:
            self._saves[row] = self._saves.pop(last)

    # ---- a step

    def build(self, inputs: StepInputs) -> None:
        """Set the step's state slots, with each row's tokens cut where states are saved. Sequences with proposed tokens
        write no state before after_sample()."""
        rows = inputs.rows
        sources, live = self.sources[rows], self.live[rows]
        if not live.all():
            raise ProtocolError(f"row {int(rows[live.argmin()])} has no slot for its state")
        if inputs.has_proposals:
            live[inputs.sampling[inputs.num_samples > 1]] = NO_SLOT
        inputs.is_repeatable = False  # a state must not include a token twice
        inputs.states = self._cut(inputs, sources, live)

    def _cut(self, inputs: StepInputs, sources: Int32s, live: Int32s) -> StepStates:  # [num_seqs] each
        rows, query_start_loc = inputs.rows, inputs.query_start_loc
        if not self._saves or self._saves.keys().isdisjoint(rows.tolist()):
            return StepStates(np.arange(len(rows) + 1, dtype=np.int32), query_start_loc, sources, live)
        firsts, cuts, froms, tos = [0], [0], list[int](), list[int]()
        for index, row in enumerate(rows.tolist()):
            end, at = int(inputs.seq_lens[index]), int(query_start_loc[index])
            start = end - int(inputs.num_scheduled[index])
            due = [save for save in self._saves.get(row, ()) if save[0] <= end and live[index]]
            source = int(sources[index])
            for position, slot in [*due, (end, int(live[index]))]:  # the last may be empty, and copies the state
                cuts.append(at + position - start)
                froms.append(source)
                tos.append(slot)
                source = slot
            firsts.append(len(tos))
        return StepStates(*(np.array(each, np.int32) for each in (firsts, cuts, froms, tos)))

    def after_sample(self, inputs: StepInputs, result: StepResult) -> None:
        if inputs.has_proposals and inputs.states is not None:
            self._take_up(*self._confirmed(inputs, inputs.states, result.num_kept))

    def _confirmed(self, inputs: StepInputs, states: StepStates, num_kept: Int64s) -> tuple[Int64s, StepStates]:
        """Indices of the accepted tokens among the tentative ones, and the slots from and to which they update states.
        num_kept: [num_sampling]."""
        trying = inputs.num_samples > 1
        counts, kept, sequences = inputs.num_samples[trying], num_kept[trying], inputs.sampling[trying]
        is_kept = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts) < kept.repeat(counts)
        rows = np.zeros(len(kept) + 1, np.int32)
        kept.cumsum(out=rows[1:])
        live = self.live[inputs.rows[sequences]]
        sources = states.sources[states.firsts[sequences]]
        return np.flatnonzero(is_kept), StepStates(np.arange(len(rows), dtype=np.int32), rows, sources, live)

    def commit(self, inputs: StepInputs, tokens: Int64s, num_kept: Int64s | None) -> None:  # noqa: ARG002
        """Record the slots to which the step has written the states."""
        states, rows = inputs.states, inputs.rows
        if states is None or inputs.is_steady:
            return
        left = states.last_targets
        self.sources[rows] = np.where(left == NO_SLOT, self.live[rows], left)
        if len(states.targets) > len(rows) or self._saves:
            done = set(states.targets.tolist())
            for row in rows.tolist():
                to_come = [save for save in self._saves.pop(row, ()) if save[1] not in done]
                if to_come:
                    self._saves[row] = to_come

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:  # noqa: ARG002
        return False  # the states to keep are known when the step is done
