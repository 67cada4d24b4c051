"""Native calls for decode steps of the persistent batch: they build the inputs and append the sampled token of each
sequence."""

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lite.kernels.cpu.library import function, int64, pointer

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class _Record(ctypes.Structure):
    """The same record as DecodeRows in csrc/cpu/batch.cpp."""

    _fields_ = (
        ("token_ids", pointer),
        ("token_stride", int64),
        ("num_tokens", pointer),
        ("num_computed", pointer),
        ("num_cached", pointer),
        ("table_lens", pointer),
        ("tables", pointer),
        ("num_groups", int64),
        ("table_stride", int64),
        ("block_size", int64),
        ("rows", pointer),
        ("input_ids", pointer),
        ("positions", pointer),
        ("lengths", pointer),
        ("seq_lens", pointer),
        ("slots", pointer),
        ("slot_stride", int64),
        ("step_tables", pointer),
    )


class DecodeRows:
    """The arrays of a batch, whose addresses never change, and the arrays of a step, which `fill` overwrites."""

    def __init__(
        self,
        token_ids: Int32s,  # [max_rows, max_tokens]
        counts: tuple[Int64s, Int64s, Int64s],  # num_tokens, num_computed, num_cached: [max_rows] each
        tables: Sequence[Int32s],  # per KV group: [max_rows, table_width]
        table_lens: Int32s,  # [max_rows, num_groups]
        block_size: int,
    ) -> None:
        max_rows, width = tables[0].shape
        self.rows, self.input_ids, self.positions, self.lengths = np.zeros((4, max_rows), np.int64)
        """Each sequence's row in the batch, the token to compute, its position, and the position of the next one."""
        self.seq_lens = np.zeros(max_rows, np.int32)
        self.slots = np.zeros((len(tables), max_rows), np.int64)
        self.tables = [np.zeros((max_rows, width), np.int32) for _ in tables]
        addresses = [(pointer * len(tables))(*(table.ctypes.data for table in some)) for some in (tables, self.tables)]
        self._kept = token_ids, counts, tables, table_lens, addresses
        self._record = _Record(
            token_ids.ctypes.data,
            token_ids.shape[1],
            *(array.ctypes.data for array in counts),
            table_lens.ctypes.data,
            ctypes.addressof(addresses[0]),
            len(tables),
            width,
            block_size,
            *(array.ctypes.data for array in (self.rows, self.input_ids, self.positions, self.lengths)),
            self.seq_lens.ctypes.data,
            self.slots.ctypes.data,
            max_rows,
            ctypes.addressof(addresses[1]),
        )
        self._address = ctypes.addressof(self._record)
        self._inputs = function("vllm_lite_decode_inputs", (pointer, int64), int64)
        self._commit = function("vllm_lite_decode_commit", (pointer, int64, pointer))

    def fill(self, count: int) -> int:
        """Compute the inputs of the `count` sequences in `rows`. Returns the length of the longest block table; -1 if
        one of the sequences cannot decode, because it lacks the KV of more than its last token, or has no block for
        it."""
        return int(self._inputs(self._address, count))

    def commit(self, count: int, sampled: Int64s) -> None:
        """Append one sampled token to each of the `count` sequences; sampled: [count]."""
        self._commit(self._address, count, sampled.ctypes.data)
