"""Prompts of a step that a library may compute: whole prompts, in layers that the library supports."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.backend import AttentionShape
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.kernels.cuda.attention.prefill_table import PrefillTable
from vllm_lite.kernels.cuda.attention.torch_prefill import WholePrompts

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Fresh:
    """Prompts of a step that a library computes, in layers that pass their new K and V."""

    prompts: tuple[WholePrompts, ...]
    rest: torch.Tensor | None
    """int32 [tiles, 2], the other prompts, for our kernel; None: there are none."""


class FreshPrompts:
    """Chooses the prompts of a step that a library computes, for the layers of one KV group."""

    def __init__(self, spec: AttentionSpec, shape: AttentionShape, table: PrefillTable) -> None:
        """Use the library only if the cache has the queries' type: else chunks of the same prompt read other values."""
        simple = not (spec.soft_cap or spec.sinks) and spec.alibi_slopes is None and shape.cache_dtype == shape.dtype
        group = spec.num_heads // spec.num_kv_heads
        ways = table.ways(shape.dtype, spec.head_size, group) if simple else []
        self._lengths, self._ways = [length for length, _ in ways], [way for _, way in ways]
        self._window = spec.window

    def __bool__(self) -> bool:
        return any(self._ways)

    def __str__(self) -> str:
        return ", ".join(
            f"from {n} tokens on {way or 'our kernel'}" for n, way in zip(self._lengths, self._ways, strict=True)
        )

    def way_of(self, length: int) -> str | None:
        """Return the library's way to compute a prompt of `length` tokens; None: our kernel."""
        at = bisect_right(self._lengths, length) - 1
        return None if at < 0 or (self._window is not None and length > self._window) else self._ways[at]

    def of(self, query_lens: Ints, seq_lens: Ints) -> tuple[tuple[WholePrompts, ...], NDArray[np.bool_]]:
        """Return the prompts, adjacent ones of equal length as one, and a mask of their sequences: bool [num_seqs]."""
        found: list[WholePrompts] = []
        taken = np.zeros(len(query_lens), np.bool_)
        first_rows = np.cumsum(query_lens) - query_lens
        for i in np.flatnonzero((query_lens == seq_lens) & (query_lens > 1)).tolist():
            length, row = int(query_lens[i]), int(first_rows[i])
            if (way := self.way_of(length)) is None:
                continue
            taken[i] = True
            last = found[-1] if found else None
            if last is not None and last[2:] == (length, way) and last.first_row + last.num_prompts * length == row:
                found[-1] = last._replace(num_prompts=last.num_prompts + 1)
            else:
                found.append(WholePrompts(row, 1, length, way))
        return tuple(found), taken
