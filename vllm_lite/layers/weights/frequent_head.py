"""FrequentHead: an LM head that can score only a part of the vocabulary, for drafts."""

from collections.abc import Collection

import torch

from vllm_lite.kernels.cpu.weights.file_packer import Packed
from vllm_lite.layers.weights.embedding import LMHead
from vllm_lite.layers.weights.matmul import Matmul, keep_rows, make_matmul, packs
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack


class FrequentHead(LMHead):
    """An LM head in pieces; those of infrequent words may be skipped, and their tokens are then never drafted.

    Only without tensor parallelism, and from a tensor that is dense in the checkpoint.
    """

    def __init__(self, whole: LMHead, words: tuple[range, ...], rest: tuple[range, ...]) -> None:
        """`whole`: the unloaded head that this one replaces. `words`, `rest`: ids of the frequent and of the other
        tokens."""
        super().__init__(whole.embedding, tied=whole.tied, quantization=whole.quantization, exact_rows=whole.exact_rows)
        self.words, self.rest = words, rest
        self.is_whole = True
        """Whether all tokens are scored."""
        self._pieces: dict[range, Matmul] = {}

    def load(self, *weights: torch.Tensor | Packed) -> None:
        """`weights`: one for each piece, frequent words first: [tokens of the piece, hidden_size]."""
        for piece, weight in zip((*self.words, *self.rest), weights, strict=True):
            matmul = make_matmul(weight, None, self.quantization)
            self._pieces[piece] = keep_rows(matmul) if self.exact_rows else matmul

    def group(self, name: str) -> WeightGroup:
        """Request the checkpoint's matrix `name`, in pieces."""
        table = self.embedding
        slot, packed_as = table.slot(name), packs(table.dtype, table.device, self.quantization)
        slots = (
            slot._replace(start=(piece.start, 0), size=(len(piece), slot.size[1]))
            for piece in (*self.words, *self.rest)
        )
        return WeightGroup(
            tuple(WeightStack((part,), table.dtype, table.device, packed_as=packed_as) for part in slots), self.load
        )

    @property
    def columns(self) -> Collection[slice]:
        scored = (*self.words, *self.rest) if self.is_whole else self.words
        return [slice(piece.start, piece.stop) for piece in scored]

    def forward(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """See LMHead.forward. Columns of tokens that are not scored are left unchanged."""
        for piece in (*self.words, *self.rest) if self.is_whole else self.words:
            self._pieces[piece].forward(hidden, out.narrow(1, piece.start, len(piece)))
