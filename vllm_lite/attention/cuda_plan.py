"""The CUDA backend's plan of a step: the work lists of each KV group, in one buffer of device memory.

An eager step has lists of exactly its work, copied to the device by one copy. A graph's lists have the capacity that
its batch size may need; its launches read the number of entries, and `refresh` fills the lists before each replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.fresh_prompts import Fresh, FreshPrompts
from vllm_lite.attention.prefix_chunks import PrefixChunks
from vllm_lite.attention.step_batch import HostLens, StepBatch, all_to_device, staged
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.kernels.cuda.attention.attention_work import (
    MAX_SHORT_SPLITS,
    SHORT_TOKENS,
    Cascade,
    Int32s,
    Ints,
    RowWork,
    SplitList,
    has_several,
    most_splits,
    prefill_tiles,
    rows_of,
    short_chunks,
    split_list,
)
from vllm_lite.kernels.cuda.attention.decode_attention import Workspace, most_sharing, part_floats
from vllm_lite.kernels.cuda.attention.latent_attention import WHOLE
from vllm_lite.kernels.cuda.attention.prefill_table import PrefillTable
from vllm_lite.kernels.cuda.attention.shared_prefix import WORTH, CascadeLists, cascade_lists
from vllm_lite.kernels.cuda.attention.varlen import VarlenPlan, make_plan
from vllm_lite.kernels.cuda.repeat import RepeatedLaunches
from vllm_lite.runtime import log

logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's work; a tuple has one entry for each KV group."""

    decodes: tuple[SplitList | None, ...] = ()  # None: no row is decoded
    prefills: tuple[torch.Tensor | None, ...] = ()
    """int32 [tiles, 2], or for latents [1 + rows, 4], a list of uncut rows; None: no prompts."""
    fresh: tuple[Fresh | None, ...] = ()
    """Used instead of `prefills` by layers that pass their new K and V; None or empty tuple: no library is used."""
    gathered: tuple[VarlenPlan | None, ...] = ()
    """Chunks that are gathered and therefore not in `prefills`; None or empty tuple: there are none."""
    workspace: Workspace | None = None
    """None if no row is split. Held here so that a captured graph keeps its workspace alive."""
    memory: torch.Tensor | None = None  # int32 [entries, 4], of a graph: its lists
    launches: dict[tuple[Any, ...], RepeatedLaunches] = field(default_factory=dict)
    """Launches of the first layer of each kind, which the other layers repeat."""


class _Kind(NamedTuple):
    """Key of KV groups that share their lists of decodes."""

    window: int | None
    most_rows: int = 1
    """Rows per thread block on a shared prefix. Above 1 the lists depend on the block tables of group `group`."""
    num_kv_heads: int = 0
    group: int = -1

    def lists(self, rows: RowWork, tables: Sequence[Ints], block_size: int) -> Int32s | CascadeLists:
        """Return the list of splits, with shared splits if that pays. `tables`: of each KV group; empty: share none."""
        made = None
        if self.most_rows > 1 and tables:
            made = cascade_lists(rows, tables[self.group], block_size, self.most_rows, self.num_kv_heads)
        return split_list(rows, self.window) if made is None else made

    def shares(self, batch: StepBatch) -> bool:
        """Whether a graph looks for prefixes that its sequences share."""
        return self.most_rows > 1 and batch.num_seqs >= WORTH.rows and batch.max_seq_len > WORTH.tokens


