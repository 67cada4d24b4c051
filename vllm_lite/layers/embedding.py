"""Token embedding and LM head; one tensor serves both when they are tied."""

import torch

from vllm_lite.layers.onednn import pack, packed_linear


class Embedding:
    """Looks up token vectors in `weight`: [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """token_ids: int [num_tokens], out: [num_tokens, hidden_size]. Ids outside the vocabulary: IndexError."""
        torch.index_select(self.weight, 0, token_ids, out=out)


class LMHead:
    """Scores every token of the vocabulary: logits = hidden W^T, with `weight`: [vocab_size, hidden_size]."""

    def __init__(self, embedding: Embedding, *, tied: bool) -> None:
        self.tied = tied
        self.weight = embedding.weight if tied else torch.empty_like(embedding.weight)
        self.packed: torch.Tensor | None = None

    def finish_loading(self) -> None:
        """As `Linear.finish_loading`; a tied weight stays, as the embedding still looks up its rows."""
        self.packed = pack(self.weight)
        if self.packed is not None and not self.tied:
            self.weight = self.weight.new_empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_rows, hidden_size] -> a new tensor [num_rows, vocab_size] in the model's dtype.

        New, not preallocated: the sampler works on it in place, and its number of rows is not that of the tokens.
        """
        if self.packed is not None:
            return packed_linear(hidden, self.packed, None)
        return torch.mm(hidden, self.weight.t())
