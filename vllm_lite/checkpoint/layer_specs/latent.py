"""Specs of the projections of latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2). No torch.

K and V of all heads are derived from one vector, the latent. The cache keeps it for each token, and a rotated part of K
that all heads share.
"""

from typing import Literal

import msgspec


class IndexSpec(msgspec.Struct, frozen=True):
    """The index of sparse attention (DSA; DeepSeek-AI 2025), which chooses the tokens that a query attends to.

    The index's heads score each cached token; the relu of each head's score is weighted by the query.
    """

    num_heads: int
    head_size: int
    """Elements of a head, and of a token's key in the cache; the first of them are rotated like Q."""
    count: int
    """Number of tokens that a query attends to: those with the highest sums, or all if there are fewer."""
    interleaved: bool = False
    """Whether element 2 i is rotated with element 2 i + 1 in the checkpoint, as in Rope."""
    is_shared: bool = False
    """Whether the layer has no index of its own, and uses the choice of the last layer before it that has one."""

    def parameters(self, query_rank: int, hidden_size: int) -> int:
        """Number of parameters of its projections and of the norm on its keys."""
        queries = query_rank * self.num_heads * self.head_size
        return 0 if self.is_shared else queries + hidden_size * (self.head_size + self.num_heads) + 2 * self.head_size


class LatentSpec(msgspec.Struct, frozen=True):
    """Sizes of a latent attention: Q of the hidden state, K and V of the latent."""

    rank: int
    """Elements of the latent."""
    nope_size: int
    """Elements of a head of Q and K that are not rotated."""
    rope_size: int
    """Rotated elements of a head of Q and K; those of K are common to all heads."""
    value_size: int
    """Elements of a head of V."""
    query_rank: int | None = None
    """Elements of the query latent, from which Q of all heads is derived; None = Q is projected from the hidden
    state."""
    norm_eps: float = 1e-6
    """Epsilon of the norms on both latents."""
    stored: Literal["together", "by head"] = "together"
    """Storage of the expansion of the latent to K and V: in one matrix, kv_b_proj, or two matrices for each head:
    k_b_proj.N [rank, nope_size], K's transposed, and v_b_proj.N [value_size, rank]."""

    index: IndexSpec | None = None
    """The index that chooses a query's tokens; None = it attends to all earlier ones."""

    @property
    def index_size(self) -> int:
        """Elements of a token's index key in the cache, after the others."""
        return 0 if self.index is None or self.index.is_shared else self.index.head_size

    @property
    def query_size(self) -> int:
        """Elements of a head of Q before absorption into the latent space."""
        return self.nope_size + self.rope_size

    @property
    def cached_size(self) -> int:
        """Elements of a token in the cache that its heads attend to."""
        return self.rank + self.rope_size

    def projected_size(self, num_heads: int) -> int:
        """Output elements of the first projections per token: Q or the query latent, the cached elements, and the
        weights of the index's heads."""
        weights = self.index.num_heads if self.index is not None and self.index_size else 0
        return self.first_size(num_heads) + self.cached_size + self.index_size + weights

    def first_size(self, num_heads: int) -> int:
        """Elements of Q, or of the query latent."""
        return self.query_rank or num_heads * self.query_size

    def other_sizes(self, num_heads: int) -> tuple[int, int, int]:
        """Elements of further buffers per token: Q, if there is a query latent; Q in latent space, with the rotated
        part; and the heads' outputs as elements of V."""
        expanded = num_heads * self.query_size if self.query_rank else 0
        return expanded, num_heads * self.cached_size, num_heads * self.value_size

    def parameters(self, num_heads: int, hidden_size: int) -> int:
        """Number of parameters of all projections and norms, including the output's."""
        query = num_heads * self.query_size
        queries = self.query_rank * (hidden_size + 1 + query) if self.query_rank else hidden_size * query
        keys = hidden_size * self.cached_size + self.rank
        expansion = self.rank * num_heads * (self.nope_size + self.value_size)
        expansion += 0 if self.index is None else self.index.parameters(self.query_rank or 0, hidden_size)
        return queries + keys + expansion + num_heads * self.value_size * hidden_size
