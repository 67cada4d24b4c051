"""Steps that are like the one before: the same sequences decode one token each, and nothing else happened.

Most steps are. To make their inputs anew with numpy takes longer than all small kernels together, so what stays the
same is kept, and the numbers that change come from two native calls.
"""

from collections.abc import Sequence
from dataclasses import replace

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.batch import DecodeRows
from vllm_lite.protocol.step import Handle
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs
from vllm_lite.worker.sampling.sampler import SampleInputs, is_plain


class SteadyDecode:
    """`remember` a step of pure decoding; then `prepare` those that follow, until there is something to `forget`."""

    def __init__(self, rows: DecodeRows | None) -> None:
        """`rows`: None where there is no native library, and every step is made in full."""
        self._rows = rows
        self._like: StepInputs | None = None
        self._handles: list[Handle] = []
        self._scheduled: dict[Handle, int] = {}
        self._width = 0
        self._sampling: SampleInputs | None = None
        self.inputs: StepInputs | None = None
        """Of the step that was prepared last; its arrays are overwritten by the next one."""
        self.sampling: SampleInputs | None = None
        """Of the same step; None where it has to be worked out each time."""

    def remember(self, inputs: StepInputs, sampling: SampleInputs) -> None:
        """A step that was made in full. Steps like it can be prepared if it was one of decoding only."""
        rows, count = self._rows, len(inputs.rows)
        if rows is None or inputs is self.inputs:
            return
        if inputs.drafted or not count == inputs.num_tokens == len(inputs.sampling):
            return
        rows.rows[:count] = inputs.rows
        self._like = replace(
            inputs,
            rows=rows.rows[:count],
            input_ids=rows.input_ids[:count],
            positions=rows.positions[:count],
            slot_mapping=tuple(slots[:count] for slots in rows.slots),
            seq_lens=rows.seq_lens[:count],
        )
        self._handles, self._scheduled = inputs.handles, dict.fromkeys(inputs.handles, 1)
        self.inputs = self.sampling = self._sampling = None
        params = sampling.params
        if not params["rules"].any():
            self._sampling = SampleInputs(params, rows.lengths[:count], plain=is_plain(params))

    def forget(self) -> None:
        """A sequence came, left or was changed."""
        self._like = None

    def prepare(self, scheduled: dict[Handle, int]) -> StepInputs | None:
        """The inputs of a step of so many tokens of each sequence, in this order. None if it is not like the one that
        was remembered, or if a sequence cannot decode."""
        like, rows, handles = self._like, self._rows, self._handles
        if like is None or rows is None or scheduled != self._scheduled or list(scheduled) != handles:
            return None
        width = rows.fill(len(handles))
        if width < 0:
            return None
        if self.inputs is None or width != self._width:
            tables = tuple(table[: len(handles), :width] for table in rows.tables)
            self.inputs, self._width = replace(like, block_tables=tables), width
            self.sampling = self._sampling
        return self.inputs

    def commit(self, sampled: Int64s) -> None:
        """The prepared step has run and gave each sequence one token: [num_seqs]."""
        if self._rows is not None:
            self._rows.commit(len(self._handles), sampled)


def steady_decode(
    token_ids: Int32s,  # of a batch: [max_rows, max_tokens]
    counts: tuple[Int64s, Int64s, Int64s],  # num_tokens, num_computed, num_cached: [max_rows] each
    tables: Sequence[Int32s],  # per KV group: [max_rows, table_width]
    table_lens: Int32s,  # [max_rows, num_groups]
    block_size: int,
) -> SteadyDecode:
    """On the arrays of a batch, which stay where they are."""
    return SteadyDecode(DecodeRows(token_ids, counts, tables, table_lens, block_size) if cpu.available() else None)
