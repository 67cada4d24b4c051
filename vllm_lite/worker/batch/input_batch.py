"""The persistent batch: what a worker remembers of its sequences between steps, one row of numpy arrays each.

A step is `apply` (the scheduler's diffs), perhaps `draft`, `build` (the forward pass's inputs) and `commit` (what was
sampled). The tokens are the worker's own: the engine may send the next step before it knows what this one gives. Rows
are contiguous in [0, num_rows): the last row moves into the place of one that leaves. Nothing here loops over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import PAD_SLOT
from vllm_lite.errors import ProtocolError
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
)
from vllm_lite.worker.batch.integrity import row_problems
from vllm_lite.worker.batch.steady import steady_decode
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs
from vllm_lite.worker.memory.cache_engine import NULL_BLOCK
from vllm_lite.worker.sampling.logit_rules import RuleBook
from vllm_lite.worker.sampling.prompt_scores import PromptScores, Scoring
from vllm_lite.worker.sampling.sampler import ROW_PARAMS, SampleInputs, row_params


@dataclass(frozen=True, slots=True)
class _Parked:
    """A preempted sequence: no row, no blocks."""

    tokens: Int32s  # [num_tokens]
    params: np.void  # ROW_PARAMS
    ruled: Sampling | None  # of one with rules


class InputBatch:
    """Rows for at most `max_num_seqs` resident sequences; preempted ones are parked aside without limit."""

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
        table_width = -(-max_model_len // block_size)
        # Behind the tokens of a row stand drafts. One column more than the context: a token sampled behind a full
        # context is stored, never computed.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_tables = [np.zeros((max_num_seqs, table_width), np.int32) for _ in windows]
        self.table_lens = np.zeros((max_num_seqs, len(self.windows)), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_cached = np.zeros(max_num_seqs, np.int64)
        self.params = np.zeros(max_num_seqs, ROW_PARAMS)
        self._handles: list[Handle] = []  # row -> handle
        self._rows: dict[Handle, int] = {}
        self._parked: dict[Handle, _Parked] = {}
        self.rules = RuleBook(max_num_seqs, vocab_size, max_model_len + 1)
        self.scores = PromptScores()
        self._scheduled: dict[Handle, int] = {}  # tokens in this step, in the order of the entries
        self._num_drafts: dict[Handle, int] = {}  # of those tokens
        self.max_drafts: dict[Handle, int] = {}
        """Sequences for which this step would take drafts, and how many."""
        counts = self.num_tokens, self.num_computed, self.num_cached
        self._steady = steady_decode(self.token_ids, counts, self.block_tables, self.table_lens, block_size)

    @property
    def num_rows(self) -> int:
        return len(self._handles)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def tokens_of(self, handle: Handle, what: str = "tokens_of") -> Int32s:
        """The tokens known of a sequence, resident or parked: [num_tokens]. Raises ProtocolError if there is none."""
        if handle in self._parked:
            return self._parked[handle].tokens
        row = self._row(handle, what)
        return self.token_ids[row, : self.num_tokens[row]]

    # ---- apply: the scheduler's diffs

    def apply(self, entries: Sequence[Entry]) -> None:
        """Carry out one step's entries in order. Raises ProtocolError, naming the handle, for one that does not fit.

        After an error the batch is not to be used any more: a worker whose state differs from the engine's ends.
        """
        self._scheduled, self._num_drafts, self.max_drafts = {}, {}, {}
        for entry in entries:
            match entry:
                case Continue():
                    row = self._row(entry.handle, "Continue")
                    self._append_blocks(row, entry.new_block_ids)
                    self._schedule(entry.handle, entry.num_tokens)
                    continue
                case NewRequest():
                    self._add(entry)
                case Finish():
                    self._finish(entry.handle)
                case Preempt():
                    self._preempt(entry.handle)
                case Resume():
                    self._resume(entry)
                case Draft():
                    self._draft(entry)
                case Fork():
                    self._fork(entry)
                case ReplaceBlock():
                    self._replace_block(entry)
                case SetToken():
                    self._set_token(entry)
            self._steady.forget()

    def _add(self, entry: NewRequest) -> None:
        tokens = np.frombuffer(entry.tokens, "<u4")
        if not 0 < len(tokens) <= self.max_model_len:
            raise ProtocolError(f"handle {entry.handle} has {len(tokens)} tokens, expected 1 to {self.max_model_len}")
        if tokens.max() >= self.vocab_size:
            raise ProtocolError(f"handle {entry.handle} has token {tokens.max()}, the vocabulary {self.vocab_size}")
        row = self._new_row(entry.handle)
        self._set_tokens(row, tokens)
        self._set_sampling(row, entry.sampling, entry.num_prompt_tokens)
        if entry.sampling.prompt_logprobs is not None:
            self.scores.begin(entry.handle, entry.num_prompt_tokens, entry.sampling.prompt_logprobs)
        self._place(row, entry)

    def _set_sampling(self, row: int, sampling: Sampling, num_prompt: int) -> None:
        slot = self.rules.add(sampling, self.token_ids[row, : self.num_tokens[row]], num_prompt)
        self.params[row] = row_params(sampling, num_prompt, slot)

    def _resume(self, entry: Resume) -> None:
        parked = self._parked.pop(entry.handle, None)
        if parked is None:
            raise ProtocolError(f"Resume of handle {entry.handle}, which is not preempted")
        row = self._new_row(entry.handle)
        self._set_tokens(row, parked.tokens)
        self.params[row] = parked.params
        if parked.ruled is not None:
            num_prompt = int(parked.params["num_prompt"])
            self.params["rules"][row] = self.rules.add(parked.ruled, parked.tokens, num_prompt)
        self._place(row, entry)

    def _place(self, row: int, entry: NewRequest | Resume) -> None:
        self.num_computed[row] = entry.num_computed
        self.num_cached[row] = entry.num_cached
        self._append_blocks(row, entry.block_ids)
        self._schedule(entry.handle, entry.num_tokens)

    def _draft(self, entry: Draft) -> None:
        row = self._row(entry.handle, "Draft")
        if self.num_computed[row] + 1 != self.num_tokens[row]:
            raise ProtocolError(f"Draft of handle {entry.handle}, which lacks more than its last token")
        if not 0 < entry.max_drafts <= self.max_model_len - self.num_tokens[row]:
            raise ProtocolError(
                f"Draft of {entry.max_drafts} tokens behind the {self.num_tokens[row]} of handle {entry.handle}"
            )
        self._append_blocks(row, entry.new_block_ids)
        self._schedule(entry.handle, 1)
        if not self.rules.penalises(self.params["rules"][row]):  # penalties are against what would be drafted
            self.max_drafts[entry.handle] = entry.max_drafts

    def _fork(self, entry: Fork) -> None:
        """The child reads the parent's blocks; ReplaceBlock tells which of the two gets a copy of a shared one."""
        parent = self._row(entry.parent, "Fork")
        known = int(self.num_tokens[parent])
        if not 0 <= entry.num_computed < entry.num_tokens <= known:
            raise ProtocolError(
                f"Fork of handle {entry.parent} at {entry.num_computed} of {entry.num_tokens} tokens, it has {known}"
            )
        child = self._new_row(entry.child)
        self._set_tokens(child, self.token_ids[parent, : entry.num_tokens])
        num_prompt = min(int(self.params["num_prompt"][parent]), entry.num_tokens)
        self._set_sampling(child, entry.sampling, num_prompt)
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
        ruled = self.rules.remove(int(self.params["rules"][row]))
        self._parked[handle] = _Parked(self.tokens_of(handle).copy(), self.params[row].copy(), ruled)
        self._remove_row(row)

    def _finish(self, handle: Handle) -> None:
        if self._parked.pop(handle, None) is None:
            row = self._row(handle, "Finish")
            self.rules.remove(int(self.params["rules"][row]))
            self._remove_row(row)
        self.scores.end(handle)

    def _row(self, handle: Handle, what: str) -> int:
        row = self._rows.get(handle)
        if row is None:
            state = "preempted" if handle in self._parked else "unknown"
            raise ProtocolError(f"{what} of handle {handle}, which is {state}")
        return row

    def _new_row(self, handle: Handle) -> int:
        if handle in self._rows or handle in self._parked:
            raise ProtocolError(f"handle {handle} is in use already")
        row = len(self._handles)
        if row == self.max_num_seqs:
            raise ProtocolError(f"no row for handle {handle}: all {self.max_num_seqs} (max_num_seqs) are taken")
        self._handles.append(handle)
        self._rows[handle] = row
        self.table_lens[row] = 0
        return row

    def _remove_row(self, row: int) -> None:
        handle = self._handles[row]
        if handle in self._scheduled:
            raise ProtocolError(f"handle {handle} is scheduled and removed in one step")
        del self._rows[handle]
        last_handle = self._handles.pop()
        last = len(self._handles)
        if row == last:
            return
        self._handles[row] = last_handle
        self._rows[last_handle] = row
        self._set_tokens(row, self.token_ids[last, : self.num_tokens[last]])
        for table, length in zip(self.block_tables, self.table_lens[last], strict=True):
            table[row, :length] = table[last, :length]
        for array in (self.table_lens, self.num_computed, self.num_cached, self.params):
            array[row] = array[last]

    def _set_tokens(self, row: int, tokens: NDArray[Any]) -> None:
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)

    def _append_blocks(self, row: int, block_ids: BlockIds) -> None:
        if not block_ids:
            return
        if len(block_ids) != len(self.block_tables):
            raise ProtocolError(
                f"handle {self._handles[row]} got blocks for {len(block_ids)} KV groups of {len(self.block_tables)}"
            )
        for group, ids in enumerate(block_ids):
            if not ids:
                continue
            table, start = self.block_tables[group], int(self.table_lens[row, group])
            end = start + len(ids)
            if end > table.shape[1]:
                raise ProtocolError(
                    f"handle {self._handles[row]} got {end} blocks, at most {table.shape[1]} are needed"
                )
            self._check_blocks(self._handles[row], ids)
            table[row, start:end] = ids
            self.table_lens[row, group] = end

    def _check_blocks(self, handle: Handle, ids: list[int]) -> None:
        if min(ids) < 0 or max(ids) >= self.num_blocks:
            raise ProtocolError(f"handle {handle} got blocks {ids}, the pool is [0, {self.num_blocks})")

    def _schedule(self, handle: Handle, num_tokens: int) -> None:
        if handle in self._scheduled:
            raise ProtocolError(f"handle {handle} is scheduled twice in one step")
        self._scheduled[handle] = num_tokens

    # ---- build: the forward pass's inputs

    def draft(self, handle: Handle, tokens: Int32s) -> None:
        """Compute `tokens` behind the last token of a sequence in `max_drafts`, at most that many, to see if they are
        what it samples."""
        row, count = self._rows[handle], len(tokens)
        first = int(self.num_tokens[row])
        self.token_ids[row, first : first + count] = tokens
        self._scheduled[handle] += count
        self._num_drafts[handle] = count

    def build(self) -> StepInputs:
        """The inputs of what `apply` scheduled. Raises ProtocolError if a sequence has not the tokens or the blocks."""
        handles = list(self._scheduled)
        if (steady := self._steady.prepare(self._scheduled)) is not None:
            return steady
        rows = np.array([self._rows[handle] for handle in handles], np.int64)
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
            drafted=num_drafts is not None,
            scoring=self._scoring(handles, rows, (starts, ends), query_start_loc),
        )

    def _scoring(
        self, handles: list[Handle], rows: Int64s, ranges: tuple[Int64s, Int64s], query_start_loc: Int32s
    ) -> Scoring | None:
        return self.scores.of_step(handles, rows, ranges, query_start_loc, self.token_ids) if self.scores else None

    def _drafts_of(self, handles: list[Handle]) -> Int64s | None:  # [num_seqs]
        """How many tokens of each are drafts; None, which spares much, if nothing was drafted."""
        if not any(self._num_drafts.values()):
            return None
        return np.array([self._num_drafts.get(handle, 0) for handle in handles], np.int64)

    def _check_ranges(self, handles: list[Handle], ends: Int64s, num_tokens: Int64s, table_lens: Int32s) -> None:
        room = np.minimum.reduce(table_lens, axis=1) * self.block_size
        excess = ends > np.minimum(num_tokens, room)
        if excess.any() or min(self._scheduled.values(), default=1) < 1:
            counts = list(self._scheduled.values())
            i = next(i for i, exceeds in enumerate(excess) if exceeds or counts[i] < 1)
            raise ProtocolError(
                f"handle {handles[i]} cannot compute {counts[i]} tokens up to {ends[i]}: "
                f"it has {num_tokens[i]} tokens, and blocks for {room[i]}"
            )

    def _slots(self, table: Int32s, rows: Int64s, positions: Int64s, written: NDArray[np.bool_]) -> Int64s:
        """Slot of each token: block id * block size + offset, PAD_SLOT where nothing is written. [num_tokens]"""
        block_index, offsets = np.divmod(positions, self.block_size)
        blocks = table[rows, block_index]
        lost = written & (blocks == NULL_BLOCK)
        if lost.any():
            raise ProtocolError(f"handle {self._handles[rows[lost.argmax()]]} would write to the null block")
        return np.where(written, blocks * np.int64(self.block_size) + offsets, PAD_SLOT)

    def _tables_of(self, rows: Int64s, table_lens: Int32s) -> tuple[Int32s, ...]:
        widths = np.maximum.reduce(table_lens, axis=0, initial=0).tolist()
        return tuple(table[rows, :width] for table, width in zip(self.block_tables, widths, strict=True))

    def sample_inputs(self, inputs: StepInputs) -> SampleInputs:
        """What the sampler needs for the sequences that are caught up in this step. Ask before `commit`."""
        if inputs is self._steady.inputs and self._steady.sampling is not None:
            return self._steady.sampling
        rows = inputs.rows[inputs.sampling]
        if inputs.drafted:
            rows = rows.repeat(inputs.num_samples)
        params = self.params[rows]
        positions = self.num_tokens[rows]
        if inputs.drafted:
            positions += inputs.sample_places
        slots = params["rules"]
        banned, edits = self.rules.of_step(slots, positions, rows, self.token_ids) if slots.any() else (None, None)
        sampling = SampleInputs(params, positions, banned, edits)
        self._steady.remember(inputs, sampling)
        return sampling

    # ---- commit: what came out

    def commit(self, inputs: StepInputs, sampled: Int64s, num_kept: Int64s | None = None) -> None:
        """The step has run. Of `sampled` [num_samples] the first `num_kept` [num_sampling] of each sequence (all, if
        nothing was drafted) are its tokens; drafts before the last of these have proved right, so they are computed.
        """
        if self.rules.counts_tokens:  # nothing was drafted for those whose tokens count
            slots = self.params["rules"][inputs.rows[inputs.sampling]]
            self.rules.count(slots, sampled[inputs.sample_starts])
        if inputs is self._steady.inputs:
            self._steady.commit(sampled)
            return
        if inputs.scoring is not None:
            self.scores.commit(inputs.scoring)
        rows, num_samples = inputs.rows[inputs.sampling], inputs.num_samples
        self.num_computed[inputs.rows] += inputs.num_scheduled
        if not inputs.drafted:
            ends = self.num_tokens[rows]
            self.token_ids[rows, ends] = sampled
            self.num_tokens[rows] = ends + 1
            return
        num_kept = num_samples if num_kept is None else num_kept
        self.num_computed[rows] -= num_samples - num_kept
        kept = inputs.sample_places < np.repeat(num_kept, num_samples)
        sample_rows = np.repeat(rows, num_kept)
        self.token_ids[sample_rows, self.num_tokens[sample_rows] + inputs.sample_places[kept]] = sampled[kept]
        self.num_tokens[rows] += num_kept

    def check_integrity(self) -> None:
        """Raise RuntimeError if the bookkeeping contradicts itself. For tests, and for when the worker is idle."""
        rows = {handle: row for row, handle in enumerate(self._handles)}
        _require(rows == self._rows, f"handles {self._handles} are not where the map says: {self._rows}")
        _require(len(rows) <= self.max_num_seqs, f"{len(rows)} rows, at most {self.max_num_seqs}")
        _require(
            not rows.keys() & self._parked.keys(), f"both resident and parked: {rows.keys() & self._parked.keys()}"
        )
        slots = self.params["rules"][: len(rows)].tolist()
        _require(sorted(filter(None, slots)) == sorted(self.rules.slots), f"rules in use: {self.rules.slots}, {slots}")
        for handle, row in rows.items():
            for problem in row_problems(self, row):
                raise RuntimeError(f"handle {handle} in row {row}: {problem}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)