def _kind(spec: AttentionSpec, shape: AttentionShape, group: int) -> _Kind:
    most_rows = 1 if spec.value_size else most_sharing(spec.num_heads // spec.num_kv_heads, spec.head_size)
    if not shape.shares_prefixes or most_rows == 1 or spec.window is not None or spec.alibi_slopes is not None:
        return _Kind(spec.window)
    return _Kind(None, most_rows, spec.num_kv_heads, group)


class Planner:
    """Makes plans for layers of one shape. KV groups of the same `_Kind` share their lists."""

    def __init__(self, shape: AttentionShape, table: PrefillTable) -> None:
        self._groups = shape.groups
        self._itemsize = shape.dtype.itemsize
        self._fresh = [FreshPrompts(spec, shape, table) for spec in shape.groups]
        self._chunks = [PrefixChunks(spec, shape, table) for spec in shape.groups]
        for own in dict.fromkeys(map(str, filter(None, (*self._fresh, *self._chunks)))):
            logger.info("attention of prompts uses the kernels that were measured as fastest: %s", own)
        self._device = shape.device
        self._windows = list(dict.fromkeys(spec.window for spec in shape.groups))
        self._kind_of = [_kind(spec, shape, group) for group, spec in enumerate(shape.groups)]
        self._kinds = list(dict.fromkeys(self._kind_of))
        self._block_size = shape.block_size
        self._workspace = Workspace.on(shape.device, 0, 0)

    @property
    def sharing(self) -> list[AttentionSpec]:
        """Specs of the groups whose steps look for shared prefixes."""
        return [self._groups[kind.group] for kind in self._kinds if kind.most_rows > 1]

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """Maximum device memory of a step's plan and of a library's results: a row and a float per token and head."""
        floats = ints = counters = 0
        returned = max(
            (
                spec.num_heads * (spec.head_size * self._itemsize + 4)
                for spec, *libraries in zip(self._groups, self._fresh, self._chunks, strict=True)
                if any(libraries)
            ),
            default=0,
        )
        short = MAX_SHORT_SPLITS if max_seq_len > SHORT_TOKENS else 0
        for spec, kind in zip(self._groups, self._kind_of, strict=True):
            most = max_num_seqs * (splits := most_splits(max_seq_len, spec.window)) + short
            ints = max(ints, 4 * (1 + most) + (7 * most if kind.most_rows > 1 else 0))
            floats = max(floats, 0 if splits == 1 else part_floats(most, spec.num_heads, _out_size(spec)))
            counters = max(counters, 0 if splits == 1 else most * spec.num_heads)
        gathered = max((chunks.most_bytes for chunks in self._chunks), default=0)
        return 4 * (floats + counters + ints * len(self._kinds)) + max_num_tokens * returned + gathered

    def for_step(self, lens: HostLens, num_tokens: int) -> Plan:
        """Plan a step that runs eagerly."""
        query_lens, seq_lens = (np.asarray(part, np.int64) for part in (lens.query_lens, lens.seq_lens))
        by_row = (query_lens <= 1) | (seq_lens == 0) | short_chunks(query_lens, seq_lens, self._windows)
        rows = rows_of(query_lens, seq_lens, num_tokens, by_row)
        tables = lens.block_tables
        decodes = [kind.lists(rows, tables, self._block_size) for kind in self._kinds] if len(rows.tokens) else []
        lists = [part for each in decodes for part in (each.parts if isinstance(each, CascadeLists) else (each,))]
        chunks = [own.of(query_lens, seq_lens * ~by_row) if own else ~by_row & by_row for own in self._chunks]
        prompts = [own.of(query_lens, seq_lens * ~by_row) if own else ((), by_row) for own in self._fresh]
        ours = [~(by_row | gathered) for gathered in chunks]
        tiles = {self._tiled(group, rows): rows for group, rows in enumerate(ours) if rows.any()}
        lists += [_prompts(query_lens, seq_lens, share, rows) for (share, _), rows in tiles.items()]
        lists += [
            prefill_tiles(query_lens, seq_lens, spec.num_heads // spec.num_kv_heads, rows & ~taken)
            for spec, rows, (found, taken) in zip(self._groups, ours, prompts, strict=True)
            if found
        ]
        views = iter(all_to_device(lists, self._device))
        on_device = [
            each.among(views) if isinstance(each, CascadeLists) else SplitList(next(views), has_several(each))
            for each in decodes
        ]
        made = {key: next(views) for key in tiles}
        fresh = [Fresh(found, _or_none(next(views))) if found else None for found, _ in prompts]
        plans: dict[bytes, VarlenPlan] = {}
        for chosen in chunks:
            if chosen.any() and chosen.tobytes() not in plans:
                plans[chosen.tobytes()] = make_plan(query_lens, seq_lens, num_tokens, chosen, self._device)
        return replace(
            self._plan(on_device or [None] * len(self._kinds)),
            prefills=tuple(made.get(self._tiled(group, rows)) for group, rows in enumerate(ours)),
            fresh=tuple(fresh),
            gathered=tuple(plans.get(chosen.tobytes()) for chosen in chunks),
        )

    def _tiled(self, group: int, rows: NDArray[np.bool_]) -> tuple[int, bytes]:
        """Key of groups that share their tiles: query heads per KV head (0 for latents, which have no tiles), and the
        sequences."""
        spec = self._groups[group]
        return 0 if spec.value_size else spec.num_heads // spec.num_kv_heads, rows.tobytes()

    def for_graph(self, batch: StepBatch) -> Plan:
        """Allocate lists for any step with up to `batch.num_seqs` sequences of one row each, filled with padding."""
        sizes = self._graph_sizes(batch)
        memory = torch.zeros(sum(map(sum, sizes)), 4, dtype=torch.int32).to(self._device)
        views = iter(memory.split([size for own in sizes for size in own]))
        decodes: list[SplitList | None] = []
        for kind in self._kinds:
            splits, cascade = next(views), None
            if kind.shares(batch):
                cascade = Cascade(next(views), next(views).view(-1), next(views).view(-1, 2))
            decodes.append(SplitList(splits, most_splits(batch.max_seq_len, kind.window) > 1, cascade))
        plan = self._plan(decodes, memory)
        self.refresh(plan, batch, np.zeros(0, np.int64), ())
        return plan

    def refresh(self, plan: Plan, batch: StepBatch, seq_lens: Ints, tables: Sequence[Ints]) -> None:
        """Fill a graph's lists for sequences of these lengths, followed by padding."""
        if plan.memory is None:
            raise ValueError("this plan is that of one step, not of a graph")
        places = np.arange(batch.num_seqs)
        seen = np.zeros(batch.num_seqs, np.int64)
        seen[: len(seq_lens)] = seq_lens
        rows = RowWork(places, places, seen)
        start = 0
        for kind, sizes in zip(self._kinds, self._graph_sizes(batch), strict=True):
            made = kind.lists(rows, tables if kind.shares(batch) else (), self._block_size)
            parts = made.parts if isinstance(made, CascadeLists) else (made,)
            for part, most in zip(parts, sizes, strict=False):
                if part.size > 4 * most:
                    raise ValueError(
                        f"{part.size // 4 - 1} splits, and the graph has room for {most - 1}: a length is too large"
                    )
                flat = plan.memory[start : start + most].view(-1)
                flat[: part.size].copy_(staged(part.ravel(), self._device), non_blocking=True)
                start += most
            start += sum(sizes[len(parts) :])

    def _graph_sizes(self, batch: StepBatch) -> list[list[int]]:
        """Entries of 16 bytes in a graph's lists, by kind: the splits, with their number first; and if rows may share
        prefixes, also the shared splits, the first places and the rows."""
        sizes = []
        for kind in self._kinds:
            most = batch.num_seqs * most_splits(batch.max_seq_len, kind.window)
            more = [most, -(-most // 4), -(-batch.num_seqs // 2)] if kind.shares(batch) else []
            sizes.append([1 + most, *more])
        return sizes

    def _plan(
        self,
        decodes: Sequence[SplitList | None],  # by kind
        memory: torch.Tensor | None = None,
    ) -> Plan:
        of_group = tuple(decodes[self._kinds.index(kind)] for kind in self._kind_of)
        floats = counters = 0
        for spec, work in zip(self._groups, of_group, strict=True):
            if work is not None and work.several:
                floats = max(floats, part_floats(work.most_splits, spec.num_heads, _out_size(spec)))
                counters = max(counters, work.most_splits * spec.num_heads)
        if len(self._workspace.parts) < floats or len(self._workspace.arrived) < counters:
            sizes = max(floats, len(self._workspace.parts)), max(counters, len(self._workspace.arrived))
            self._workspace = Workspace.on(self._device, *sizes)
        workspace = self._workspace if floats else None
        return Plan(of_group, (None,) * len(self._groups), workspace=workspace, memory=memory)


def _out_size(spec: AttentionSpec) -> int:
    return spec.value_size or spec.head_size


def _prompts(query_lens: Ints, seq_lens: Ints, share: int, chosen: NDArray[np.bool_]) -> Int32s:
    """Work list of prompts. share: query heads per KV head; 0 for latents."""
    if share:
        return prefill_tiles(query_lens, seq_lens, share, chosen)
    return split_list(rows_of(query_lens, seq_lens, int(query_lens.sum()), chosen), None, WHOLE)


def _or_none(tiles: torch.Tensor) -> torch.Tensor | None:
    return tiles if len(tiles) else None
