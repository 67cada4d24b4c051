"""The rows of the persistent batch: sequences by handle, and one row of numpy arrays for each running sequence.

Rows are contiguous in [0, len(rows)): when a sequence loses its row, the last row moves there. A preempted sequence has
no row and no blocks; its SequenceState keeps its tokens for Resume.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import Handle
from vllm_lite.worker.batch.block_tables import BlockTables
from vllm_lite.worker.batch.step_inputs import Int32s
from vllm_lite.worker.sampling.sampler import ROW_PARAMS, row_params

NO_ROW = -1


@dataclass(slots=True)
class SequenceState:
    """One sequence in the worker, from its NewRequest or Fork to its Finish."""

    handle: Handle
    sampling: Sampling
    num_prompt: int
    row: int = NO_ROW
    preempted_tokens: Int32s | None = None  # [num_tokens], while it is preempted


class Rows:
    """Holds at most `max_num_seqs` sequences in rows, and any number of preempted ones.

    A step reads the arrays of all its sequences at once. Columns:

    token_ids      tokens, then proposed ones. One column more than the context: a token sampled after a full context
                   is stored, never computed
    num_tokens     number of tokens
    num_computed   number of computed tokens
    num_cached     positions below it are not written: their KV is in the blocks already
    nearer         place of a token minus its position after all images, as the model counts positions
    params         sampling parameters
    tables         block tables
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int, tables: BlockTables) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.tables = tables
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_cached = np.zeros(max_num_seqs, np.int64)
        self.nearer = np.zeros(max_num_seqs, np.int64)
        self.params = np.zeros(max_num_seqs, ROW_PARAMS)
        self.sequences: dict[Handle, SequenceState] = {}  # resident and preempted
        self.resident: list[SequenceState] = []  # by row
        self.scheduled: dict[Handle, int] = {}
        """Handle -> tokens that the step computes, proposed ones included, in the order of its entries."""
        self.proposed: dict[Handle, int] = {}
        """Handle -> number of proposed tokens, of sequences that have any."""
        self.changed = True
        """Whether a sequence was added, removed or altered, so that SteadyDecode's buffers are invalid."""

    def __len__(self) -> int:
        return len(self.resident)

    def row_of(self, handle: Handle, what: str) -> int:
        """Row of a sequence. Raises ProtocolError, naming the caller `what`, if it has no row."""
        sequence = self.sequences.get(handle)
        if sequence is not None and (row := sequence.row) != NO_ROW:
            return row
        raise ProtocolError(f"{what} of handle {handle}, which is {'preempted' if sequence else 'unknown'}")

    def tokens_of(self, handle: Handle, what: str = "tokens_of") -> Int32s:
        """Tokens of a sequence, resident or preempted: [num_tokens]. Raises ProtocolError, naming the caller `what`, if
        it is unknown.
        """
        sequence = self.sequences.get(handle)
        if sequence is not None and sequence.preempted_tokens is not None:
            return sequence.preempted_tokens
        row = self.row_of(handle, what)
        return self.token_ids[row, : self.num_tokens[row]]

    def handle_of(self, row: int) -> Handle:
        return self.resident[row].handle

    # ---- adding and removing sequences

    def open(self, handle: Handle, sampling: Sampling, num_prompt: int) -> SequenceState:
        """Register a sequence, without a row."""
        if handle in self.sequences:
            raise ProtocolError(f"handle {handle} is in use already")
        self.sequences[handle] = sequence = SequenceState(handle, sampling, num_prompt)
        return sequence

    def add(self, sequence: SequenceState, tokens: NDArray[Any]) -> int:
        """Give a sequence the next row, with these tokens and empty tables."""
        row = sequence.row = len(self.resident)
        if row == self.max_num_seqs:
            raise ProtocolError(f"no row for handle {sequence.handle}: all {row} (max_num_seqs) are taken")
        self.resident.append(sequence)
        self._set_tokens(row, tokens)
        self.tables.lens[row] = 0
        self.nearer[row] = 0
        self.params[row] = row_params(sequence.sampling, rules=0)
        self.changed = True
        return row

    def remove(self, row: int) -> None:
        """Free a row; the last row moves there."""
        sequence = self.resident[row]
        if sequence.handle in self.scheduled:
            raise ProtocolError(f"handle {sequence.handle} is scheduled and removed in one step")
        sequence.row = NO_ROW
        moved = self.resident.pop()
        self.changed = True
        last = len(self.resident)
        if row == last:
            return
        self.resident[row] = moved
        moved.row = row
        self._set_tokens(row, self.token_ids[last, : self.num_tokens[last]])
        self.tables.move(last, row)
        for array in (self.num_computed, self.num_cached, self.nearer, self.params):
            array[row] = array[last]

    def _set_tokens(self, row: int, tokens: NDArray[Any]) -> None:
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)

    # ---- scheduling a step

    def begin_step(self) -> None:
        self.scheduled, self.proposed = {}, {}

    def schedule(self, handle: Handle, num_tokens: int) -> None:
        """Schedule `num_tokens` of the sequence. Raises ProtocolError if it is scheduled already."""
        if handle in self.scheduled:
            raise ProtocolError(f"handle {handle} is scheduled twice in one step")
        self.scheduled[handle] = num_tokens

    def propose(self, handle: Handle, tokens: Int32s) -> None:
        """Let the step also compute these unconfirmed tokens behind the sequence's last one."""
        row, count = self.sequences[handle].row, len(tokens)
        if not count:
            return  # so that the step can be steady
        first = int(self.num_tokens[row])
        self.token_ids[row, first : first + count] = tokens
        self.scheduled[handle] += count
        self.proposed[handle] = count

    # ---- integrity

    def check_integrity(self) -> None:
        """Raise RuntimeError if the rows are inconsistent."""
        num_preempted = sum(sequence.row == NO_ROW for sequence in self.sequences.values())
        if len(self.resident) + num_preempted != len(self.sequences):
            raise RuntimeError(f"{self.resident} have rows, {num_preempted} of {self.sequences} have none")
        for row, sequence in enumerate(self.resident):
            for problem in self._problems(row, sequence):
                raise RuntimeError(f"handle {sequence.handle} in row {row}: {problem}")

    def _problems(self, row: int, sequence: SequenceState) -> Iterator[str]:
        if sequence.row != row or sequence.preempted_tokens is not None:
            yield f"the sequence is elsewhere: {sequence}"
        num_tokens, num_computed = int(self.num_tokens[row]), int(self.num_computed[row])
        if not 0 <= num_computed <= num_tokens <= self.max_model_len + 1:
            yield f"{num_computed} of {num_tokens} tokens computed, context {self.max_model_len}"
        tokens = self.token_ids[row, :num_tokens]
        if num_tokens and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            yield f"tokens outside the vocabulary: {tokens}"
        yield from self.tables.problems(row, num_computed)
