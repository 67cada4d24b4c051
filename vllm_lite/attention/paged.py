"""Paged attention by the kernels of vLLM's paper, v1 and v2, over their split cache layout.

The kernels (csrc/cuda/paged_attention.cuh) take one query token per sequence (Kwon et al. 2023). So every row of a
step, including each token of a prompt's chunk, is a sequence to them: it ends at its own position and has the block
table of its real sequence. This is correct for any step and slow for long chunks; the backend `cuda` is the fast one. A
block has as many bytes as with any other backend; only the layout within a head differs, so blocks move alike.
"""

from dataclasses import dataclass

import torch

from vllm_lite.attention.backend import Attend, AttentionBackend, AttentionShape, Heads
from vllm_lite.attention.cuda import device_reason, own_launcher, scoring_of, scoring_with
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.kernels.cuda import cache_ops
from vllm_lite.kernels.cuda.attention.paged_attention import (
    BLOCK_SIZES,
    HEAD_SIZES,
    PARTITION_TOKENS,
    SplitCache,
    paged_attention,
)
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.cuda.launcher import CUDA_TYPES, FLOAT8, Launcher

MAX_ROWS = 256
"""Rows of one launch: v2 keeps a partial result of each row, head and partition."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The rows of a step, each as a sequence for the kernels."""

    seq_lens: torch.Tensor  # int32 [num_tokens], tokens that the row sees; 0 for padding
    block_tables: tuple[torch.Tensor, ...]  # per group: int32 [num_tokens, max_blocks]


class PagedBackend(AttentionBackend):
    """Attention for GPUs from sm_80 on: ALiBi, windows, soft caps, sinks, block-sparse patterns and float8 caches."""

    graph_safe = False  # `prepare` allocates anew for each step

    def __init__(self, shape: AttentionShape, launcher: Launcher | None = None) -> None:
        super().__init__(shape)
        self.launcher = launcher or own_launcher("paged")
        self.ops = CudaOps(self.launcher)
        self._scorings = [scoring_of(spec, shape) for spec in shape.groups]

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        return device_reason(shape, split_layout_reason)

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:  # noqa: ARG002
        """Bytes of v2's partial results in one launch, and of the rows' block tables."""
        shape, rows = self.shape, min(max_num_tokens, MAX_ROWS)
        num_partitions = -(-max_seq_len // PARTITION_TOKENS)
        max_blocks = -(-max_seq_len // shape.block_size)
        partial = max(spec.num_heads * (spec.head_size + 2) for spec in shape.groups)
        tables = max_num_tokens * (1 + len(shape.groups) * max_blocks)
        return 4 * (rows * num_partitions * partial + tables)

    def prepare(self, batch: StepBatch) -> None:
        starts, lens = batch.query_start_loc, batch.seq_lens
        rows = torch.arange(batch.num_tokens, dtype=starts.dtype, device=starts.device)
        owner = torch.searchsorted(starts[1:], rows, right=True)
        is_padding = owner >= batch.num_seqs
        owner = owner.clamp(max=batch.num_seqs - 1)
        seen = lens[owner] - (starts[owner + 1] - 1 - rows)
        seen = seen.masked_fill(is_padding, 0).clamp(min=0)
        tables = tuple(table[owner].contiguous() for table in batch.block_tables)
        batch.plan = _Plan(seen.to(torch.int32), tables)

    def write_kv(
        self, heads: Heads, kv: torch.Tensor, batch: StepBatch, group: int, scales: KVScales | None = None
    ) -> None:
        heads.turn(self.ops)
        slots, both = batch.slot_mapping[group], scales or self.shape.scales
        cache_ops.reshape_and_cache_x(self.launcher, heads.key, heads.value, split_views(kv), slots, both)

    def attend_layer(self, call: Attend, batch: StepBatch) -> None:
        plan: _Plan = batch.plan
        scoring = scoring_with(self._scorings[call.group], call.sinks, call.scales)
        keys, values = split_views(call.kv)
        for first in range(0, batch.num_tokens, MAX_ROWS):
            rows = slice(first, first + MAX_ROWS)
            tables, lens = plan.block_tables[call.group][rows], plan.seq_lens[rows]
            cache = SplitCache(keys, values, tables, lens, batch.max_seq_len)
            paged_attention(self.launcher, call.out[rows], call.query[rows], cache, scoring)


def split_views(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View a layer's cache in the split layout.

    kv: [num_blocks, 2, num_kv_heads, block_size, head_size], where a head of a block is contiguous. Returns keys
    [num_blocks, num_kv_heads, head_size / x, block_size, x] with x = 16 / itemsize, and values [num_blocks,
    num_kv_heads, head_size, block_size].
    """
    num_blocks, _, num_kv_heads, block_size, head_size = kv.shape
    block_stride, half_stride, head_stride = kv.stride()[:3]
    x, at = 16 // kv.element_size(), kv.storage_offset()
    keys = kv.as_strided(
        (num_blocks, num_kv_heads, head_size // x, block_size, x), (block_stride, head_stride, block_size * x, x, 1), at
    )
    values = kv.as_strided(
        (num_blocks, num_kv_heads, head_size, block_size), (block_stride, head_stride, block_size, 1), at + half_stride
    )
    return keys, values


def split_layout_reason(shape: AttentionShape) -> str | None:
    """None if there are kernels for `shape` on some device, else the reason why not."""
    if shape.block_size not in BLOCK_SIZES:
        return f"its kernels take blocks of {', '.join(map(str, BLOCK_SIZES))} tokens, not of {shape.block_size}"
    if shape.dtype not in CUDA_TYPES or shape.cache_dtype not in (shape.dtype, *FLOAT8):
        return f"a KV cache of {shape.cache_dtype} does not go with queries of {shape.dtype}"

    def reason(spec: AttentionSpec) -> str | None:
        if spec.value_size is not None:
            return "it has no latent attention, whose V is a part of K"
        if spec.head_size in HEAD_SIZES and spec.head_size * shape.cache_dtype.itemsize % 16 == 0:
            return None
        return f"its kernels take heads of {', '.join(map(str, HEAD_SIZES))}, not of {spec.head_size}"

    return shape.first_reason(reason, block_sparse=True)
