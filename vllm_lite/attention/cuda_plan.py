"""What the CUDA backend prepares for a step: the lists of work of each KV group, in one piece of device memory.

A step that runs eagerly has lists of exactly its work, which one copy brings to the device. A graph has room for the
most that its batch size can ask for; its launches read how much there is, and `refresh` fills it before each replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.fresh_prompts import Fresh, FreshPrompts
from vllm_lite.attention.step_batch import HostLens, StepBatch, staged, to_device
from vllm_lite.kernels.cuda.attention_work import (
    MAX_SHORT_SPLITS,
    SHORT_TOKENS,
    Int32s,
    Ints,
    Rows,
    SplitList,
    has_several,
    most_splits,
    prefill_tiles,
    rows_of,
    short_chunks,
    split_list,
)
from vllm_lite.kernels.cuda.decode_attention import Workspace, part_floats
from vllm_lite.kernels.cuda.prefill_table import PrefillTable
from vllm_lite.kernels.cuda.repeat import RepeatedLaunches
from vllm_lite.runtime import log

logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's work; a tuple has one entry for each KV group."""

    decodes: tuple[SplitList | None, ...] = ()  # None: no row is decoded
    prefills: tuple[torch.Tensor | None, ...] = ()  # int32 [tiles, 2]; None: there are none
    fresh: tuple[Fresh | None, ...] = ()
    """Where a layer hands over its K and V, in place of `prefills`; None, or nothing at all: no library is used."""
    workspace: Workspace | None = None
    """None where no row is split. Held here, so that a captured graph keeps the one it knows."""
    memory: torch.Tensor | None = None  # int32 [entries, 4], of a graph: its lists
    launches: dict[tuple[Any, ...], RepeatedLaunches] = field(default_factory=dict)
    """What the first layer of each kind launched, for the others."""


