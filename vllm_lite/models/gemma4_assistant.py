"""An assistant of Gemma 4: few layers that draft for a loaded model, and attend to its K and V."""

from collections.abc import Iterator

import torch

from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.gemma4 import Gemma4


class Gemma4Assistant(Gemma4):
    """Gemma 4's layers with inputs of the model's hidden size, and their own head."""

    given: torch.Tensor
    """Vectors used as the model's hidden states before the tokens of the next pass: [num_tokens, model's size]."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int, model: Decoder) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        self._model = model
        whole, own = Split.whole(model.spec.hidden_size), Split.whole(parts.spec.hidden_size)
        self.pre_projection = parts.linear(Split.whole(2 * whole.size), own, bias=False)
        self.post_projection = parts.linear(own, whole, bias=False)
        self._joined = torch.zeros(max_num_tokens, 2 * whole.size, dtype=parts.dtype, device=parts.device)
        self.given = torch.zeros(max_num_tokens, whole.size, dtype=parts.dtype, device=parts.device)

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        """See Decoder.embed."""
        model, count = self._model, batch.num_tokens
        size, joined = model.spec.hidden_size, self._joined[:count]
        model.embedding.forward(batch.token_ids, out=joined[:, :size])
        self.ops.scale(joined[:, :size], model.embedding_scale)
        self.ops.copy(self.given[:count], joined[:, size:])
        self.pre_projection.forward(joined, out=rows.residual)

    def weight_groups(self) -> Iterator[WeightGroup]:
        """See Decoder.weight_groups."""
        yield from super().weight_groups()
        yield self.pre_projection.group("pre_projection")
        yield self.post_projection.group("post_projection")

    def ignores(self, name: str) -> bool:
        """See Decoder.ignores: groups of tokens by which published code chooses tokens to score."""
        return name.startswith("masked_embedding.") or super().ignores(name)
