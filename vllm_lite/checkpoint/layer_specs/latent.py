"""The projections of latent attention in numbers (MLA; DeepSeek-AI 2024, DeepSeek-V2). No torch.

K and V of all heads are made of one vector, the latent. It is what the cache keeps of a token, beside a part of K that
is rotated and common to all heads.
"""

from typing import Literal

import msgspec


class IndexSpec(msgspec.Struct, frozen=True):
    """The index of sparse attention (DSA; DeepSeek-AI 2025): which of the tokens before it a query attends to.

    Heads of an index score each cached token; relu of each head's score counts by a weight of the query's own.
    """

    num_heads: int
    head_size: int
    """Elements of a head, and of the key that the cache keeps of a token; the first of them are rotated as Q is."""
    count: int
    """A query attends to so many tokens, those with the highest sums, or to all where there are no more."""
    interleaved: bool = False
    """Whether element 2 i turns with element 2 i + 1 in the checkpoint, as Rope's."""
    is_shared: bool = False
    """Whether the layer has no index, and attends to what the last layer before it with one has chosen."""

    def parameters(self, query_rank: int, hidden_size: int) -> int:
        """Weights of its projections, and of the norm on its keys."""
        queries = query_rank * self.num_heads * self.head_size
        return 0 if self.is_shared else queries + hidden_size * (self.head_size + self.num_heads) + 2 * self.head_size


class LatentSpec(msgspec.Struct, frozen=True):
    """Sizes of a latent attention: Q of the hidden state, K and V of the latent."""

    rank: int
    """Elements of the latent."""
    nope_size: int
    """Elements of a head of Q and K that are not rotated."""
    rope_size: int
    """Elements of a head of Q and K that are, those of K once for all heads."""
    value_size: int
    """Elements of a head of V."""
    query_rank: int | None = None
    """Elements of the vector that Q of all heads is made of; None = Q is made of the hidden state."""
    norm_eps: float = 1e-6
    """What the norms on the latent and on that vector have for the model's."""
    stored: Literal["together", "by head"] = "together"
    """Whether a checkpoint has what makes K and V of the latent in one matrix, kv_b_proj, or two matrices for each
    head: k_b_proj.N [rank, nope_size], which is K's transposed, and v_b_proj.N [value_size, rank]."""

    index: IndexSpec | None = None
    """How a query chooses the tokens it attends to; None = it attends to all before it."""

    @property
    def index_size(self) -> int:
        """Elements of the index's key that the cache keeps of a token, behind the others."""
        return 0 if self.index is None or self.index.is_shared else self.index.head_size

    @property
    def query_size(self) -> int:
        """Elements of a head of Q, before it is multiplied into the space of the latent."""
        return self.nope_size + self.rope_size

    @property
    def cached_size(self) -> int:
        """Elements that the cache keeps of a token for its heads to attend to."""
        return self.rank + self.rope_size

    def projected_size(self, num_heads: int) -> int:
        """Elements that a token's first projections give: Q or what it is made of, then what the cache keeps, then
        the weights by which heads of an index count."""
        weights = self.index.num_heads if self.index is not None and self.index_size else 0
        return self.first_size(num_heads) + self.cached_size + self.index_size + weights

    def first_size(self, num_heads: int) -> int:
        """Elements of Q, or of what it is made of."""
        return self.query_rank or num_heads * self.query_size

    def other_sizes(self, num_heads: int) -> tuple[int, int, int]:
        """Elements of what else a token has on its way: Q, where it is not made of the hidden state; Q in the space of
        the latent, beside what is rotated; and what the heads get, as elements of V."""
        expanded = num_heads * self.query_size if self.query_rank else 0
        return expanded, num_heads * self.cached_size, num_heads * self.value_size

    def parameters(self, num_heads: int, hidden_size: int) -> int:
        """Weights of all projections and norms, the output's included."""
        query = num_heads * self.query_size
        queries = self.query_rank * (hidden_size + 1 + query) if self.query_rank else hidden_size * query
        keys = hidden_size * self.cached_size + self.rank
        expansion = self.rank * num_heads * (self.nope_size + self.value_size)
        expansion += 0 if self.index is None else self.index.parameters(self.query_rank or 0, hidden_size)
        return queries + keys + expansion + num_heads * self.value_size * hidden_size
