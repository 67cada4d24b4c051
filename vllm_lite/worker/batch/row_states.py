"""Where the recurrent states of the batch's sequences are, row by row: what the scheduler says, and what a step did."""

import numpy as np

from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.step import States
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs, StepStates

NO_SLOT = 0
"""The state before the first token; what is left there is dropped."""


class RowStates:
    """`set` and `move` follow the batch's rows; `build` and `commit` a step. Without slots there are no states."""

    def __init__(self, max_num_seqs: int, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self.sources = np.zeros(max_num_seqs, np.int32)  # where each state is
        self.live = np.zeros(max_num_seqs, np.int32)  # where it goes on
        self._saves: dict[int, list[tuple[int, int]]] = {}  # of rows that have any: (position, slot), in order

    def set(self, row: int, entry: States) -> None:
        """Raises ProtocolError, naming the handle, for slots that there are not."""
        written = [entry.live, *(slot for _, slot in entry.saves)]
        if not (0 <= entry.source < self.num_slots and all(0 < slot < self.num_slots for slot in written)):
            raise ProtocolError(
                f"handle {entry.handle} got state slots {[entry.source, *written]}, there are [1, {self.num_slots})"
            )
        self.sources[row], self.live[row] = entry.source, entry.live
        self._saves.pop(row, None)
        if entry.saves:
            self._saves[row] = list(entry.saves)

    def move(self, row: int, to: int) -> None:
        """The sequence in `to` has left, and that in the last row, `row`, takes its place."""
        self._saves.pop(to, None)
        if row == to:
            return
        self.sources[to], self.live[to] = self.sources[row], self.live[row]
        if row in self._saves:
            self._saves[to] = self._saves.pop(row)

    def build(
        self, rows: Int64s, starts: Int64s, ends: Int64s, query_start_loc: Int32s, num_drafts: Int64s | None = None
    ) -> StepStates | None:
        """Cut what the step computes of each row, positions from `starts` to `ends`, where states are saved. Rows with
        drafts leave no state: see `confirmed`."""
        if not self.num_slots:
            return None
        sources, live = self.sources[rows], self.live[rows]
        if not live.all():
            raise ProtocolError(f"row {int(rows[live.argmin()])} has no slot for its state")
        if num_drafts is not None:
            live[num_drafts > 0] = NO_SLOT
        if not self._saves or self._saves.keys().isdisjoint(rows.tolist()):
            return StepStates(np.arange(len(rows) + 1, dtype=np.int32), query_start_loc, sources, live)
        firsts, cuts, froms, tos = [0], [0], list[int](), list[int]()
        for index, row in enumerate(rows.tolist()):
            start, end, at = int(starts[index]), int(ends[index]), int(query_start_loc[index])
            due = [save for save in self._saves.get(row, ()) if save[0] <= end and live[index]]
            source = int(sources[index])
            for position, slot in [*due, (end, int(live[index]))]:  # the last may be empty, and copies the state
                cuts.append(at + position - start)
                froms.append(source)
                tos.append(slot)
                source = slot
            firsts.append(len(tos))
        return StepStates(*(np.array(each, np.int32) for each in (firsts, cuts, froms, tos)))

    def confirmed(self, inputs: StepInputs, num_kept: Int64s) -> tuple[Int64s, StepStates] | None:
        """What is left to take up of a step with drafts, as far as they proved right: the places of the tokens among
        `inputs.tentative`, and from where to where. num_kept: [num_sampling]. None: nothing."""
        if inputs.states is None or not inputs.drafted:
            return None
        drafting = inputs.num_samples > 1
        counts, kept, sequences = inputs.num_samples[drafting], num_kept[drafting], inputs.sampling[drafting]
        is_kept = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts) < kept.repeat(counts)
        rows = np.zeros(len(kept) + 1, np.int32)
        kept.cumsum(out=rows[1:])
        live = self.live[inputs.rows[sequences]]
        sources = inputs.states.sources[inputs.states.firsts[sequences]]
        return np.flatnonzero(is_kept), StepStates(np.arange(len(rows), dtype=np.int32), rows, sources, live)

    def commit(self, rows: Int64s, states: StepStates | None) -> None:
        """The step has been run: states are where it left them."""
        if states is None:
            return
        left = states.last_targets
        self.sources[rows] = np.where(left == NO_SLOT, self.live[rows], left)
        if len(states.targets) > len(rows) or self._saves:
            done = set(states.targets.tolist())
            for row in rows.tolist():
                to_come = [save for save in self._saves.pop(row, ()) if save[1] not in done]
                if to_come:
                    self._saves[row] = to_come
