"""Token embedding and LM head; one tensor serves both when they are tied."""

import torch

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.linear import PackedWeight, look_up
from vllm_lite.layers.weight_form import DenseForm, NativeForm, Quantization, WeightForm, weight_form


class Embedding:
    """Looks up token vectors in `weight`: [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.packed: PackedWeight | None = None
        self.native = device.type == "cpu" and cpu.available()

    def share(self, packed: PackedWeight) -> None:
        """From now on look up in the LM head's packed weight, which has the same rows, and give up the own one.

        That takes 4 us for each token in place of 0.3, and saves a copy of what is often a quarter of a small model.
        """
        self.packed = packed
        self.weight = self.weight.new_empty(0)

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """token_ids: int [num_tokens], out: [num_tokens, hidden_size]. Ids outside the vocabulary: IndexError."""
        if self.packed is not None:
            self.packed.rows(token_ids, out)
        elif not (self.native and look_up(self.weight, token_ids, out)):
            torch.index_select(self.weight, 0, token_ids, out=out)


class LMHead:
    """Scores every token of the vocabulary: logits = hidden W^T, with `weight`: [vocab_size, hidden_size]."""

    def __init__(self, embedding: Embedding, *, tied: bool) -> None:
        self.embedding = embedding
        self.tied = tied
        self.vocab_size = embedding.weight.shape[0]
        self.weight = embedding.weight if tied else torch.empty_like(embedding.weight)
        self.form: WeightForm = DenseForm(self.weight, None)

    def finish_loading(self, quantization: Quantization | None = None) -> None:
        """As `Linear.finish_loading`. A tied weight stays for the embedding, if that cannot look up in the new form."""
        self.form = weight_form(self.weight, None, quantization)
        self.weight = self.weight.new_empty(0)
        if self.tied and isinstance(self.form, NativeForm) and quantization is None:
            self.embedding.share(self.form.packed)

    def forward(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden: [num_rows, hidden_size], out: float32 [num_rows, vocab_size]."""
        self.form.forward(hidden, out)
