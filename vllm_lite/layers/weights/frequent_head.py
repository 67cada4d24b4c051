"""FrequentHead: an LM head that can score a part of the vocabulary alone, for drafts."""

from collections.abc import Collection

import torch

from vllm_lite.layers.weights.embedding import LMHead
from vllm_lite.layers.weights.matmul import Matmul, keep_rows, make_matmul
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack


class FrequentHead(LMHead):
    """An LM head in pieces, of which those of infrequent words may be left out: their tokens then have no chance.

    Of one rank, from a tensor that is dense in the checkpoint.
    """

    def __init__(self, whole: LMHead, words: tuple[range, ...], rest: tuple[range, ...]) -> None:
        """`whole`: a head that is not loaded, in whose place this one is. `words`, and `rest`: the numbers of all
        tokens, those of the frequent ones and the others."""
        super().__init__(whole.embedding, tied=whole.tied, quantization=whole.quantization, exact_rows=whole.exact_rows)
        self.words, self.rest = words, rest
        self.is_whole = True
        """Whether it scores all tokens."""
        self._pieces: dict[range, Matmul] = {}

    def load(self, weight: torch.Tensor) -> None:
        """weight: [vocab_size, hidden_size]."""
        for piece in (*self.words, *self.rest):
            matmul = make_matmul(weight[piece.start : piece.stop], None, self.quantization)
            self._pieces[piece] = keep_rows(matmul) if self.exact_rows else matmul

    def group(self, name: str) -> WeightGroup:
        """Ask for the checkpoint's matrix `name`."""
        table = self.embedding
        return WeightGroup((WeightStack((table.slot(name),), table.dtype, table.device),), self.load)

    @property
    def columns(self) -> Collection[slice]:
        scored = (*self.words, *self.rest) if self.is_whole else self.words
        return [slice(piece.start, piece.stop) for piece in scored]

    def forward(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """As LMHead's. Columns of tokens that it does not score are left as they are."""
        for piece in (*self.words, *self.rest) if self.is_whole else self.words:
            self._pieces[piece].forward(hidden, out.narrow(1, piece.start, len(piece)))
