"""The interface of an attention backend: five methods for CUDA kernels with graphs, native CPU kernels, plain torch.

A layer's cache is a strided view `kv: [num_blocks, 2, num_kv_heads, block_size, head_size]` of the pool, K at index 0
of the second axis and V at 1. Only the last axis is sure to have stride 1.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_lite.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is the same in every attention layer of a model, and what a backend is made for."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = (None,)
    """Per KV group how many tokens a query sees, itself included; None = all before it."""

    @property
    def scale(self) -> float:
        """Factor on the scores, 1 / sqrt(head_size)."""
        return float(self.head_size**-0.5)


class AttentionBackend(Protocol):
    """One way to compute paged attention. Stateless between steps: what a step needs is in `metadata.plan`.

    Under a CUDA graph `write_kv` and `attend` are captured; the other methods run outside of it.
    """

    def __init__(self, shape: AttentionShape) -> None: ...

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        """None when this backend can serve `shape`, else the reason why not, as a clause for an error message."""
        ...

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """Peak bytes of scratch memory that a step within these limits needs, to be left free beside the KV cache."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Fill `metadata.plan` with all that the layers of this step can share. Once per step, before the forward."""
        ...

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size], rows may be strided
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_size], rows may be strided
        kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size]
        metadata: AttentionMetadata,
        group: int,
    ) -> None:
        """Store the step's K and V at their slots; tokens with PAD_SLOT are skipped."""
        ...

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
        kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size]
        metadata: AttentionMetadata,
        group: int,
        out: torch.Tensor,  # [num_tokens, num_heads, head_size]
    ) -> None:
        """Causal attention of each sequence's rows over its cached tokens into `out`; padding rows become zero.

        With a window the query at position i sees the positions (i - window, i]. Table entries of blocks that no row of
        the step sees name blocks that may belong to others by now: what is there must not even be multiplied by zero.
        """
        ...
