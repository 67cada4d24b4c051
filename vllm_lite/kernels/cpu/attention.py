"""Typed calls of the native attention kernels in csrc/cpu/attention.cpp, by raw pointers."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cpu.dtypes import DTYPES
from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer

MAX_HEAD_SIZE = 576
MAX_ROWS = 252
"""Maximum rows of Q that are computed together. Each of the query heads that share a KV head has a row of its own."""
SPLIT_KEYS, MAX_SPLITS = 512, 16
"""Minimum keys of a split and maximum splits of a sequence; the same numbers as in csrc/cpu/attention.cpp and
attention.h."""
PARTIAL_EXTRA = 17
"""Floats that a row of partial results has in addition to those of V: its largest score, and a sum of weights for each
of 16 lanes. partial_size in csrc/cpu/attention.h explains them."""
COUNTERS = 2
"""Counters of each sequence and KV head; kCounters in csrc/cpu/attention.cpp explains them."""
THREAD_BYTES = 896 << 10
"""Scratch memory of each thread."""
INT8_SCALE_BYTES = 4
"""Bytes of the float32 scale that follows each row of an int8 cache."""
PLAN_INTS, ITEM_INTS, TOKEN_INTS = 7, 14, 4
"""Number of int32 fields of the records Plan, AttentionItem and SharedToken in csrc/cpu."""


class Shape(ctypes.Structure):
    """The same record as AttentionShape in csrc/cpu/attention.h; dtypes are codes of kernels.cpu.dtypes."""

    _fields_ = (
        ("num_heads", int32),
        ("num_kv_heads", int32),
        ("head_size", int32),
        ("value_size", int32),
        ("block_size", int32),
        ("dtype", int32),
        ("kv_dtype", int32),
        ("both_ways", int32),
        ("scale", float32),
        ("soft_cap", float32),
        ("k_scale", float32),
        ("v_scale", float32),
        ("slopes", pointer),
    )


def _least_rows(head_size: int) -> int:
    """Minimum rows of Q that are computed together if a sequence has more; half of max_rows in csrc/cpu/attention.h."""
    return MAX_ROWS // 2 if head_size <= 128 else 60 if head_size <= 256 else 24


def max_splits(max_seq_len: int) -> int:
    """Maximum number of parts into which a sequence is split."""
    return min(MAX_SPLITS, -(-max_seq_len // SPLIT_KEYS))


def max_partial_rows(num_tokens: int, num_seqs: int, max_seq_len: int, group: int, *, shares: bool = False) -> int:
    """Maximum rows of partial results of a step, for each KV head, which `group` query heads share. `shares`: a common
    prefix of several sequences may be read once for all of them; each of their rows then has a partial result for
    it."""
    num_splits = max_splits(max_seq_len)
    if num_splits <= 1:
        return 0
    most = num_seqs * min(MAX_SPLITS * min(max(group, 8), 16), num_splits * MAX_ROWS)
    if shares and num_seqs > 1:
        most += 2 * min(num_tokens * group, num_seqs * MAX_ROWS)
    return min(most, num_splits * num_tokens * group)


class Kernels:
    """The kernels for one shape of attention. The calls share scratch memory, so two calls must not overlap in time.

    The cache of a layer is kv: [num_blocks, 2, num_kv_heads, block_size, head_size] with any strides, the last one 1.
    Rows of int8 are 4 bytes longer, for their scale. If the second axis is 1 instead of 2, V is the first value_size
    elements of K.
    """

    def __init__(
        self, shape: Shape, slopes: Sequence[float] | None = None, scales: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        """slopes: ALiBi's slopes [num_heads]; sets `shape.slopes`. scales: the scales of K and V for calls that pass
        none."""
        shape.k_scale, shape.v_scale = _ordered(shape, scales)
        self._shape, self._slopes = shape, (float32 * len(slopes or ()))(*slopes or ())
        shape.slopes = None if slopes is None else ctypes.addressof(self._slopes)
        self._shapes: dict[tuple[float, float], Shape] = {}
        self._shape_address = ctypes.addressof(shape)
        self._partial_floats = shape.num_kv_heads * (shape.value_size + PARTIAL_EXTRA)
        self._strides: dict[tuple[int, ...], Any] = {}
        step_types = (pointer, pointer, pointer, int32, int32, int32, pointer, int64)
        self._plan = function("vllm_lite_attention_plan", (*step_types, pointer, int64, int64), int64)
        attend_types = (pointer, pointer, pointer, int64, pointer, int64, pointer, pointer, pointer, int64)
        self._attend = function("vllm_lite_attend", (*attend_types, pointer, pointer, pointer))
        write_types = (pointer, pointer, int64, pointer, int64, pointer, int64, pointer, pointer, int64)
        self._write = function("vllm_lite_write_kv", (*write_types, pointer, int64, pointer, pointer))
        self._partials = np.empty(0, np.float32)
        self._counters = np.zeros(0, np.int32)

    @property
    def scratch(self) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Memory for the partial results and counters, enough for the largest step so far. It is replaced when a step
        needs more, so an object that stores the addresses of a call must also keep this memory."""
        return self._partials, self._counters

    def plan(  # noqa: PLR0913 - what only some steps have comes last
        self,
        starts: torch.Tensor,  # int32 [num_seqs + 1]
        seq_lens: torch.Tensor,  # int32 [num_seqs], at most max_seq_len
        num_tokens: int,
        max_seq_len: int,
        window: int | None,
        table: tuple[int, int] | None = None,  # as `attend` will get it
        *,
        into: NDArray[np.int32] | None = None,
    ) -> NDArray[np.int32]:
        """Plan the tasks of a step's attention: int32 [n], with room for any lengths up to max_seq_len. With a table
        and without a window, the blocks of a common prefix are read once for all sequences that share them. `into`: the
        plan of a step at least as large, whose memory this one takes."""
        num_seqs = len(seq_lens)
        shares = table is not None
        plan = self._room(num_seqs, num_tokens, max_seq_len, shares=shares) if into is None else into
        needed = self._plan(
            self._shape_address,
            starts.data_ptr(),
            seq_lens.data_ptr(),
            num_seqs,
            num_tokens,
            window or 0,
            *(table or (None, 0)),
            plan.ctypes.data,
            len(plan),
            len(self._partials) // self._partial_floats,
        )
        if needed >= 0:
            raise RuntimeError(f"a sequence of the step is longer than {max_seq_len}")
        return plan

    def _room(self, num_seqs: int, num_tokens: int, max_seq_len: int, *, shares: bool) -> NDArray[np.int32]:
        """Memory for a plan. Reserves that for its partial results, too."""
        num_kv_heads = self._shape.num_kv_heads
        group = self._shape.num_heads // num_kv_heads
        num_items = num_seqs * max(1, max_splits(max_seq_len))
        num_items += num_tokens * group // _least_rows(self._shape.head_size)
        num_items += num_tokens // SPLIT_KEYS  # tiles end where the size of sections changes
        if shares:
            num_items += num_seqs  # a section of which only a part is shared becomes two
        num_ints = PLAN_INTS + num_items * (ITEM_INTS + num_kv_heads) + 2 * (num_seqs + 1)
        plan = np.empty(num_ints + (num_tokens * TOKEN_INTS if shares else 0), np.int32)
        num_rows = max_partial_rows(num_tokens, num_seqs, max_seq_len, group, shares=shares)
        self.reserve(num_rows * self._partial_floats, COUNTERS * num_seqs * num_kv_heads)
        return plan

    def reserve(self, num_partials: int, num_counters: int) -> None:
        if num_partials > len(self._partials):
            self._partials = np.empty(max(num_partials, 2 * len(self._partials)), np.float32)
        if num_counters > len(self._counters):
            self._counters = np.zeros(max(num_counters, 2 * len(self._counters)), np.int32)
        self._partials_address, self._counters_address = self._partials.ctypes.data, self._counters.ctypes.data

    def attend(  # noqa: PLR0913 - what only some layers have comes last
        self,
        plan: int,  # address of what `plan` returned
        table: tuple[int, int],  # address and stride of the block table, int32 [num_seqs, max_blocks]
        query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows strided
        kv: torch.Tensor,
        out: torch.Tensor,  # [num_tokens, num_heads, value_size], rows strided
        sinks: torch.Tensor | None = None,  # float32 [num_heads], one more logit of each head, dense
        *,
        scales: tuple[float, float] | None = None,  # of K and V in a cache of float8
    ) -> None:
        """Attention of one layer into `out`."""
        self._attend(
            self._shape_with(scales),
            plan,
            *table,
            query.data_ptr(),
            query.stride(0),
            kv.data_ptr(),
            self._strides_of(kv),
            out.data_ptr(),
            out.stride(0),
            None if sinks is None else sinks.data_ptr(),
            self._partials_address,
            self._counters_address,
        )

    def attend_tokens(
        self,
        plan: int,
        table: tuple[int, int],
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # Q, K, V: [num_tokens, num_[kv_]heads, head_size]
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,  # float32 [num_heads], as in `attend`
    ) -> None:
        """Attention over the K and V that the projections wrote, in rows with one stride, without a cache.

        The kernel takes every token as the beginning of a block that continues in the next rows. So the entries of
        `table` are the tokens at which the blocks of a sequence begin.
        """
        query, key, value = heads
        offset = (value.data_ptr() - key.data_ptr()) // key.itemsize
        strides = key.stride(0), offset, key.stride(1), key.stride(0)
        known = self._strides.get(strides)
        if known is None:
            known = self._strides[strides] = (int64 * 4)(*strides)
        self._attend(
            self._shape_address,
            plan,
            *table,
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            ctypes.addressof(known),
            out.data_ptr(),
            out.stride(0),
            None if sinks is None else sinks.data_ptr(),
            self._partials_address,
            self._counters_address,
        )

    def write_kv(
        self,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # Q, K, V: [num_tokens, num_[kv_]heads, head_size]
        rotation: tuple[torch.Tensor, torch.Tensor] | None,  # cos, sin: [num_tokens, head_size]
        slots: int,  # address of int64 [num_tokens]
        kv: torch.Tensor,
        scales: tuple[float, float] | None = None,  # of K and V in a cache of float8
    ) -> None:
        """Rotate Q and K in place and store K and V at their slots. Tokens with negative slots are not stored. Rows may
        be strided."""
        query, key, value = heads
        cos, sin, turn_stride = None, None, 0
        if rotation is not None:
            cos, sin, turn_stride = rotation[0].data_ptr(), rotation[1].data_ptr(), rotation[0].stride(0)
        self._write(
            self._shape_with(scales),
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            cos,
            sin,
            turn_stride,
            slots,
            len(key),
            kv.data_ptr(),
            self._strides_of(kv),
        )

    def _shape_with(self, scales: tuple[float, float] | None) -> int:
        """Address of the shape with these scales. It stays valid as long as this object, because recorded calls contain
        it."""
        if scales is None:
            return self._shape_address
        if scales not in self._shapes:
            made = Shape.from_buffer_copy(self._shape)
            made.k_scale, made.v_scale = _ordered(made, scales)
            self._shapes[scales] = made
        return ctypes.addressof(self._shapes[scales])

    def _strides_of(self, kv: torch.Tensor) -> int:
        """Address of the first four strides of `kv`, int64 [4]."""
        strides = kv.stride()
        if kv.dim() == 5 and kv.shape[1] == 1:
            strides = (strides[0], 0, *strides[2:])
        known = self._strides.get(strides)
        if known is None:
            if kv.dim() != 5 or strides[-1] != 1:
                raise ValueError(f"kv must have 5 axes, the last one dense, got shape {kv.shape}, strides {strides}")
            shape = self._shape
            planes = 2 if shape.value_size == shape.head_size else 1  # or V is a part of K
            row = shape.head_size + (INT8_SCALE_BYTES if shape.kv_dtype == DTYPES[torch.int8] else 0)
            made_for = [planes, shape.num_kv_heads, shape.block_size, row]
            if list(kv.shape[1:]) != made_for:
                raise ValueError(f"kv has {list(kv.shape[1:])} in a block, and these kernels are made for {made_for}")
            known = self._strides[strides] = (int64 * 4)(*strides[:4])
        return ctypes.addressof(known)


def _ordered(shape: Shape, scales: tuple[float, float]) -> tuple[float, float]:
    """Scales of K and V. If V is a part of K, it has the scale of K."""
    key, value = scales
    return key, value if shape.value_size == shape.head_size else key
