"""Paged attention by the CUDA kernels of csrc/cuda.

A step may mix decodes (sequences with one row) and chunks of prompts. No host knows which is which without waiting for
the device, so both kernels are launched over all sequences and each leaves the other's alone: `decode_attention` takes
those with one row and also clears padding, `prefill_attention` takes those with more. A kernel that the host can tell
has nothing to do is not launched. float32 models run on one simple kernel for both.

For CUDA graphs: `write_kv` and `attend` only launch, with grids that follow from the metadata's numbers. What they need
besides lies in `metadata.plan`, which the owner of a graph keeps.
"""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.metadata import AttentionMetadata
from vllm_lite.errors import ConfigError
from vllm_lite.kernels.cuda import cache_ops
from vllm_lite.kernels.cuda.attention_simple import attention_simple
from vllm_lite.kernels.cuda.cupy_launcher import default_launcher
from vllm_lite.kernels.cuda.decode_attention import (
    SPLIT_TOKENS,
    TILE,
    decode_attention,
    decode_reason,
    num_splits,
    workspace_floats,
)
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.prefill_attention import prefill_attention

MIN_CAPABILITY = (8, 0)
MAX_SPLITS = 64
"""Of the longest sequence: enough to fill a GPU with one sequence of 8 KV heads; more would only cost workspace."""


@dataclass(frozen=True, slots=True)
class _Plan:
    decodes: bool  # whether there may be sequences of one row, or padding
    prefills: bool  # whether there are sequences of more
    workspace: torch.Tensor | None
    """float32; None where no sequence is split. Held here, so that a captured graph keeps the one it knows."""


class CudaBackend:
    """Attention for GPUs from sm_80 on: float16, bfloat16 and float32, their caches in the same type or in float8.

    A decoded row's bits do not depend on its batch. `launcher` is the process's own unless one is given.
    """

    graph_safe = True

    def __init__(self, shape: AttentionShape, launcher: Launcher | None = None) -> None:
        launcher = launcher or default_launcher()
        if launcher is None:
            raise ConfigError("the CUDA attention backend needs CuPy, which cannot be imported")
        self.shape = shape
        self.launcher = launcher
        self.split_tokens = SPLIT_TOKENS
        if shape.max_seq_len is not None:  # fixed for all steps: another split would change bits
            self.split_tokens = max(SPLIT_TOKENS, -(-shape.max_seq_len // (MAX_SPLITS * TILE)) * TILE)
        slopes = shape.alibi_slopes
        self._options: dict[str, Any] = {  # of every kernel that attends
            "scale": shape.scale,
            "soft_cap": shape.soft_cap,
            "alibi_slopes": None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=shape.device),
            "k_scale": shape.k_scale,
            "v_scale": shape.v_scale,
        }
        self._workspace: torch.Tensor | None = None

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        if shape.device.type != "cuda":
            return f"it runs on a CUDA device, not on {shape.device}"
        if reason := kernels_reason(shape):
            return reason
        capability = torch.cuda.get_device_capability(shape.device)
        if capability < MIN_CAPABILITY:
            return f"it needs compute capability 8.0 (Ampere), the device has {capability[0]}.{capability[1]}"
        return "CuPy cannot be imported" if default_launcher() is None else None

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:  # noqa: ARG002
        """Exactly what `prepare` allocates for `max_num_seqs` sequences of up to `max_seq_len` tokens."""
        return 4 * self._workspace_floats(max_num_seqs, max_seq_len)

    def _workspace_floats(self, num_seqs: int, max_seq_len: int) -> int:
        if self.shape.dtype == torch.float32:
            return 0
        splits = max(num_splits(max_seq_len, window, self.split_tokens) for window in self.shape.windows)
        return workspace_floats(num_seqs, self.shape.num_heads, self.shape.head_size, splits)

    def prepare(self, metadata: AttentionMetadata) -> None:
        all_prefill = metadata.max_query_len > 1 and metadata.num_tokens == metadata.num_seqs * metadata.max_query_len
        workspace = None
        floats = 0 if all_prefill else self._workspace_floats(metadata.num_seqs, metadata.max_seq_len)
        if floats:
            if self._workspace is None or len(self._workspace) < floats:
                self._workspace = torch.empty(floats, dtype=torch.float32, device=self.shape.device)
            workspace = self._workspace
        metadata.plan = _Plan(not all_prefill, metadata.max_query_len > 1, workspace)

    def write_kv(self, heads: Heads, kv: torch.Tensor, metadata: AttentionMetadata, group: int) -> None:
        slots = cache_ops.CacheSlots(kv, metadata.slot_mapping[group], self.shape.k_scale, self.shape.v_scale)
        if heads.rotation is None:
            cache_ops.reshape_and_cache(self.launcher, heads.key, heads.value, slots)
        else:
            rows = (heads.query, heads.key, heads.value)
            cache_ops.rope_and_cache(self.launcher, *rows, heads.rotation, slots)

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, metadata: AttentionMetadata, group: int, out: torch.Tensor
    ) -> None:
        plan: _Plan = metadata.plan
        table, starts, lens = metadata.block_tables[group], metadata.query_start_loc, metadata.seq_lens
        window = self.shape.windows[group]
        if self.shape.dtype == torch.float32:
            attention_simple(self.launcher, out, query, kv, table, starts, lens, window=window, **self._options)
            return
        if plan.decodes:
            decode_attention(
                *(self.launcher, out, query, kv, table, lens, plan.workspace),
                query_start_loc=starts,
                max_seq_len=metadata.max_seq_len,
                window=window,
                split_tokens=self.split_tokens,
                **self._options,
            )
        if plan.prefills:
            prefill_attention(
                *(self.launcher, out, query, kv, table, starts, lens),
                max_query_len=metadata.max_query_len,
                max_seq_len=metadata.max_seq_len,
                window=window,
                **self._options,
            )


def kernels_reason(shape: AttentionShape) -> str | None:
    """None when there are kernels for `shape`, whatever the device, else the reason why not."""
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} heads cannot share {shape.num_kv_heads} KV heads evenly"
    if shape.alibi_slopes is not None and len(shape.alibi_slopes) != shape.num_heads:
        return f"there are {len(shape.alibi_slopes)} ALiBi slopes for {shape.num_heads} heads"
    if shape.block_size.bit_count() != 1:
        return f"its kernels take blocks of 2^n tokens, not of {shape.block_size}"
    if shape.dtype == torch.float32:
        if shape.head_size > 256:
            return f"head size {shape.head_size} is above 256"
        if shape.cache_dtype not in (torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
            return f"a KV cache of {shape.cache_dtype} does not go with queries of {shape.dtype}"
        return None
    return decode_reason(shape.dtype, shape.head_size, shape.cache_dtype)
