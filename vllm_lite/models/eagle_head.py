"""An EAGLE-3 head of a loaded model: one layer that predicts the token behind the next from three hidden states."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.eagle_head import EagleSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ModelError
from vllm_lite.layers.attention.attention_block import Attention, AttentionBlock
from vllm_lite.layers.attention.qkv_layout import QKVSplits
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot
from vllm_lite.models.decoder import Decoder, Layer


class WideAttention(AttentionBlock):
    """Reads two vectors of the hidden size, side by side."""

    def make_projections(self, parts: Parts, layer: int, splits: QKVSplits) -> None:  # noqa: ARG002
        self.qkv = parts.linear(Split.whole(2 * parts.spec.hidden_size), *splits, bias=parts.spec.qkv_bias)
        self.qk_norm = None


class EagleLayer(DecoderLayer):
    """The layer. Its attention reads `joined`, and adds to the hidden states in rows.residual."""

    attention_block: ClassVar[type[Attention]] = WideAttention
    joined: torch.Tensor
    """Normed embeddings and hidden states of the step: [num_tokens, 2 * hidden_size]."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.hidden_norm = parts.norm()

    def write(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        self.attention.write(self.joined[: batch.num_tokens], rows, kv, batch, backend)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        yield from super().weight_groups(prefix)
        yield self.hidden_norm.group(f"{prefix}hidden_norm")


class Tapped:
    """A layer of the model, which also copies the residual stream that it leaves."""

    def __init__(self, layer: Layer, out: torch.Tensor) -> None:
        self._layer, self._out = layer, out  # [max_num_tokens, hidden_size]
        self.write, self.attend, self.weight_groups = layer.write, layer.attend, layer.weight_groups

    @property
    def attention(self) -> Attention | None:
        return self._layer.attention

    def combine(self, rows: StepRows) -> None:
        """As the layer's. What it gives back is still to be added to the stream."""
        self._layer.combine(rows)
        torch.add(rows.residual, rows.hidden, out=self._out[: len(rows.hidden)])


class EagleHead(Decoder):
    """A decoder of one layer, which looks tokens up in the model's table and has an LM head for some of them.

    As an MTP head's, the row of token t computes with what `given` has of the token before it.
    """

    layer: ClassVar[type[Layer]] = EagleLayer
    given: torch.Tensor
    """What stands for the hidden states before the tokens of the next forward pass: [num_tokens, hidden_size]."""

    def __init__(self, parts: Parts, sizes: tuple[int, int], model: Decoder, eagle: EagleSpec, prefix: str) -> None:
        """`sizes`: the longest sequence, and the most tokens of a step. `prefix`: of the layer's tensors."""
        super().__init__(parts, *sizes)
        size = parts.spec.hidden_size

        def zeros(width: int) -> torch.Tensor:
            return torch.zeros(sizes[1], width, dtype=parts.dtype, device=parts.device)

        self.embedding, self.embedding_scale, self._prefix = model.embedding, model.embedding_scale, prefix
        self.fc = parts.linear(Split.whole(3 * size), Split.whole(size), bias=False)
        self.head = parts.linear(Split.whole(size), Split.whole(eagle.num_tokens), bias=False)
        self.tokens = torch.arange(eagle.num_tokens, device=parts.device)
        """The tokens of the head's rows, in order: int64 [num_tokens]."""
        self.given = zeros(size)
        own: Any = self.layers[0]
        self._own: EagleLayer = own
        self._own.joined = zeros(2 * size)
        self._tapped = zeros(3 * size)
        for place, index in enumerate(eagle.taps(model.spec.num_layers)):
            model.layers[index] = Tapped(model.layers[index], self._tapped[:, place * size : (place + 1) * size])

    def fused(self, num_tokens: int) -> torch.Tensor:  # [num_tokens, hidden_size], new
        """Join what the model's layers have left of the latest step."""
        out = torch.empty_like(self.given[:num_tokens])
        self.fc.forward(self._tapped[:num_tokens], out=out)
        return out

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        """As Decoder's."""
        super().embed(batch, rows)
        layer, size, count = self._own, self.spec.hidden_size, batch.num_tokens
        layer.input_norm.forward(rows.residual, out=rows.hidden)
        layer.joined[:count, :size] = rows.hidden
        layer.hidden_norm.forward(self.given[:count], out=rows.hidden)
        layer.joined[:count, size:] = rows.hidden
        rows.residual.copy_(self.given[:count])

    def last_norm(self, rows: StepRows) -> None:
        """Leave the sum: the next draft goes on from it, and `logits` norms it."""
        self.ops.add(rows.hidden, rows.residual)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As Decoder's; tokens that the head does not know have no chance."""
        out = self.empty_logits(len(hidden)) if out is None else out
        normed = torch.empty_like(hidden)
        self.norm.forward(hidden, out=normed)
        known = torch.empty(len(hidden), len(self.tokens), dtype=hidden.dtype, device=hidden.device)
        self.head.forward(normed, out=known)
        own = (self.tokens >= self.own_columns.start) & (self.tokens < self.own_columns.stop)
        out[:, self.own_columns] = -torch.inf
        out[:, self.tokens[own]] = known[:, own].float()
        return out

    def weight_groups(self) -> Iterator[WeightGroup]:
        """The tensors that are the head's own."""
        yield self.fc.group("fc")
        yield from self._own.weight_groups(self._prefix)
        yield self.norm.group("model.norm")
        yield self.head.group("lm_head")
        if len(self.tokens) < self.spec.vocab_size:
            slot = whole_slot("d2t", len(self.tokens))
            yield WeightGroup((WeightStack((slot,), torch.int64, self.tokens.device),), self._take_offsets)

    def _take_offsets(self, offsets: torch.Tensor) -> None:  # int64 [num_tokens]
        tokens = self.tokens + offsets
        if not (int(tokens.min()) >= 0 and int(tokens.max()) < self.spec.vocab_size):
            raise ModelError(f"d2t names tokens {int(tokens.min())} to {int(tokens.max())} of {self.spec.vocab_size}")
        self.tokens = tokens

    def ignores(self, name: str) -> bool:
        """The mask of its tokens, and a copy of the model's table of token vectors."""
        return name in ("t2d", "model.embed_tokens.weight") or super().ignores(name)
