"""The interface of an attention backend: five methods for CUDA kernels with graphs, native CPU kernels, plain torch.

A layer's cache is a strided view `kv: [num_blocks, 2, num_kv_heads, block_size, head_size]` of the pool, K at index 0
of the second axis and V at 1. Only the last axis is sure to have stride 1.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_lite.attention.metadata import AttentionMetadata
from vllm_lite.kernels.ops import Rotation


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
    kv_dtype: torch.dtype | None = None
    """Type of the cache: None = `dtype`; in float8 what is stored is K / k_scale and V / v_scale, saturated; others
    have no scales."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    soft_cap: float = 0.0
    """Scores become cap * tanh(score / cap), after scaling and before ALiBi; 0 = no cap."""
    alibi_slopes: tuple[float, ...] | None = None
    """Per head: slope * (key position - query position) is added to the score (Press et al. 2022)."""
    max_seq_len: int | None = None
    """The longest that a sequence may become, where it is known: backends choose sizes by it once and for all."""

    def __post_init__(self) -> None:
        if (self.k_scale, self.v_scale) != (1.0, 1.0) and self.cache_dtype.itemsize > 1:
            raise ValueError(f"k_scale and v_scale are for float8 caches, not for {self.cache_dtype}")

    @property
    def scale(self) -> float:
        """Factor on the scores, 1 / sqrt(head_size)."""
        return float(self.head_size**-0.5)

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's Q, K and V of a step; rows may be strided, a row's heads stand side by side."""

    query: torch.Tensor  # [num_tokens, num_heads, head_size]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_size]
    value: torch.Tensor  # [num_tokens, num_kv_heads, head_size]
    rotation: Rotation | None = None
    """How far Q and K still have to be turned, before K is stored; None = not at all."""


class AttentionBackend(Protocol):
    """One way to compute paged attention. Stateless between steps: what a step needs is in `metadata.plan`.

    Under a CUDA graph `write_kv` and `attend` are captured; the other methods run outside of it.
    """

    graph_safe: bool
    """Whether graphs of its device may replay it for other steps than the one it was captured with: what changes from
    step to step is read from memory by what was recorded, and never by Python."""

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
        heads: Heads,
        kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size]
        metadata: AttentionMetadata,
        group: int,
    ) -> None:
        """Turn Q and K in place by `heads.rotation` and store K and V at their slots; PAD_SLOT's are not stored."""
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
