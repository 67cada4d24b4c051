"""Paged attention by the native CPU kernels of csrc/cpu.

A sequence with few rows, as in decoding, reads the cache as it lies, split every 512 tokens or more so that one long
sequence occupies all threads; a chunk of a prompt is cut into tiles of rows. How a sequence is cut does not depend on
the batch or the number of threads, so a decoded token's result is the same alone and in any batch, bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.metadata import AttentionMetadata
from vllm_lite.kernels.cpu import attention as kernels
from vllm_lite.kernels.cpu.dtypes import DTYPES, dtype_code
from vllm_lite.kernels.cpu.library import available, num_threads


@dataclass(slots=True)
class _Group:
    """One KV group's part of a step, as the kernels take it."""

    plan: int  # address
    table: tuple[int, int]  # address, stride
    slots: int  # address


@dataclass(slots=True)
class _Plan:
    groups: tuple[_Group, ...]
    memory: Any
    """What the addresses point into."""
    scratch: Any
    """What else the kernels are given while this is the plan."""


class CpuBackend:
    """Attention for CPUs: float32, bfloat16 and float16, their caches in the same types or in float8."""

    graph_safe = True

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        in_float8 = shape.cache_dtype.itemsize == 1
        sizes = kernels.Shape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            block_size=shape.block_size,
            dtype=dtype_code(shape.dtype),
            kv_dtype=dtype_code(shape.cache_dtype),
            scale=shape.scale,
            soft_cap=shape.soft_cap,
            k_scale=shape.k_scale if in_float8 else 1.0,
            v_scale=shape.v_scale if in_float8 else 1.0,
        )
        self.kernels = kernels.Kernels(sizes, kernels.floats(shape.alibi_slopes))

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        if shape.device.type != "cpu":
            return f"it runs on a CPU, not on {shape.device}"
        if shape.num_heads % shape.num_kv_heads:
            return f"{shape.num_heads} heads cannot share {shape.num_kv_heads} KV heads evenly"
        if shape.head_size % 8 or not 0 < shape.head_size <= kernels.MAX_HEAD_SIZE:
            return f"head size {shape.head_size} is no multiple of 8 up to {kernels.MAX_HEAD_SIZE}"
        if shape.dtype not in DTYPES or shape.dtype.itemsize == 1 or shape.cache_dtype not in DTYPES:
            return f"it has no kernels for {shape.dtype} with a cache in {shape.cache_dtype}"
        if shape.alibi_slopes is not None and len(shape.alibi_slopes) != shape.num_heads:
            return f"there are {len(shape.alibi_slopes)} ALiBi slopes for {shape.num_heads} heads"
        if not available():
            return "the native library is missing"
        return None

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """Partial results of split sequences, and each thread's scratch memory."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        num_rows = kernels.max_partial_rows(max_num_tokens, max_num_seqs, max_seq_len, group)
        partials = num_rows * shape.num_kv_heads * (shape.head_size + 2) * 4
        return 2 * partials + num_threads() * kernels.THREAD_BYTES

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Recordable: a program that does this again cuts the lengths that it then finds in memory."""
        starts, seq_lens = metadata.query_start_loc, metadata.seq_lens
        plans = {
            window: self.kernels.plan(starts, seq_lens, metadata.num_tokens, metadata.max_seq_len, window)
            for window in set(self.shape.windows)
        }
        groups = [
            _Group(plans[window].ctypes.data, (table.data_ptr(), table.stride(0)), slots.data_ptr())
            for window, table, slots in zip(
                self.shape.windows, metadata.block_tables, metadata.slot_mapping, strict=True
            )
        ]
        memory = (plans, metadata.block_tables, metadata.slot_mapping)
        metadata.plan = _Plan(tuple(groups), memory, self.kernels.scratch)

    def write_kv(self, heads: Heads, kv: torch.Tensor, metadata: AttentionMetadata, group: int) -> None:
        slots = metadata.plan.groups[group].slots
        self.kernels.write_kv((heads.query, heads.key, heads.value), heads.rotation, slots, kv)

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, metadata: AttentionMetadata, group: int, out: torch.Tensor
    ) -> None:
        part: _Group = metadata.plan.groups[group]
        self.kernels.attend(part.plan, part.table, query, kv, out)
