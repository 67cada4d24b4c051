"""The attention layer: writes a step's K and V to the paged cache, then lets the backend attend over it."""

import torch

from vllm_lite.attention.backend import AttentionBackend, Heads
from vllm_lite.attention.step_batch import AttentionMetadata
from vllm_lite.layers.buffers import Rows


class Attention:
    """Causal self-attention of one layer, which belongs to KV group `group`."""

    def __init__(self, group: int) -> None:
        self.group = group

    def forward(
        self,
        rows: Rows,
        kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,
        backend: AttentionBackend,
    ) -> None:
        """rows.query, rows.key, not yet turned, and rows.value -> rows.attended_heads, through the layer's cache."""
        backend.write_kv(Heads(rows.query, rows.key, rows.value, rows.rotation), kv, metadata, self.group)
        backend.attend(rows.query, kv, metadata, self.group, rows.attended_heads)
