"""Token embedding and LM head; one tensor serves both when they are tied."""

import torch

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.linear import PackedWeight, look_up
from vllm_lite.layers.matmul import Matmul, NativeMatmul, Quantization, copies, make_matmul
from vllm_lite.layers.weight_slot import WeightGroup, WeightStack, whole_slot


class Embedding:
    """Looks up token vectors: [vocab_size, hidden_size]."""

    weight: torch.Tensor  # by `load`, if not `share`

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = device
        self.packed: PackedWeight | None = None
        self.native = device.type == "cpu" and cpu.available()

    def load(self, weight: torch.Tensor) -> None:
        """Keep `weight`: [vocab_size, hidden_size]."""
        self.weight = weight

    def share(self, packed: PackedWeight) -> None:
        """Look up in the LM head's packed weight, which has the same rows, and have none of one's own.

        That takes 4 us for each token in place of 0.3, and saves a copy of what is often a quarter of a small model.
        """
        self.packed = packed

    def group(self, name: str) -> WeightGroup:
        """Ask for the checkpoint tensor `<name>.weight`."""
        slot = whole_slot(f"{name}.weight", self.vocab_size, self.hidden_size)
        return WeightGroup((WeightStack((slot,), self.dtype, self.device),), self.load)

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """token_ids: int [num_tokens], out: [num_tokens, hidden_size]. Ids outside the vocabulary: IndexError."""
        if self.packed is not None:
            self.packed.rows(token_ids, out)
        elif not (self.native and look_up(self.weight, token_ids, out)):
            torch.index_select(self.weight, 0, token_ids, out=out)


class LMHead:
    """Scores every token of the vocabulary: logits = hidden W^T, with W: [vocab_size, hidden_size].

    A tied one is loaded together with the embedding, from the same tensor.
    """

    matmul: Matmul  # by `load`

    def __init__(self, embedding: Embedding, *, tied: bool, quantization: Quantization | None = None) -> None:
        self.embedding = embedding
        self.tied = tied
        self.quantization = quantization

    def load(self, weight: torch.Tensor) -> None:
        """weight: [vocab_size, hidden_size]. A tied one is the embedding's, if that cannot look up in what is made."""
        self.matmul = make_matmul(weight, None, self.quantization)
        if self.tied and isinstance(self.matmul, NativeMatmul) and self.quantization is None:
            self.embedding.share(self.matmul.packed)
        elif self.tied:
            self.embedding.load(weight)

    def group(self, name: str) -> WeightGroup:
        """Ask for the checkpoint tensor `<name>.weight`, which is dense in all quantized checkpoints."""
        table = self.embedding
        slot = whole_slot(f"{name}.weight", table.vocab_size, table.hidden_size)
        lent = copies(table.dtype, table.device) and not (self.tied and self.quantization)
        return WeightGroup((WeightStack((slot,), table.dtype, table.device, lent),), self.load)

    def forward(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden: [num_rows, hidden_size], out: float32 [num_rows, vocab_size]."""
        self.matmul.forward(hidden, out)