class Planner:
    """Makes plans for layers of one shape. Groups that attend alike share their lists."""

    def __init__(self, shape: AttentionShape, table: PrefillTable) -> None:
        self._groups = shape.groups
        self._itemsize = shape.dtype.itemsize
        self._fresh = [FreshPrompts(spec, shape, table) for spec in shape.groups]
        for own in filter(None, dict.fromkeys(map(str, filter(None, self._fresh)))):
            logger.info("prompts that come whole are attended to by the fastest way that was measured: %s", own)
        self._device = shape.device
        self._windows = list(dict.fromkeys(spec.window for spec in shape.groups))
        self._shares = list(dict.fromkeys(spec.num_heads // spec.num_kv_heads for spec in shape.groups))
        self._workspace = Workspace.on(shape.device, 0, 0)

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """The most that a step's plan takes on the device, and what a library returns: a row and a float a head."""
        floats = ints = counters = 0
        returned = max(
            (
                spec.num_heads * (spec.head_size * self._itemsize + 4)
                for spec, fresh in zip(self._groups, self._fresh, strict=True)
                if fresh
            ),
            default=0,
        )
        short = MAX_SHORT_SPLITS if max_seq_len > SHORT_TOKENS else 0
        for spec in self._groups:
            most = max_num_seqs * (splits := most_splits(max_seq_len, spec.window)) + short
            ints = max(ints, 4 * (1 + most))
            floats = max(floats, 0 if splits == 1 else part_floats(most, spec.num_heads, spec.head_size))
            counters = max(counters, 0 if splits == 1 else most * spec.num_heads)
        return 4 * (floats + counters + ints * len(self._windows)) + max_num_tokens * returned

    def for_step(self, lens: HostLens, num_tokens: int) -> Plan:
        """The lists of a step that runs eagerly."""
        query_lens, seq_lens = (np.asarray(part, np.int64) for part in (lens.query_lens, lens.seq_lens))
        by_row = (query_lens <= 1) | (seq_lens == 0) | short_chunks(query_lens, seq_lens, self._windows)
        rows = rows_of(query_lens, seq_lens, num_tokens, by_row)
        lists: list[Int32s] = []
        if len(rows.tokens):
            lists += [split_list(rows, window) for window in self._windows]
        if not by_row.all():
            lists += [prefill_tiles(query_lens, seq_lens, share, ~by_row) for share in self._shares]
        prompts = [own.of(query_lens, seq_lens * ~by_row) if own else ((), by_row) for own in self._fresh]
        rests = [
            prefill_tiles(query_lens, seq_lens, spec.num_heads // spec.num_kv_heads, ~by_row & ~taken)
            for spec, (found, taken) in zip(self._groups, prompts, strict=True)
            if found
        ]
        lists += rests
        memory = to_device(np.concatenate([part.ravel() for part in lists]), self._device)
        on_device = [
            view.view(part.shape) for view, part in zip(memory.split([part.size for part in lists]), lists, strict=True)
        ]
        decodes: list[SplitList | None] = [None] * len(self._windows)
        if len(rows.tokens):
            pairs = zip(on_device, lists[: len(self._windows)], strict=False)
            decodes = [SplitList(splits, has_several(on_host)) for splits, on_host in pairs]
        end = len(on_device) - len(rests)
        tiles = None if by_row.all() else on_device[end - len(self._shares) : end]
        left = iter(on_device[end:])
        fresh = [Fresh(found, _or_none(next(left))) if found else None for found, _ in prompts]
        return replace(self._plan(decodes, tiles), fresh=tuple(fresh))

    def for_graph(self, batch: StepBatch) -> Plan:
        """Room for the lists of any step with up to `batch.num_seqs` sequences of one row each. It holds padding."""
        sizes = self._graph_sizes(batch)
        memory = torch.zeros(sum(sizes), 4, dtype=torch.int32).to(self._device)
        decodes: list[SplitList | None] = []
        for window, splits in zip(self._windows, memory.split(sizes), strict=True):
            decodes.append(SplitList(splits, most_splits(batch.max_seq_len, window) > 1))
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
        for window, most in zip(self._windows, self._graph_sizes(batch), strict=True):
            splits = split_list(Rows(places, places, seen), window)
            if len(splits) > most:
                raise ValueError(
                    f"{len(splits) - 1} splits, and the graph has room for {most - 1}: a length is too large"
                )
            plan.memory[start : start + len(splits)].copy_(staged(splits, self._device), non_blocking=True)
            start += most

    def _graph_sizes(self, batch: StepBatch) -> list[int]:
        """How many entries the list of each window has in a graph, the first of which is the length."""
        return [1 + batch.num_seqs * most_splits(batch.max_seq_len, window) for window in self._windows]

    def _plan(
        self,
        decodes: Sequence[SplitList | None],  # by window
        tiles: Sequence[torch.Tensor] | None,  # by the number of heads that share a KV head
        memory: torch.Tensor | None = None,
    ) -> Plan:
        of_group = tuple(decodes[self._windows.index(spec.window)] for spec in self._groups)
        prefills: list[torch.Tensor | None] = [None] * len(self._groups)
        if tiles is not None:
            prefills = [tiles[self._shares.index(spec.num_heads // spec.num_kv_heads)] for spec in self._groups]
        floats = counters = 0
        for spec, work in zip(self._groups, of_group, strict=True):
            if work is not None and work.several:
                floats = max(floats, part_floats(work.most_splits, spec.num_heads, spec.head_size))
                counters = max(counters, work.most_splits * spec.num_heads)
        if len(self._workspace.parts) < floats or len(self._workspace.arrived) < counters:
            sizes = max(floats, len(self._workspace.parts)), max(counters, len(self._workspace.arrived))
            self._workspace = Workspace.on(self._device, *sizes)
        workspace = self._workspace if floats else None
        return Plan(of_group, tuple(prefills), workspace=workspace, memory=memory)


def _or_none(tiles: torch.Tensor) -> torch.Tensor | None:
    return tiles if len(tiles) else None
