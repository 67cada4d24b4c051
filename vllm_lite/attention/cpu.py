"""Paged attention by the native CPU kernels of csrc/cpu.

A sequence with few rows, as in decoding, reads the cache in place, split every 512 tokens or more so that one long
sequence occupies all threads. A prompt's chunk is cut into tiles of rows. Blocks of a prefix that several sequences
share are read once for the rows of all. The order in which a row's terms are summed depends on its position alone, so
its result is bit-identical in any batch, in any chunk and on any number of threads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from vllm_lite.attention.backend import Attend, AttentionBackend, AttentionShape, Heads
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.kernels.cpu import attention as kernels
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS, dtype_code
from vllm_lite.kernels.cpu.library import available, num_threads


@dataclass(slots=True)
class _Group:
    """One KV group's arguments of the kernels in a step."""

    kernels: kernels.Kernels
    plan: int  # address
    table: tuple[int, int]  # address, stride
    slots: int  # address


@dataclass(slots=True)
class _Plan:
    groups: list[_Group]
    of_kernels: list[NDArray[np.int32]]
    """Each group's plan by its kernels."""
    memory: Any
    """Owner of the other memory that the addresses point to."""
    scratch: Any
    """Scratch memory that the kernels use during this plan's step."""


class CpuBackend(AttentionBackend):
    """Attention for CPUs: float32, bfloat16 and float16, their caches in the same types, float8 or int8."""

    graph_safe = True  # a recorded program runs `prepare` again itself

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._heads = [replace(spec, window=None) for spec in shape.groups]
        made = {heads: _make_kernels(heads, shape) for heads in set(self._heads)}
        self.kernels = [made[heads] for heads in self._heads]
        """Kernels of each KV group; groups that differ only by their windows share kernels and scratch memory."""
        self._first_like = [shape.groups.index(spec) for spec in shape.groups]
        """KV group -> the first group with an equal spec, whose plan it shares unless the plan depends on blocks."""

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        if shape.device.type != "cpu":
            return f"it runs on a CPU, not on {shape.device}"
        if reason := shape.first_reason(_reason):
            return reason
        if shape.dtype not in FLOATS or shape.cache_dtype not in DTYPES:
            return f"it has no kernels for {shape.dtype} with a cache in {shape.cache_dtype}"
        return None if available() else "the native library is missing"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """Partial results of split sequences, and each thread's scratch memory."""
        partials = 0
        for spec in set(self._heads):
            sharing = spec.num_heads // spec.num_kv_heads
            shares = self.shape.shares_prefixes
            num_rows = kernels.max_partial_rows(max_num_tokens, max_num_seqs, max_seq_len, sharing, shares=shares)
            partials += num_rows * spec.num_kv_heads * ((spec.value_size or spec.head_size) + kernels.PARTIAL_EXTRA) * 4
        return 2 * partials + num_threads() * kernels.THREAD_BYTES

    def prepare(self, batch: StepBatch) -> None:
        """Plan the step. Recordable: each replay plans for the lengths that are in memory then, and programs of a batch
        and of its `larger` one have the same addresses."""
        starts, seq_lens = batch.query_start_loc, batch.seq_lens
        before: list[NDArray[np.int32]] | None = None if batch.larger is None else batch.larger.plan.of_kernels
        plans: list[NDArray[np.int32]] = []
        groups = []
        parts = zip(self.kernels, self._first_like, batch.block_tables, batch.slot_mapping, strict=True)
        for index, (kernel, first_like, table, slots) in enumerate(parts):
            place = (table.data_ptr(), table.stride(0))
            window = self.shape.groups[index].window
            shares = self.shape.shares_prefixes and window is None
            if first_like == index or shares:
                among, into = place if shares else None, None if before is None else before[index]
                plans.append(
                    kernel.plan(starts, seq_lens, batch.num_tokens, batch.max_seq_len, window, among, into=into)
                )
            else:
                plans.append(plans[first_like])
            groups.append(_Group(kernel, plans[-1].ctypes.data, place, slots.data_ptr()))
        scratch = [part for kernel in self.kernels for part in kernel.scratch]
        batch.plan = _Plan(groups, plans, (batch.block_tables, batch.slot_mapping), scratch)

    def write_kv(
        self, heads: Heads, kv: torch.Tensor, batch: StepBatch, group: int, scales: KVScales | None = None
    ) -> None:
        part: _Group = batch.plan.groups[group]
        part.kernels.write_kv((heads.query, heads.key, heads.value), heads.rotation, part.slots, kv, scales)

    def attend_layer(self, call: Attend, batch: StepBatch) -> None:
        part: _Group = batch.plan.groups[call.group]
        part.kernels.attend(part.plan, part.table, call.query, call.kv, call.out, call.sinks, scales=call.scales)


def _reason(spec: AttentionSpec) -> str | None:
    if spec.head_size % 8 or not 0 < spec.head_size <= kernels.MAX_HEAD_SIZE:
        return f"head size {spec.head_size} is not a multiple of 8 up to {kernels.MAX_HEAD_SIZE}"
    if spec.value_size is not None and spec.value_size % 8:
        return f"values of {spec.value_size} elements are not a multiple of 8"
    return None


def _make_kernels(spec: AttentionSpec, shape: AttentionShape) -> kernels.Kernels:
    sizes = kernels.Shape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        value_size=spec.value_size or spec.head_size,
        block_size=shape.block_size,
        dtype=dtype_code(shape.dtype),
        kv_dtype=dtype_code(shape.cache_dtype),
        scale=spec.scale,
        soft_cap=spec.soft_cap,
    )
    return kernels.Kernels(sizes, spec.alibi_slopes, shape.scales)
