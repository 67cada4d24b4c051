"""The persistent batch: the worker's sequences between steps, to which each step applies the scheduler's diffs.

A step calls `apply` (the diffs), `build` (inputs of the forward pass) and `commit` (sampled tokens). The worker takes
sampled tokens from its own rows, since the engine may send the next step before it knows them. Features are StepParts
(part.py). Nothing here loops over tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lite.errors import ProtocolError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.batch import DecodeRows
from vllm_lite.protocol.step import (
    Continue,
    Entry,
    Finish,
    Fork,
    Handle,
    NewRequest,
    Preempt,
    ReplaceBlock,
    Resume,
    SetToken,
)
from vllm_lite.worker.batch.part import Handler, StepPart, hooks
from vllm_lite.worker.batch.rows import Rows, SequenceState
from vllm_lite.worker.batch.steady import SteadyDecode
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs
from vllm_lite.worker.sampling.sampler import SampleInputs, named_tokens


class InputBatch:
    """Applies steps to the rows, and calls the hooks of the StepParts in their order."""

    def __init__(self, rows: Rows, parts: Sequence[StepPart] = ()) -> None:
        self.rows = rows
        self.tables = tables = rows.tables
        self.parts = tuple(parts)
        self._handlers: dict[type, Handler] = {
            Continue: self._continue,
            NewRequest: self._new,
            Resume: self._resume,
            Fork: self._fork,
            Preempt: self._preempt,
            Finish: self._finish,
            ReplaceBlock: self._replace_block,
            SetToken: self._set_token,
        }
        for part in parts:
            part.attach(rows)
            self._handlers |= part.handlers()
        names = ("open", "close", "add", "remove", "propose", "build", "before_sample", "commit")
        self._hooks = {name: hooks(parts, name) for name in names}
        counts = rows.num_tokens, rows.num_computed, rows.num_cached
        arrays = rows.token_ids, counts, tables.ids, tables.lens, tables.block_size
        self._steady = SteadyDecode(DecodeRows(*arrays) if cpu.available() and tables.ids else None)

    @property
    def resident(self) -> Sequence[SequenceState]:
        """The running sequences, by row."""
        return self.rows.resident

    def tokens_of(self, handle: Handle) -> Int32s:
        """See Rows.tokens_of."""
        return self.rows.tokens_of(handle)

    # ---- apply: the scheduler's diffs

    def apply(self, entries: Sequence[Entry]) -> None:
        """Apply one step's entries in order. Raises ProtocolError, naming the handle, for one that does not fit.

        After an error the batch must not be used: its state differs from the engine's, and the worker ends.
        """
        self.rows.begin_step()
        for entry in entries:
            handler = self._handlers.get(type(entry))
            if handler is None:
                raise ProtocolError(f"a step has {entry}, but no part of this worker handles {type(entry).__name__}")
            handler(entry)
        if self.rows.changed:
            self.rows.changed = False
            self._steady.invalidate()

    def _continue(self, entry: Continue) -> None:
        row = self.rows.row_of(entry.handle, "Continue")
        if entry.new_block_ids:
            self.tables.append(row, entry.handle, entry.new_block_ids)
        self.rows.schedule(entry.handle, entry.num_tokens)

    def _new(self, entry: NewRequest) -> None:
        tokens, rows = np.frombuffer(entry.tokens, "<u4"), self.rows
        if not 0 < len(tokens) <= rows.max_model_len:
            raise ProtocolError(f"handle {entry.handle} has {len(tokens)} tokens, expected 1 to {rows.max_model_len}")
        if tokens.max() >= rows.vocab_size:
            raise ProtocolError(f"handle {entry.handle} has token {tokens.max()}, the vocabulary {rows.vocab_size}")
        sequence = rows.open(entry.handle, entry.sampling, entry.num_prompt_tokens)
        for hook in self._hooks["open"]:
            hook(sequence, entry)
        self._start(sequence, tokens, entry)

    def _resume(self, entry: Resume) -> None:
        sequence = self.rows.sequences.get(entry.handle)
        if sequence is None or sequence.preempted_tokens is None:
            raise ProtocolError(f"Resume of handle {entry.handle}, which is not preempted")
        tokens, sequence.preempted_tokens = sequence.preempted_tokens, None
        self._start(sequence, tokens, entry)

    def _start(self, sequence: SequenceState, tokens: NDArray[Any], entry: NewRequest | Resume) -> None:
        row = self._add_row(sequence, tokens)
        self.rows.num_computed[row] = entry.num_computed
        self.rows.num_cached[row] = entry.num_cached
        self.tables.append(row, entry.handle, entry.block_ids)
        self.rows.schedule(entry.handle, entry.num_tokens)

    def _fork(self, entry: Fork) -> None:
        """Add a child with the parent's blocks; ReplaceBlock entries give one of the two a copy of a shared block."""
        rows = self.rows
        parent = rows.row_of(entry.parent, "Fork")
        known = int(rows.num_tokens[parent])
        if not 0 <= entry.num_computed < entry.num_tokens <= known:
            raise ProtocolError(
                f"Fork of handle {entry.parent} at {entry.num_computed} of {entry.num_tokens} tokens, it has {known}"
            )
        num_prompt = min(rows.resident[parent].num_prompt, entry.num_tokens)
        sequence = rows.open(entry.child, entry.sampling, num_prompt)
        for hook in self._hooks["open"]:
            hook(sequence, entry)
        child = self._add_row(sequence, rows.token_ids[parent, : entry.num_tokens])
        rows.num_computed[child], rows.num_cached[child] = entry.num_computed, entry.num_cached
        self.tables.fork(parent, child, entry.num_tokens)

    def _replace_block(self, entry: ReplaceBlock) -> None:
        row = self.rows.row_of(entry.handle, "ReplaceBlock")
        self.tables.replace(row, entry.handle, (entry.group, entry.index), entry.block_id)
        self.rows.changed = True

    def _set_token(self, entry: SetToken) -> None:
        vocab_size = self.rows.vocab_size
        if not 0 <= entry.token_id < vocab_size:
            raise ProtocolError(f"SetToken {entry.token_id} of handle {entry.handle}, the vocabulary {vocab_size}")
        self.rows.tokens_of(entry.handle, "SetToken")[-1] = entry.token_id
        self.rows.changed = True

    def _preempt(self, entry: Preempt) -> None:
        row = self.rows.row_of(entry.handle, "Preempt")
        self.rows.resident[row].preempted_tokens = self.rows.tokens_of(entry.handle).copy()
        self._remove_row(row)

    def _finish(self, entry: Finish) -> None:
        rows = self.rows
        sequence = rows.sequences.get(entry.handle)
        if sequence is None or sequence.preempted_tokens is None:
            self._remove_row(rows.row_of(entry.handle, "Finish"))
        sequence = rows.sequences.pop(entry.handle)
        for hook in self._hooks["close"]:
            hook(sequence)

    def _add_row(self, sequence: SequenceState, tokens: NDArray[Any]) -> int:
        row = self.rows.add(sequence, tokens)
        for hook in self._hooks["add"]:
            hook(row, sequence, tokens)
        return row

    def _remove_row(self, row: int) -> None:
        for hook in self._hooks["remove"]:
            hook(row, len(self.rows) - 1)
        self.rows.remove(row)

    # ---- build: the forward pass's inputs

    def build(self) -> StepInputs:
        """Build the inputs of the applied step. Raises ProtocolError if a sequence lacks tokens or blocks."""
        for hook in self._hooks["propose"]:
            hook()
        scheduled = self.rows.scheduled
        if (steady := self._steady.prepare(scheduled)) is not None:
            return steady
        batch, handles = self.rows, list(scheduled)
        rows = np.array([batch.sequences[handle].row for handle in handles], np.int64)
        counts = np.array(list(scheduled.values()), np.int64)
        starts, num_tokens = batch.num_computed[rows], batch.num_tokens[rows]
        ends = starts + counts
        num_proposed = self._num_proposed(handles)
        if num_proposed is not None:
            num_tokens += num_proposed
        self._check_ranges(handles, ends, num_tokens, self.tables.room(rows))
        (sampling,) = (ends == num_tokens).nonzero()

        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=query_start_loc[1:])
        token_rows, positions = rows, starts
        if query_start_loc[-1] > len(rows):  # more than one token per sequence
            token_rows = rows.repeat(counts)
            positions = np.arange(query_start_loc[-1]) + (starts - query_start_loc[:-1]).repeat(counts)
        written = positions >= batch.num_cached[token_rows]
        inputs = StepInputs(
            handles=handles,
            rows=rows,
            num_scheduled=counts,
            input_ids=batch.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slot_mapping=self.tables.slots(token_rows, positions, written, batch.handle_of),
            block_tables=self.tables.of(rows),
            query_start_loc=query_start_loc,
            seq_lens=ends.astype(np.int32),
            sampling=sampling,
            num_samples=np.ones(len(sampling), np.int64) if num_proposed is None else 1 + num_proposed[sampling],
            has_proposals=num_proposed is not None,
        )
        for hook in self._hooks["build"]:
            hook(inputs)
        return inputs

    def _num_proposed(self, handles: list[Handle]) -> Int64s | None:  # [num_seqs]
        """Number of proposed tokens per sequence; None, the fast path, if there are none."""
        proposed = self.rows.proposed
        return np.array([proposed.get(handle, 0) for handle in handles], np.int64) if proposed else None

    def _check_ranges(self, handles: list[Handle], ends: Int64s, num_tokens: Int64s, room: Int32s) -> None:
        excess, scheduled = ends > np.minimum(num_tokens, room), self.rows.scheduled
        if excess.any() or min(scheduled.values(), default=1) < 1:
            counts = list(scheduled.values())
            i = next(i for i, exceeds in enumerate(excess) if exceeds or counts[i] < 1)
            raise ProtocolError(
                f"handle {handles[i]} cannot compute {counts[i]} tokens up to {ends[i]}: "
                f"it has {num_tokens[i]} tokens, and blocks for {room[i]}"
            )

    def sample_inputs(self, inputs: StepInputs) -> SampleInputs:
        """Build the sampler's inputs for the sequences that sample in this step. Call it before `commit`, and before
        the forward pass unless the step `draws_late`."""
        if inputs.samples is not None:
            return inputs.samples
        rows = inputs.rows[inputs.sampling]
        rows = rows.repeat(inputs.num_samples) if inputs.has_proposals else rows
        params, positions = self.rows.params[rows], self.rows.num_tokens[rows]
        if inputs.has_proposals:
            positions += inputs.sample_offsets
        samples = SampleInputs(params, positions, named=named_tokens(params, rows, self.resident))
        for hook in self._hooks["before_sample"]:
            hook(samples, rows)
        if not inputs.is_steady:
            self._steady.learn(inputs, samples)
        return samples

    # ---- commit: the sampled tokens

    def commit(self, inputs: StepInputs, sampled: Int64s, num_kept: Int64s | None = None) -> None:
        """Append the sampled tokens to the rows.

        Of `sampled` [num_samples], the first `num_kept` [num_sampling] of each sequence (None: all) become its tokens.
        The proposed tokens before the last of them are accepted, so they count as computed. If none is kept, a later
        step computes the last position again without writing its KV.
        """
        for hook in self._hooks["commit"]:
            hook(inputs, sampled, num_kept)
        if inputs.is_steady:
            self._steady.commit(inputs, sampled)
            return
        batch, rows, num_samples = self.rows, inputs.rows[inputs.sampling], inputs.num_samples
        batch.num_computed[inputs.rows] += inputs.num_scheduled
        if not inputs.has_proposals and (num_kept is None or num_kept.all()):
            ends = batch.num_tokens[rows]
            batch.token_ids[rows, ends] = sampled
            batch.num_tokens[rows] = ends + 1
            return
        num_kept = num_samples if num_kept is None else num_kept
        batch.num_computed[rows] -= num_samples - num_kept
        again = rows[num_kept == 0]
        batch.num_cached[again] = np.maximum(batch.num_cached[again], batch.num_computed[again] + 1)
        kept = inputs.sample_offsets < np.repeat(num_kept, num_samples)
        sample_rows = np.repeat(rows, num_kept)
        batch.token_ids[sample_rows, batch.num_tokens[sample_rows] + inputs.sample_offsets[kept]] = sampled[kept]
        batch.num_tokens[rows] += num_kept

    def check_integrity(self) -> None:
        """Raise RuntimeError if the state is inconsistent. For tests."""
        self.rows.check_integrity()
        for part in self.parts:
            part.check_integrity()
