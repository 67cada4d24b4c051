"""The persistent batch: what a worker remembers of its sequences between steps, one row of numpy arrays each.

A step is `apply` (the scheduler's diffs), `build` (the forward pass's inputs) and `commit` (what was sampled). Rows are
contiguous in [0, num_rows): the last row moves into the place of one that leaves. Nothing here loops over tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lite.attention.metadata import PAD_SLOT
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.step import (
    BlockIds,
    Continue,
    Entry,
    Finish,
    Fork,
    Handle,
    NewRequest,
    Preempt,
    Resume,
    Sampling,
)
from vllm_lite.worker.cache_engine import NULL_BLOCK
from vllm_lite.worker.sampler import NO_LOGPROBS, ROW_PARAMS, SampleInputs

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's inputs, sequences in the order of their entries, tokens of one sequence side by side."""

    handles: list[Handle]
    rows: Int64s  # [num_seqs], rows of the batch
    num_scheduled: Int64s  # [num_seqs], tokens of each in this step
    input_ids: Int64s  # [num_tokens]
    positions: Int64s  # [num_tokens]
    slot_mapping: tuple[Int64s, ...]  # per KV group: [num_tokens]
    block_tables: tuple[Int32s, ...]  # per KV group: [num_seqs, max_blocks of these]
    query_start_loc: Int32s  # [num_seqs + 1]
    seq_lens: Int32s  # [num_seqs]
    sampling: Int64s  # [num_samples], which of the step's sequences are caught up and sample

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def last_tokens(self) -> Int64s:  # [num_samples]
        """Where in the step's tokens the sampling sequences have their last one, whose logits are wanted."""
        return self.query_start_loc[1:][self.sampling].astype(np.int64) - 1


