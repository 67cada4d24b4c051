"""Steady steps: the sequences of the previous step decode one token each again, and nothing else happened.

Most steps are steady. Building their inputs with numpy takes longer than all small kernels together, so unchanged
arrays are reused, and two native calls compute the numbers that change.
"""

from dataclasses import replace

import numpy as np

from vllm_lite.kernels.cpu.batch import DecodeRows
from vllm_lite.protocol.step import Handle
from vllm_lite.worker.batch.step_inputs import Int64s, StepInputs, StepStates
from vllm_lite.worker.sampling.sampler import SampleInputs, is_plain


class SteadyDecode:
    """Keeps the buffers of steady steps for the InputBatch that owns it.

    learn() stores a step that only decodes; prepare() fills the buffers for each step like it, until a sequence is
    added, removed or changed: then the batch calls invalidate().
    """

    def __init__(self, rows: DecodeRows | None) -> None:
        """`rows`: None without the native library; then no step is steady."""
        self._rows = rows
        self._inputs: StepInputs | None = None
        """Views of the buffers; None if no steady step can follow."""
        self._scheduled: dict[Handle, int] = {}
        self._width = 0  # of the block tables in `_inputs`
        self._ahead: Int64s | None = None
        """Position minus place of each sequence's token, if the model counts positions otherwise: [num_seqs]."""

    def learn(self, inputs: StepInputs, samples: SampleInputs) -> None:
        """Use a fully built step as the template of later ones, if it only decodes."""
        rows, count = self._rows, len(inputs.rows)
        is_decode = count == inputs.num_tokens == len(inputs.sampling)
        own = inputs.vectors is not None or bool(inputs.reads)
        if rows is None or not is_decode or inputs.has_proposals or inputs.draws_late or own:
            return
        rows.rows[:count] = inputs.rows
        positions = rows.positions[:count]
        self._ahead = None
        if inputs.counts_otherwise:
            self._ahead, positions = inputs.positions - (inputs.seq_lens - 1), np.zeros(count, np.int64)
        kept = None
        if not samples.params["rules"].any():
            kept = SampleInputs(
                samples.params, rows.lengths[:count], plain=is_plain(samples.params), named=samples.named
            )
        self._scheduled, self._width = dict.fromkeys(inputs.handles, 1), -1
        self._inputs = replace(
            inputs,
            rows=rows.rows[:count],
            input_ids=rows.input_ids[:count],
            positions=positions,
            slot_mapping=tuple(slots[:count] for slots in rows.slots),
            seq_lens=rows.seq_lens[:count],
            is_steady=True,
            samples=kept,
            states=None if inputs.states is None else _settled(inputs.states),
        )

    def invalidate(self) -> None:
        """Drop the template, because a sequence was added, removed or changed."""
        self._inputs = None

    def prepare(self, scheduled: dict[Handle, int]) -> StepInputs | None:
        """Fill the inputs of a step that computes `scheduled` tokens of each sequence, in this order. None if it does
        not match the template, or if a sequence cannot decode."""
        inputs, rows = self._inputs, self._rows
        if inputs is None or rows is None or scheduled != self._scheduled or list(scheduled) != inputs.handles:
            return None
        width = rows.fill(len(inputs.handles))
        if width < 0:
            return None
        if self._ahead is not None:
            np.add(rows.positions[: len(inputs.handles)], self._ahead, out=inputs.positions)
        if width != self._width:
            tables = tuple(table[: len(inputs.handles), :width] for table in rows.tables)
            self._inputs = inputs = replace(inputs, block_tables=tables)
            self._width = width
        return inputs

    def commit(self, inputs: StepInputs, sampled: Int64s) -> None:
        """Append the token that the prepared step sampled for each sequence; sampled: [num_seqs]."""
        if self._rows is not None:
            self._rows.commit(len(inputs.handles), sampled)


def _settled(states: StepStates) -> StepStates:
    """States of the following steps: each is read from and written to the slot where this step left it."""
    return states._replace(sources=states.last_targets, targets=states.last_targets)
