"""FrequentHead: an LM head that can score only a part of the vocabulary, for drafts."""

from collections.abc import Collection

import torch

from vllm_lite.checkpoint.tensors.weight_bytes import COPY
from vllm_lite.kernels.cpu.weights.file_packer import Packed
from vllm_lite.layers.weights.embedding import LMHead
from vllm_lite.layers.weights.matmul import Matmul, keep_rows, make_matmul, packs
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack


class FrequentHead(LMHead):
    """An LM head in pieces of 4 bits; those of infrequent words may be skipped: their tokens are then never drafted.

    Only without tensor parallelism, and from a tensor that is dense in the checkpoint.
    """

    def __init__(
        self,
        like: LMHead,
        words: tuple[range, ...],
        rest: tuple[range, ...] = (),
        whole: LMHead | None = None,
    ) -> None:
        """`like`: the head that this one replaces. `words`, `rest`: ids of the frequent and of the other tokens.
        `whole`: a loaded head that scores all tokens, in place of `rest`."""
        super().__init__(like.embedding, tied=like.tied, quantization=COPY, exact_rows=like.exact_rows)
        self.words, self.rest, self.whole = words, rest, whole
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
        if self.is_whole and self.whole is not None:
            return self.whole.columns
        scored = (*self.words, *self.rest) if self.is_whole else self.words
        return [slice(piece.start, piece.stop) for piece in scored]

    def forward(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """See LMHead.forward. Columns of tokens that are not scored are left unchanged."""
        if self.is_whole and self.whole is not None:
            self.whole.forward(hidden, out)
            return
        for piece in (*self.words, *self.rest) if self.is_whole else self.words:
            self._pieces[piece].forward(hidden, out.narrow(1, piece.start, len(piece)))
