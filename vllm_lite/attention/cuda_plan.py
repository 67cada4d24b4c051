"""What the CUDA backend prepares for a step: the lists of work of each KV group, in one piece of device memory.

A step that runs eagerly has lists of exactly its work, which one copy brings to the device. A graph has room for the
most that its batch size can ask for; its launches read how much there is, and `refresh` fills it before each replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.step_batch import HostLens, StepBatch, staged, to_device
from vllm_lite.kernels.cuda.attention_work import (
    MAX_SHORT_SPLITS,
    SHORT_TOKENS,
    Int32s,
    Ints,
    RowLists,
    Rows,
    most_splits,
    prefill_tiles,
    row_lists,
    rows_of,
    short_chunks,
)
from vllm_lite.kernels.cuda.decode_attention import workspace_floats
from vllm_lite.kernels.cuda.repeat import RepeatedLaunches


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's work; a tuple has one entry for each KV group."""

    decodes: tuple[RowLists | None, ...] = ()  # None: no row is decoded
    prefills: tuple[torch.Tensor | None, ...] = ()  # int32 [tiles, 2]; None: there are none
    workspace: torch.Tensor | None = None
    """float32; None where no row is split. Held here, so that a captured graph keeps the one it knows."""
    memory: torch.Tensor | None = None  # int32, of a graph: its lists
    launches: dict[tuple[Any, ...], RepeatedLaunches] = field(default_factory=dict)
    """What the first layer of each kind launched, for the others."""


class Planner:
    """Makes plans for layers of one shape. Groups that attend alike share their lists."""

    def __init__(self, shape: AttentionShape) -> None:
        self._groups = shape.groups
        self._device = shape.device
        self._windows = list(dict.fromkeys(spec.window for spec in shape.groups))
        self._shares = list(dict.fromkeys(spec.num_heads // spec.num_kv_heads for spec in shape.groups))
        self._workspace: torch.Tensor | None = None

    def workspace_bytes(self, max_num_seqs: int, max_seq_len: int) -> int:
        """The most that a step's plan takes on the device."""
        floats = ints = 0
        short = MAX_SHORT_SPLITS if max_seq_len > SHORT_TOKENS else 0
        for spec in self._groups:
            most = max_num_seqs * (splits := most_splits(max_seq_len, spec.window)) + short
            ints = max(ints, 4 * (2 + max_num_seqs + most))
            floats = max(floats, 0 if splits == 1 else workspace_floats(most, spec.num_heads, spec.head_size))
        return 4 * (floats + ints * len(self._windows))

    def for_step(self, lens: HostLens, num_tokens: int) -> Plan:
        """The lists of a step that runs eagerly."""
        query_lens, seq_lens = (np.asarray(part, np.int64) for part in (lens.query_lens, lens.seq_lens))
        by_row = (query_lens <= 1) | (seq_lens == 0) | short_chunks(query_lens, seq_lens, self._windows)
        rows = rows_of(query_lens, seq_lens, num_tokens, by_row)
        lists: list[Int32s] = []
        if len(rows.tokens):
            lists += [part for window in self._windows for part in row_lists(rows, window)]
        if not by_row.all():
            lists += [prefill_tiles(query_lens, seq_lens, share, ~by_row) for share in self._shares]
        memory = to_device(np.concatenate([part.ravel() for part in lists]), self._device)
        on_device = [
            view.view(part.shape) for view, part in zip(memory.split([part.size for part in lists]), lists, strict=True)
        ]
        decodes: list[RowLists | None] = [None] * len(self._windows)
        if len(rows.tokens):
            pairs = [on_device[i : i + 2] for i in range(0, 2 * len(self._windows), 2)]
            decodes = [RowLists(splits, merges if len(merges) > 1 else None) for splits, merges in pairs]
        tiles = None if by_row.all() else on_device[-len(self._shares) :]
        return self._plan(decodes, tiles)

    def for_graph(self, batch: StepBatch) -> Plan:
        """Room for the lists of any step with up to `batch.num_seqs` sequences of one row each. It holds padding."""
        sizes = self._graph_sizes(batch)
        memory = torch.zeros(sum(4 * (merges + splits) for merges, splits in sizes), dtype=torch.int32)
        memory = memory.to(self._device)
        parts = memory.view(-1, 4).split([size for pair in sizes for size in pair])
        decodes: list[RowLists | None] = []
        for window, merges, splits in zip(self._windows, parts[::2], parts[1::2], strict=True):
            decodes.append(RowLists(splits, merges if most_splits(batch.max_seq_len, window) > 1 else None))
        plan = self._plan(decodes, None, memory)
        self.refresh(plan, batch, np.zeros(0, np.int64))
        return plan

    def refresh(self, plan: Plan, batch: StepBatch, seq_lens: Ints) -> None:
        """Fill a graph's lists for sequences of these lengths, and padding behind them."""
        if plan.memory is None:
            raise ValueError("this plan is that of one step, not of a graph")
        places = np.arange(batch.num_seqs)
        seen = np.zeros(batch.num_seqs, np.int64)
        seen[: len(seq_lens)] = seq_lens
        start = 0
        for window, (most_merges, most) in zip(self._windows, self._graph_sizes(batch), strict=True):
            splits, merges = row_lists(Rows(places, places, seen), window)
            if len(splits) > most:
                raise ValueError(
                    f"{len(splits) - 1} splits, and the graph has room for {most - 1}: a length is too large"
                )
            both = np.zeros((most_merges + len(splits), 4), np.int32)
            both[: len(merges)], both[most_merges:] = merges, splits
            into = plan.memory[start : start + both.size]
            into.copy_(staged(both.ravel(), self._device), non_blocking=True)
            start += 4 * (most_merges + most)

    def _graph_sizes(self, batch: StepBatch) -> list[tuple[int, int]]:
        """How many entries both lists of each window have in a graph, the first of which is the length."""
        rows = batch.num_seqs
        return [(1 + rows, 1 + rows * most_splits(batch.max_seq_len, window)) for window in self._windows]

    def _plan(
        self,
        decodes: Sequence[RowLists | None],  # by window
        tiles: Sequence[torch.Tensor] | None,  # by the number of heads that share a KV head
        memory: torch.Tensor | None = None,
    ) -> Plan:
        of_group = tuple(decodes[self._windows.index(spec.window)] for spec in self._groups)
        prefills: list[torch.Tensor | None] = [None] * len(self._groups)
        if tiles is not None:
            prefills = [tiles[self._shares.index(spec.num_heads // spec.num_kv_heads)] for spec in self._groups]
        floats = 0
        for spec, lists in zip(self._groups, of_group, strict=True):
            if lists is not None and lists.merges is not None:
                floats = max(floats, workspace_floats(lists.most_splits, spec.num_heads, spec.head_size))
        if floats and (self._workspace is None or len(self._workspace) < floats):
            self._workspace = torch.empty(floats, dtype=torch.float32, device=self._device)
        return Plan(of_group, tuple(prefills), self._workspace if floats else None, memory)
