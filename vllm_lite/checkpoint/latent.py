"""The projections of latent attention in numbers (MLA; DeepSeek-AI 2024, DeepSeek-V2). No torch.

K and V of all heads are made of one vector, the latent. It is what the cache keeps of a token, beside a part of K that
is rotated and common to all heads.
"""

from typing import Literal

import msgspec


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

    @property
    def query_size(self) -> int:
        """Elements of a head of Q, before it is multiplied into the space of the latent."""
        return self.nope_size + self.rope_size

    @property
    def cached_size(self) -> int:
        """Elements that the cache keeps of a token."""
        return self.rank + self.rope_size

    def projected_size(self, num_heads: int) -> int:
        """Elements that a token's first projections give: Q or what it is made of, then what the cache keeps."""
        return (self.query_rank or num_heads * self.query_size) + self.cached_size

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
        return queries + keys + expansion + num_heads * self.value_size * hidden_size
