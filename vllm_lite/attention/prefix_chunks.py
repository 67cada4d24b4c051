"""Chunks after a prefix that torch's FlashAttention computes, on a copy of their sequence's K and V."""

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lite.attention.backend import AttentionShape
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.kernels.cuda.attention.prefill_table import PrefillTable

Ints = NDArray[np.integer[Any]]
GATHERED_BYTES = 256 << 20
"""Maximum bytes of a step's copies of K and V; our kernel computes the chunks that do not fit."""


class PrefixChunks:
    """Chooses the chunks of a step that are gathered, for the layers of one KV group."""

    def __init__(self, spec: AttentionSpec, shape: AttentionShape, table: PrefillTable) -> None:
        """Exclude layers with a window, for which tokens would be copied that nobody sees."""
        plain = not (spec.soft_cap or spec.sinks or spec.window) and spec.alibi_slopes is None
        group = spec.num_heads // spec.num_kv_heads
        found = table.behind(shape.dtype, spec.head_size, group) if plain and spec.value_size is None else []
        self._pays: dict[int, list[tuple[int, bool]]] = {}
        for num_tokens, num_before, pays in found:
            self._pays.setdefault(num_tokens, []).append((num_before, pays))
        self._most_tokens = GATHERED_BYTES // (2 * spec.num_kv_heads * spec.head_size * shape.dtype.itemsize)

    def __bool__(self) -> bool:
        return any(pays for points in self._pays.values() for _, pays in points)

    def __str__(self) -> str:
        points = [(n, *point) for n, of_length in self._pays.items() for point in of_length]
        return ", ".join(f"{n} behind {before} {'gathered' if pays else 'by our kernel'}" for n, before, pays in points)

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of a step's copies."""
        return GATHERED_BYTES if self else 0

    def pays_for(self, num_tokens: int, num_before: int) -> bool:
        """Whether gathering pays: for the largest measured chunk and prefix that are not longer than these."""
        lengths = list(self._pays)
        at = bisect_right(lengths, num_tokens) - 1
        if at < 0:
            return False
        points = self._pays[lengths[at]]
        place = bisect_right([before for before, _ in points], num_before) - 1
        return place >= 0 and points[place][1]

    def of(self, query_lens: Ints, seq_lens: Ints) -> NDArray[np.bool_]:  # [num_seqs]
        """Mask of the step's sequences whose chunks are gathered, in their order while the copies fit."""
        chosen, room = np.zeros(len(query_lens), np.bool_), self._most_tokens
        for i in np.flatnonzero((query_lens > 1) & (query_lens < seq_lens)).tolist():
            if self.pays_for(int(query_lens[i]), int(seq_lens[i] - query_lens[i])) and seq_lens[i] <= room:
                chosen[i] = True
                room -= int(seq_lens[i])
        return chosen
