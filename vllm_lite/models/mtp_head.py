"""The MTP head of a loaded model: one or two layers that predict the token after the next from a hidden state."""

from collections.abc import Iterator

import torch

from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.mtp_head import MTPNames
from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup
from vllm_lite.models.decoder import Decoder, Layer


class MTPHead(Decoder):
    """A decoder of few layers with the embedding and LM head of the model.

    The row of token t uses the hidden state of the token before it, from `given`. Its output is the hidden state for
    the token that is drafted from it.
    """

    given: torch.Tensor
    """Hidden states of the tokens before those of the next forward pass: [num_tokens, hidden_size]."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int, model: Decoder, names: MTPNames) -> None:
        self._model = model
        self._head_names = names
        super().__init__(parts, max_model_len, max_num_tokens)
        self.embedding, self.lm_head = model.embedding, model.lm_head
        self.embedding_norm, self.hidden_norm = parts.norm(), parts.norm()
        size = parts.spec.hidden_size
        self.fc = parts.linear(Split.whole(2 * size), Split.whole(size), bias=False)
        self._joined = torch.zeros(max_num_tokens, 2 * size, dtype=parts.dtype, device=parts.device)
        self.given = torch.zeros(max_num_tokens, size, dtype=parts.dtype, device=parts.device)

    def make_layer(self, parts: Parts, index: int) -> Layer:
        return self._model.make_layer(parts, index)

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        """See Decoder.embed."""
        super().embed(batch, rows)
        size, joined = self.spec.hidden_size, self._joined[: batch.num_tokens]
        self.embedding_norm.forward(rows.residual, out=joined[:, :size])
        self.hidden_norm.forward(self.given[: batch.num_tokens], out=joined[:, size:])
        self.fc.forward(joined, out=rows.residual)

    def weight_groups(self) -> Iterator[WeightGroup]:
        """Tensors that belong to the head, not to the model."""
        names = self._head_names
        yield self.embedding_norm.group(names.embedding_norm)
        yield self.hidden_norm.group(names.hidden_norm)
        yield self.fc.group(names.fc)
        for layer, prefix in zip(self.layers, names.layers, strict=True):
            yield from layer.weight_groups(prefix)
        yield self.norm.group(names.norm)

    def ignores(self, name: str) -> bool:  # noqa: ARG002 (the loader's)
        """The model has been loaded from the same files, and has found them complete."""
        return True
