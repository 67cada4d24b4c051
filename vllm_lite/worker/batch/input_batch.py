"""The persistent batch: what a worker knows of its sequences between steps, one row of numpy arrays each.

A step is `apply` (the scheduler's diffs), perhaps `add_drafts`, `build` (the forward pass's inputs) and `commit` (what
was sampled). The tokens are the worker's own: the engine may send the next step before it knows what this one samples.
Rows are contiguous in [0, num_rows): when a sequence leaves, the last row moves to its row. Nothing here loops over
tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import PAD_SLOT
from vllm_lite.errors import ProtocolError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.batch import DecodeRows
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import (
    BlockIds,
    Continue,
    Draft,
    Entry,
    Finish,
    Fork,
    Handle,
    NewRequest,
    Preempt,
    ReplaceBlock,
    Resume,
    SetToken,
    States,
)
from vllm_lite.worker.batch.integrity import row_problems
from vllm_lite.worker.batch.row_states import RowStates
from vllm_lite.worker.batch.sequence import NO_ROW, SequenceState
from vllm_lite.worker.batch.steady import SteadyDecode
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs
from vllm_lite.worker.memory.cache_engine import NULL_BLOCK
from vllm_lite.worker.pooling import Computed, PooledPrompts
from vllm_lite.worker.sampling.drafter import DraftBatch
from vllm_lite.worker.sampling.logit_rules import RuleBook, read_rules
from vllm_lite.worker.sampling.logprobs import PromptScoring, score_step
from vllm_lite.worker.sampling.masks import MaskSourceOf, SequenceMask
from vllm_lite.worker.sampling.sampler import ROW_PARAMS, SampleInputs, named_tokens, row_params


class InputBatch:
    """Holds at most `max_num_seqs` sequences in rows, and any number of preempted ones, which have no row."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        windows: Sequence[int | None],  # per KV group, None = full attention
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.windows = tuple(windows)
        self.mask_source_of: MaskSourceOf | None = None
        """Makes the mask source of a new sequence, for those that follow a grammar."""
        # Drafts stand behind the tokens of a row. One column more than the context: a token sampled behind a full
        # context is stored, never computed.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.highest_block = 0
        """The highest id that a table ever held."""
        self.block_tables = [np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32) for _ in windows]
        self.table_lens = np.zeros((max_num_seqs, len(self.windows)), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_cached = np.zeros(max_num_seqs, np.int64)
        self.params = np.zeros(max_num_seqs, ROW_PARAMS)
        self.adapters = np.zeros(max_num_seqs, np.int64)  # their numbers
        self.states = RowStates(max_num_seqs)
        self._sequences: dict[Handle, SequenceState] = {}  # resident and preempted
        self._resident: list[SequenceState] = []  # by row
        self.rules = RuleBook(max_num_seqs, vocab_size, max_model_len + 1)
        self._scheduled: dict[Handle, int] = {}  # tokens in this step, drafts included, in the order of the entries
        self._max_drafts: dict[Handle, int] = {}  # how many drafts this step takes, of the sequences that may have any
        self._num_drafts: dict[Handle, int] = {}
        self.pooled = PooledPrompts()
        self._unsettled: dict[Handle, SequenceMask] = {}  # those whose grammar is being compiled, also preempted ones
        counts = self.num_tokens, self.num_computed, self.num_cached
        arrays = self.token_ids, counts, self.block_tables, self.table_lens, block_size
        self._steady = SteadyDecode(DecodeRows(*arrays) if cpu.available() and self.windows else None)

    @property
    def num_rows(self) -> int:
        return len(self._resident)

    @property
    def resident(self) -> Sequence[SequenceState]:
        """The sequences that have rows, by row."""
        return self._resident

    def tokens_of(self, handle: Handle, what: str = "tokens_of") -> Int32s:
        """Return the tokens of a sequence, resident or preempted: [num_tokens]. Raises ProtocolError, which names
        `what`, the caller, if it is unknown.
        """
        sequence = self._sequences.get(handle)
        if sequence is not None and sequence.preempted_tokens is not None:
            return sequence.preempted_tokens
        row = self._row(handle, what)
        return self.token_ids[row, : self.num_tokens[row]]

    # ---- apply: the scheduler's diffs

    def apply(self, entries: Sequence[Entry]) -> None:
        """Carry out one step's entries in order. Raises ProtocolError, naming the handle, for one that does not fit.

        After an error the batch must not be used any more: a worker whose state differs from the engine's ends.
        """
        self._scheduled, self._max_drafts, self._num_drafts = {}, {}, {}
        for entry in entries:
            match entry:
                case Continue():
                    row = self._row(entry.handle, "Continue")
                    if entry.new_block_ids:
                        self._append_blocks(row, entry.new_block_ids)
                    self._schedule(entry.handle, entry.num_tokens)
                    continue
                case Draft():
                    self._draft(entry)  # like Continue, unless something is drafted
                    continue
                case NewRequest():
                    self._add(entry)
                case Finish():
                    self._finish(entry.handle)
                case Preempt():
                    self._preempt(entry.handle)
                case Resume():
                    self._resume(entry)
                case Fork():
                    self._fork(entry)
                case ReplaceBlock():
                    self._replace_block(entry)
                case SetToken():
                    self._set_token(entry)
                case States():
                    self.states.set(self._row(entry.handle, "States"), entry)
            self._steady.invalidate()

    def _add(self, entry: NewRequest) -> None:
        tokens = np.frombuffer(entry.tokens, "<u4")
        if not 0 < len(tokens) <= self.max_model_len:
            raise ProtocolError(f"handle {entry.handle} has {len(tokens)} tokens, expected 1 to {self.max_model_len}")
        if tokens.max() >= self.vocab_size:
            raise ProtocolError(f"handle {entry.handle} has token {tokens.max()}, the vocabulary {self.vocab_size}")
        sequence = self._new_sequence(entry.handle, entry.sampling, entry.num_prompt_tokens, entry.adapter)
        sequence.pooling = self.pooled.add(entry.pooling, entry.num_prompt_tokens)
        if entry.sampling.prompt_logprobs is not None:
            sequence.prompt_scoring = PromptScoring(entry.num_prompt_tokens, entry.sampling.prompt_logprobs)
        self._start(sequence, tokens, entry)

    def _resume(self, entry: Resume) -> None:
        sequence = self._sequences.get(entry.handle)
        if sequence is None or sequence.preempted_tokens is None:
            raise ProtocolError(f"Resume of handle {entry.handle}, which is not preempted")
        tokens, sequence.preempted_tokens = sequence.preempted_tokens, None
        self._start(sequence, tokens, entry)

    def _start(self, sequence: SequenceState, tokens: NDArray[Any], entry: NewRequest | Resume) -> None:
        row = self._add_row(sequence, tokens)
        self.num_computed[row] = entry.num_computed
        self.num_cached[row] = entry.num_cached
        self._append_blocks(row, entry.block_ids)
        self._schedule(entry.handle, entry.num_tokens)

    def _draft(self, entry: Draft) -> None:
        row = self._row(entry.handle, "Draft")
        rules = self._resident[row].rules
        if self.num_computed[row] + 1 != self.num_tokens[row]:
            raise ProtocolError(f"Draft of handle {entry.handle}, which lacks more than its last token")
        if not 0 < entry.max_drafts <= self.max_model_len - self.num_tokens[row]:
            raise ProtocolError(
                f"Draft of {entry.max_drafts} tokens behind the {self.num_tokens[row]} of handle {entry.handle}"
            )
        self._append_blocks(row, entry.new_block_ids)
        self._schedule(entry.handle, 1)
        if rules is None or rules.weights is None:  # penalties are against what would be drafted
            self._max_drafts[entry.handle] = entry.max_drafts

    def _fork(self, entry: Fork) -> None:
        """The child reads the parent's blocks; ReplaceBlock says which of the two gets a copy of a shared block."""
        parent = self._row(entry.parent, "Fork")
        known = int(self.num_tokens[parent])
        if not 0 <= entry.num_computed < entry.num_tokens <= known:
            raise ProtocolError(
                f"Fork of handle {entry.parent} at {entry.num_computed} of {entry.num_tokens} tokens, it has {known}"
            )
        num_prompt = min(self._resident[parent].num_prompt, entry.num_tokens)
        sequence = self._new_sequence(entry.child, entry.sampling, num_prompt, self._resident[parent].adapter)
        child = self._add_row(sequence, self.token_ids[parent, : entry.num_tokens])
        self.num_computed[child], self.num_cached[child] = entry.num_computed, entry.num_cached
        num_blocks = -(-entry.num_tokens // self.block_size)
        for table in self.block_tables:
            table[child, :num_blocks] = table[parent, :num_blocks]
        self.table_lens[child] = np.minimum(self.table_lens[parent], num_blocks)

    def _replace_block(self, entry: ReplaceBlock) -> None:
        row = self._row(entry.handle, "ReplaceBlock")
        if not (0 <= entry.group < len(self.windows) and 0 <= entry.index < self.table_lens[row, entry.group]):
            raise ProtocolError(
                f"ReplaceBlock of entry {entry.index} of group {entry.group} of handle {entry.handle}, "
                f"whose tables hold {self.table_lens[row].tolist()}"
            )
        self._check_blocks(entry.handle, [entry.block_id])
        self.block_tables[entry.group][row, entry.index] = entry.block_id

    def _set_token(self, entry: SetToken) -> None:
        if not 0 <= entry.token_id < self.vocab_size:
            raise ProtocolError(f"SetToken {entry.token_id} of handle {entry.handle}, the vocabulary {self.vocab_size}")
        self.tokens_of(entry.handle, "SetToken")[-1] = entry.token_id

    def _preempt(self, handle: Handle) -> None:
        row = self._row(handle, "Preempt")
        self._resident[row].preempted_tokens = self.tokens_of(handle).copy()
        self._remove_row(row)

    def _finish(self, handle: Handle) -> None:
        sequence = self._sequences.get(handle)
        if sequence is None or sequence.preempted_tokens is None:
            self._remove_row(self._row(handle, "Finish"))
        self.pooled.leave(self._sequences.pop(handle).pooling)
        self._unsettled.pop(handle, None)

    def _row(self, handle: Handle, what: str) -> int:
        sequence = self._sequences.get(handle)
        if sequence is not None and (row := sequence.row) != NO_ROW:
            return row
        raise ProtocolError(f"{what} of handle {handle}, which is {'preempted' if sequence else 'unknown'}")

    def _new_sequence(self, handle: Handle, sampling: Sampling, num_prompt: int, adapter: int) -> SequenceState:
        if handle in self._sequences:
            raise ProtocolError(f"handle {handle} is in use already")
        rules = read_rules(sampling, num_prompt, self.vocab_size, self.mask_source_of)
        self._sequences[handle] = sequence = SequenceState(handle, sampling, num_prompt, rules, adapter)
        if rules is not None and rules.mask is not None and rules.mask.coming is not None:
            self._unsettled[handle] = rules.mask
        return sequence

    def _add_row(self, sequence: SequenceState, tokens: NDArray[Any]) -> int:
        row = sequence.row = len(self._resident)
        if row == self.max_num_seqs:
            raise ProtocolError(f"no row for handle {sequence.handle}: all {row} (max_num_seqs) are taken")
        self._resident.append(sequence)
        self._set_tokens(row, tokens)
        self.table_lens[row], self.adapters[row] = 0, sequence.adapter
        self.params[row] = row_params(sequence.sampling, self.rules.add(sequence.rules, tokens))
        return row

    def _remove_row(self, row: int) -> None:
        sequence = self._resident[row]
        if sequence.handle in self._scheduled:
            raise ProtocolError(f"handle {sequence.handle} is scheduled and removed in one step")
        self.rules.remove(int(self.params["rules"][row]))
        sequence.row = NO_ROW
        self.states.move(len(self._resident) - 1, row)
        moved = self._resident.pop()
        last = len(self._resident)
        if row == last:
            return
        self._resident[row] = moved
        moved.row = row
        self._set_tokens(row, self.token_ids[last, : self.num_tokens[last]])
        for table, length in zip(self.block_tables, self.table_lens[last], strict=True):
            table[row, :length] = table[last, :length]
        for array in (self.table_lens, self.num_computed, self.num_cached, self.params, self.adapters):
            array[row] = array[last]

    def _set_tokens(self, row: int, tokens: NDArray[Any]) -> None:
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)

    def _append_blocks(self, row: int, block_ids: BlockIds) -> None:
        if not block_ids:
            return
        handle, num_groups = self._resident[row].handle, len(self.block_tables)
        if len(block_ids) != num_groups:
            raise ProtocolError(f"handle {handle} got blocks for {len(block_ids)} KV groups of {num_groups}")
        for group, ids in enumerate(block_ids):
            if not ids:
                continue
            table, start = self.block_tables[group], int(self.table_lens[row, group])
            end = start + len(ids)
            if end > table.shape[1]:
                raise ProtocolError(f"handle {handle} got {end} blocks, at most {table.shape[1]} are needed")
            self._check_blocks(handle, ids)
            table[row, start:end] = ids
            self.table_lens[row, group] = end

    def _check_blocks(self, handle: Handle, ids: list[int]) -> None:
        highest = max(ids)
        if min(ids) < 0 or highest >= self.num_blocks:
            raise ProtocolError(f"handle {handle} got blocks {ids}, the pool is [0, {self.num_blocks})")
        self.highest_block = max(self.highest_block, highest)

    def _schedule(self, handle: Handle, num_tokens: int) -> None:
        if handle in self._scheduled:
            raise ProtocolError(f"handle {handle} is scheduled twice in one step")
        self._scheduled[handle] = num_tokens

    # ---- build: the forward pass's inputs

    def draft_batch(self) -> DraftBatch | None:
        """Return the sequences that take drafts in this step; None if there are none."""
        handles = list(self._max_drafts)
        if not handles:
            return None
        tokens, rules = [], []
        for handle in handles:
            tokens.append(self.tokens_of(handle))
            rules.append(self._sequences[handle].rules)
        masks = [None if each is None else each.mask for each in rules]
        return DraftBatch(handles, tokens, list(self._max_drafts.values()), masks)

    def add_drafts(self, drafts: Sequence[Int32s]) -> None:
        """Compute the drafts of each sequence of `draft_batch` behind its last token, to see if it samples them."""
        for handle, tokens in zip(self._max_drafts, drafts, strict=True):
            row, count = self._sequences[handle].row, len(tokens)
            if not count:
                continue  # the step may be a steady one
            first = int(self.num_tokens[row])
            self.token_ids[row, first : first + count] = tokens
            self._scheduled[handle] += count
            self._num_drafts[handle] = count

    def build(self) -> StepInputs:
        """Make the inputs of what `apply` scheduled. Raises ProtocolError if a sequence lacks tokens or blocks."""
        if not self._unsettled and (steady := self._steady.prepare(self._scheduled)) is not None:
            return steady
        handles = list(self._scheduled)
        sequences = [self._sequences[handle] for handle in handles]
        rows = np.array([sequence.row for sequence in sequences], np.int64)
        counts = np.array(list(self._scheduled.values()), np.int64)
        starts, num_tokens = self.num_computed[rows], self.num_tokens[rows]
        ends = starts + counts
        num_drafts = self._drafts_of(handles)
        if num_drafts is not None:
            num_tokens += num_drafts
        table_lens = self.table_lens[rows]  # [num_seqs, num_groups]
        self._check_ranges(handles, ends, num_tokens, table_lens)
        (sampling,) = (ends == num_tokens).nonzero()

        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=query_start_loc[1:])
        token_rows, positions = rows, starts
        if query_start_loc[-1] > len(rows):  # not one token each, as in decoding
            token_rows = rows.repeat(counts)
            positions = np.arange(query_start_loc[-1]) + (starts - query_start_loc[:-1]).repeat(counts)
        written = positions >= self.num_cached[token_rows]
        pooling, sampling = self.pooled.step(sequences, Computed(starts, ends, query_start_loc), sampling)
        scorings = [(index, s.handle, s.prompt_scoring) for index, s in enumerate(sequences) if s.prompt_scoring]
        return StepInputs(
            handles=handles,
            rows=rows,
            num_scheduled=counts,
            input_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slot_mapping=tuple(self._slots(table, token_rows, positions, written) for table in self.block_tables),
            block_tables=self._tables_of(rows, table_lens),
            query_start_loc=query_start_loc,
            seq_lens=ends.astype(np.int32),
            sampling=sampling,
            num_samples=np.ones(len(sampling), np.int64) if num_drafts is None else 1 + num_drafts[sampling],
            adapters=self.adapters[rows],
            drafted=num_drafts is not None,
            states=self.states.build(rows, starts, ends, query_start_loc, num_drafts),
            scoring=score_step(scorings, rows, (starts, ends), query_start_loc, self.token_ids) if scorings else None,
            pooling=pooling,
        )

    def _drafts_of(self, handles: list[Handle]) -> Int64s | None:  # [num_seqs]
        """Count each sequence's drafts; None, which spares much, if nothing was drafted."""
        if not any(self._num_drafts.values()):
            return None
        return np.array([self._num_drafts.get(handle, 0) for handle in handles], np.int64)

    def _check_ranges(self, handles: list[Handle], ends: Int64s, num_tokens: Int64s, table_lens: Int32s) -> None:
        room = np.minimum.reduce(table_lens, axis=1, initial=self.max_model_len) * self.block_size
        excess = ends > np.minimum(num_tokens, room)
        if excess.any() or min(self._scheduled.values(), default=1) < 1:
            counts = list(self._scheduled.values())
            i = next(i for i, exceeds in enumerate(excess) if exceeds or counts[i] < 1)
            raise ProtocolError(
                f"handle {handles[i]} cannot compute {counts[i]} tokens up to {ends[i]}: "
                f"it has {num_tokens[i]} tokens, and blocks for {room[i]}"
            )

    def _slots(self, table: Int32s, rows: Int64s, positions: Int64s, written: NDArray[np.bool_]) -> Int64s:
        """Compute each token's slot: block id * block size + offset, PAD_SLOT where nothing is written. [num_tokens]"""
        block_index, offsets = np.divmod(positions, self.block_size)
        blocks = table[rows, block_index]
        lost = written & (blocks == NULL_BLOCK)
        if lost.any():
            raise ProtocolError(f"handle {self._resident[rows[lost.argmax()]].handle} would write to the null block")
        return np.where(written, blocks * np.int64(self.block_size) + offsets, PAD_SLOT)

    def _tables_of(self, rows: Int64s, table_lens: Int32s) -> tuple[Int32s, ...]:
        widths = np.maximum.reduce(table_lens, axis=0, initial=0).tolist()
        return tuple(table[rows, :width] for table, width in zip(self.block_tables, widths, strict=True))

    def unsettled(self, inputs: StepInputs) -> dict[Handle, SequenceMask]:
        """Return the masks of sequences that are caught up in this step, and whose grammar is not known to be there."""
        if not self._unsettled:
            return {}
        caught_up = (inputs.handles[index] for index in inputs.sampling.tolist())
        return {handle: self._unsettled[handle] for handle in caught_up if handle in self._unsettled}

    def settled(self, handle: Handle) -> None:
        """The grammar of a sequence is there from now on, on all ranks."""
        del self._unsettled[handle]

    def explain(self, handle: Handle) -> str | None:
        """Say why a sequence that follows a grammar has no token left to sample; None if it follows none."""
        mask = None if (rules := self._sequences[handle].rules) is None else rules.mask
        return None if mask is None else mask.explain()

    def sample_inputs(self, inputs: StepInputs) -> SampleInputs:
        """Make what the sampler needs for the sequences that are caught up in this step. Call it before `commit`, and
        before the forward pass if possible: masks are filled from here on."""
        if inputs.samples is not None:
            return inputs.samples
        rows = inputs.rows[inputs.sampling]
        rows = rows.repeat(inputs.num_samples) if inputs.drafted else rows
        params, positions = self.params[rows], self.num_tokens[rows]
        if inputs.drafted:
            positions += inputs.num_drafts_before
        edits = self.rules.edits(params["rules"], positions, rows, self.token_ids)
        samples = SampleInputs(params, positions, edits, named=named_tokens(params, rows, self._resident))
        if not inputs.is_steady:
            self._steady.learn(inputs, samples)
        return samples

    # ---- commit: what came out

    def commit(self, inputs: StepInputs, sampled: Int64s, num_kept: Int64s | None = None) -> None:
        """Take over what the step sampled.

        Of `sampled` [num_samples] the first `num_kept` [num_sampling] of each sequence (all, if nothing was drafted)
        are its tokens; drafts before the last of these have proved right, so they are computed. A sequence of which
        none is kept has its last position computed again in a later step, and not written again.
        """
        if self.rules.counts_tokens:  # nothing was drafted for those whose tokens count
            at, starts = inputs.sampling, inputs.sample_starts
            if num_kept is not None:
                at, starts = at[num_kept > 0], starts[num_kept > 0]
            self.rules.count(self.params["rules"][inputs.rows[at]], sampled[starts])
        if inputs.is_steady:
            self._steady.commit(inputs, sampled)
            return
        for looked_at in (inputs.scoring, inputs.pooling):
            if looked_at is not None:
                looked_at.commit()
        self.states.commit(inputs.rows, inputs.states)
        rows, num_samples = inputs.rows[inputs.sampling], inputs.num_samples
        self.num_computed[inputs.rows] += inputs.num_scheduled
        if not inputs.drafted and (num_kept is None or num_kept.all()):
            ends = self.num_tokens[rows]
            self.token_ids[rows, ends] = sampled
            self.num_tokens[rows] = ends + 1
            return
        num_kept = num_samples if num_kept is None else num_kept
        self.num_computed[rows] -= num_samples - num_kept
        again = rows[num_kept == 0]
        self.num_cached[again] = np.maximum(self.num_cached[again], self.num_computed[again] + 1)
        kept = inputs.num_drafts_before < np.repeat(num_kept, num_samples)
        sample_rows = np.repeat(rows, num_kept)
        self.token_ids[sample_rows, self.num_tokens[sample_rows] + inputs.num_drafts_before[kept]] = sampled[kept]
        self.num_tokens[rows] += num_kept

    def check_integrity(self) -> None:
        """Raise RuntimeError if the bookkeeping contradicts itself. For tests, and for when the worker is idle."""
        num_preempted = sum(sequence.row == NO_ROW for sequence in self._sequences.values())
        if len(self._resident) + num_preempted != len(self._sequences):
            raise RuntimeError(f"{self._resident} have rows, {num_preempted} of {self._sequences} have none")
        entries = self.params["rules"][: len(self._resident)].tolist()
        if sorted(filter(None, entries)) != sorted(self.rules.entries):
            raise RuntimeError(f"rules in use: {self.rules.entries}, {entries}")
        for row, sequence in enumerate(self._resident):
            for problem in row_problems(self, row, sequence):
                raise RuntimeError(f"handle {sequence.handle} in row {row}: {problem}")