@dataclass(frozen=True, slots=True)
class _Parked:
    """A preempted sequence: no row, no blocks."""

    tokens: Int32s  # [num_tokens]
    params: np.void  # ROW_PARAMS


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
        num_groups: int,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.num_blocks = num_blocks
        table_width = -(-max_model_len // block_size)
        # One column more than the context: a token sampled behind a full context is stored, never computed.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_tables = [np.zeros((max_num_seqs, table_width), np.int32) for _ in range(num_groups)]
        self.table_lens = np.zeros((max_num_seqs, num_groups), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_cached = np.zeros(max_num_seqs, np.int64)
        self.params = np.zeros(max_num_seqs, ROW_PARAMS)
        self._handles: list[Handle] = []  # row -> handle
        self._rows: dict[Handle, int] = {}
        self._parked: dict[Handle, _Parked] = {}
        self._stop_ids: dict[Handle, Int64s] = {}  # of sequences with a min_tokens rule
        self._scheduled: dict[Handle, int] = {}  # tokens in this step, in the order of the entries

    @property
    def num_rows(self) -> int:
        return len(self._handles)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def tokens_of(self, handle: Handle) -> Int32s:
        """The tokens known of a sequence, resident or parked: [num_tokens]. Raises ProtocolError if there is none."""
        if handle in self._parked:
            return self._parked[handle].tokens
        row = self._row(handle, "tokens_of")
        return self.token_ids[row, : self.num_tokens[row]]

    # ---- apply: the scheduler's diffs

    def apply(self, entries: Sequence[Entry]) -> None:
        """Carry out one step's entries in order. Raises ProtocolError, naming the handle, for one that does not fit.

        After an error the batch is not to be used any more: a worker whose state differs from the engine's ends.
        """
        self._scheduled = {}
        for entry in entries:
            match entry:
                case Continue():
                    self._append_blocks(self._row(entry.handle, "Continue"), entry.new_block_ids)
                    self._schedule(entry.handle, entry.num_tokens)
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

    def _add(self, entry: NewRequest) -> None:
        tokens = np.frombuffer(entry.tokens, "<u4")
        if not 0 < len(tokens) <= self.max_model_len:
            raise ProtocolError(f"handle {entry.handle} has {len(tokens)} tokens, expected 1 to {self.max_model_len}")
        if tokens.max() >= self.vocab_size:
            raise ProtocolError(f"handle {entry.handle} has token {tokens.max()}, the vocabulary {self.vocab_size}")
        row = self._new_row(entry.handle)
        self._set_tokens(row, tokens)
        self.params[row] = _row_params(entry.sampling)
        if entry.sampling.min_tokens_until:
            stop_ids = np.array(entry.sampling.stop_ids, np.int64)
            self._stop_ids[entry.handle] = stop_ids[stop_ids < self.vocab_size]
        self._place(row, entry)

    def _resume(self, entry: Resume) -> None:
        parked = self._parked.pop(entry.handle, None)
        if parked is None:
            raise ProtocolError(f"Resume of handle {entry.handle}, which is not preempted")
        row = self._new_row(entry.handle)
        self._set_tokens(row, parked.tokens)
        self.params[row] = parked.params
        self._place(row, entry)

    def _place(self, row: int, entry: NewRequest | Resume) -> None:
        self.num_computed[row] = entry.num_computed
        self.num_cached[row] = entry.num_cached
        self._append_blocks(row, entry.block_ids)
        self._schedule(entry.handle, entry.num_tokens)

    def _fork(self, entry: Fork) -> None:
        """Without block ids of its own the child reads the parent's blocks."""
        parent = self._row(entry.parent, "Fork")
        child = self._new_row(entry.child)
        self._set_tokens(child, self.tokens_of(entry.parent))
        self.num_computed[child] = self.num_computed[parent]
        self.num_cached[child] = self.num_cached[parent]
        self.params[child] = self.params[parent]
        self.params["child"][child] = entry.child_index
        if entry.parent in self._stop_ids:
            self._stop_ids[entry.child] = self._stop_ids[entry.parent]
        inherited = [
            table[parent, :n].tolist() for table, n in zip(self.block_tables, self.table_lens[parent], strict=True)
        ]
        self._append_blocks(child, entry.block_ids or inherited)

    def _preempt(self, handle: Handle) -> None:
        row = self._row(handle, "Preempt")
        self._parked[handle] = _Parked(self.tokens_of(handle).copy(), self.params[row].copy())
        self._remove_row(row)

    def _finish(self, handle: Handle) -> None:
        if self._parked.pop(handle, None) is None:
            self._remove_row(self._row(handle, "Finish"))
        self._stop_ids.pop(handle, None)

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
            if min(ids) < 0 or max(ids) >= self.num_blocks:
                raise ProtocolError(f"handle {self._handles[row]} got blocks {ids}, the pool is [0, {self.num_blocks})")
            table[row, start:end] = ids
            self.table_lens[row, group] = end

    def _schedule(self, handle: Handle, num_tokens: int) -> None:
        if handle in self._scheduled:
            raise ProtocolError(f"handle {handle} is scheduled twice in one step")
        self._scheduled[handle] = num_tokens

    # ---- build: the forward pass's inputs

    def build(self) -> StepInputs:
        """The inputs of what `apply` scheduled. Raises ProtocolError if a sequence has not the tokens or the blocks."""
        handles = list(self._scheduled)
        rows = np.fromiter((self._rows[handle] for handle in handles), np.int64, len(handles))
        counts = np.fromiter(self._scheduled.values(), np.int64, len(handles))
        starts = self.num_computed[rows]
        ends = starts + counts
        num_tokens = self.num_tokens[rows]
        self._check_ranges(handles, rows, counts, ends)

        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        token_rows = np.repeat(rows, counts)
        positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], counts)
        written = positions >= self.num_cached[token_rows]
        return StepInputs(
            handles=handles,
            rows=rows,
            num_scheduled=counts,
            input_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slot_mapping=tuple(self._slots(table, token_rows, positions, written) for table in self.block_tables),
            block_tables=self._tables_of(rows),
            query_start_loc=query_start_loc,
            seq_lens=ends.astype(np.int32),
            sampling=np.flatnonzero(ends == num_tokens),
        )

    def _check_ranges(self, handles: list[Handle], rows: Int64s, counts: Int64s, ends: Int64s) -> None:
        room = self.table_lens[rows].min(axis=1) * self.block_size
        fits = (counts > 0) & (ends <= self.num_tokens[rows]) & (ends <= room)
        if not fits.all():
            i = int(np.argmin(fits))
            known = self.num_tokens[rows[i]]
            raise ProtocolError(
                f"handle {handles[i]} cannot compute {counts[i]} tokens up to {ends[i]}: "
                f"it has {known} tokens, and blocks for {room[i]}"
            )

    def _slots(self, table: Int32s, rows: Int64s, positions: Int64s, written: NDArray[np.bool_]) -> Int64s:
        """Slot of each token: block id * block size + offset, PAD_SLOT where nothing is written. [num_tokens]"""
        block_index, offsets = np.divmod(positions, self.block_size)
        blocks = table[rows, block_index].astype(np.int64)
        if (written & (blocks == NULL_BLOCK)).any():
            row = rows[np.argmax(written & (blocks == NULL_BLOCK))]
            raise ProtocolError(f"handle {self._handles[row]} would write to the null block")
        return np.where(written, blocks * self.block_size + offsets, PAD_SLOT)

    def _tables_of(self, rows: Int64s) -> tuple[Int32s, ...]:
        widths = self.table_lens[rows].max(axis=0, initial=0)
        return tuple(table[rows, :width] for table, width in zip(self.block_tables, widths, strict=True))

    def sample_inputs(self, inputs: StepInputs) -> SampleInputs:
        """What the sampler needs for the sequences that are caught up in this step."""
        rows = inputs.rows[inputs.sampling]
        params = self.params[rows]
        positions = self.num_tokens[rows]
        ruled = np.flatnonzero(params["min_tokens_until"] > positions)
        return SampleInputs(params, positions, self._banned(rows, ruled) if len(ruled) else None)

    def _banned(self, rows: Int64s, ruled: Int64s) -> tuple[Int64s, Int64s]:
        """Stop ids of the samples `ruled`, whose sequences have not reached their minimal length."""
        stop_ids = [self._stop_ids[self._handles[rows[sample]]] for sample in ruled]
        return np.repeat(ruled, [len(ids) for ids in stop_ids]), np.concatenate(stop_ids)

    # ---- commit: what came out

    def commit(self, inputs: StepInputs, sampled: Int64s) -> None:
        """The step has run: its tokens are computed, `sampled` [num_samples] are appended."""
        self.num_computed[inputs.rows] += inputs.num_scheduled
        self.append_sampled(inputs.rows[inputs.sampling], sampled)

    def append_sampled(self, rows: Int64s, tokens: Int64s) -> None:
        """Append one token to each of `rows`, which must differ."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1

    # ---- integrity

    def check_integrity(self) -> None:
        """Raise RuntimeError if the bookkeeping contradicts itself. For tests, and for when the worker is idle."""
        rows = {handle: row for row, handle in enumerate(self._handles)}
        _require(rows == self._rows, f"handles {self._handles} are not where the map says: {self._rows}")
        _require(len(rows) <= self.max_num_seqs, f"{len(rows)} rows, at most {self.max_num_seqs}")
        _require(
            not rows.keys() & self._parked.keys(), f"both resident and parked: {rows.keys() & self._parked.keys()}"
        )
        strangers = self._stop_ids.keys() - rows.keys() - self._parked.keys()
        _require(not strangers, f"stop ids of unknown handles {strangers}")
        for handle, row in rows.items():
            for problem in self._row_problems(row):
                raise RuntimeError(f"handle {handle} in row {row}: {problem}")

    def _row_problems(self, row: int) -> Iterator[str]:
        num_tokens, num_computed = int(self.num_tokens[row]), int(self.num_computed[row])
        if not 0 <= num_computed <= num_tokens <= self.max_model_len + 1:
            yield f"{num_computed} of {num_tokens} tokens computed, context {self.max_model_len}"
        tokens = self.token_ids[row, :num_tokens]
        if num_tokens and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            yield f"tokens outside the vocabulary: {tokens}"
        for group, table in enumerate(self.block_tables):
            blocks = table[row, : self.table_lens[row, group]]
            if len(blocks) * self.block_size < num_computed:
                yield f"{len(blocks)} blocks of group {group} for {num_computed} computed tokens"
            real = blocks[blocks != NULL_BLOCK]
            if len(set(real.tolist())) != len(real) or not ((real > 0) & (real < self.num_blocks)).all():
                yield f"blocks of group {group} repeat or lie outside the pool: {blocks}"


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def _row_params(sampling: Sampling) -> tuple[Any, ...]:
    """`sampling` as one record of ROW_PARAMS."""
    return (
        sampling.temperature,
        max(sampling.top_k, 0),
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.child,
        NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs,
        sampling.min_tokens_until,
    )
