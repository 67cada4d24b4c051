"""An EAGLE-3 head of a loaded model: one layer that predicts the token after the next from three hidden states."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.eagle_head import EagleSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ModelError
from vllm_lite.kernels.cpu.weights.linear import look_up
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.attention.attention_block import Attention, AttentionBlock
from vllm_lite.layers.attention.qkv_layout import QKVSplits
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.adapted_head import Which
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot
from vllm_lite.models.decoder import Decoder, Layer


class WideAttention(AttentionBlock):
    """Attention whose input is two concatenated vectors of the hidden size."""

    def make_projections(self, parts: Parts, layer: int, splits: QKVSplits) -> None:  # noqa: ARG002
        self.qkv = parts.linear(Split.whole(2 * parts.spec.hidden_size), *splits, bias=parts.spec.qkv_bias)
        self.qk_norm = None


class EagleLayer(DecoderLayer):
    """The head's layer. Its attention reads `joined`, and adds to the hidden states in rows.residual."""

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
    """Wraps a layer of the model to copy its residual stream."""

    def __init__(self, layer: Layer, out: torch.Tensor) -> None:
        self._layer, self._out, self._ops = layer, out, ops_for(out.device)  # out: [max_num_tokens, hidden_size]
        self.write, self.attend, self.weight_groups = layer.write, layer.attend, layer.weight_groups

    @property
    def attention(self) -> Attention | None:
        return self._layer.attention

    def combine(self, rows: StepRows) -> None:
        """Run the layer, and copy rows.residual plus the layer's output, which is still to be added to it."""
        self._layer.combine(rows)
        out = self._out[: len(rows.hidden)]
        self._ops.copy(rows.residual, out)
        self._ops.add(out, rows.hidden)


class EagleHead(Decoder):
    """A decoder of one layer with the model's embedding, and an LM head for a part of the vocabulary.

    As in an MTP head, the row of token t uses the vector of `given` for the token before it.
    """

    layer: ClassVar[type[Layer]] = EagleLayer
    tokens: torch.Tensor
    """Token of each row of the LM head, ascending: int64 [num_tokens]."""
    _places: torch.Tensor
    """Column of `_scores` for each of this rank's tokens; the last column for tokens without a row in the head."""
    given: torch.Tensor
    """Vectors used as hidden states before the tokens of the next forward pass: [num_tokens, hidden_size]."""

    def __init__(self, parts: Parts, sizes: tuple[int, int], model: Decoder, eagle: EagleSpec, prefix: str) -> None:
        """`sizes`: max_model_len and max_num_tokens. `prefix`: of the layer's tensors."""
        super().__init__(parts, *sizes)
        size = parts.spec.hidden_size

        def zeros(width: int) -> torch.Tensor:
            return torch.zeros(sizes[1], width, dtype=parts.dtype, device=parts.device)

        self.embedding, self.embedding_scale, self._prefix = model.embedding, model.embedding_scale, prefix
        self.fc = parts.linear(Split.whole(3 * size), Split.whole(size), bias=False)
        self.head = parts.linear(Split.whole(size), Split.whole(eagle.num_tokens), bias=False)
        self._take_tokens(torch.arange(eagle.num_tokens, device=parts.device))
        self.given = zeros(size)
        own: Any = self.layers[0]
        self._own: EagleLayer = own
        self._own.joined = zeros(2 * size)
        self._tapped = zeros(3 * size)
        self.keep(0)
        for place, index in enumerate(eagle.taps(model.spec.num_layers)):
            model.layers[index] = Tapped(model.layers[index], self._tapped[:, place * size : (place + 1) * size])

    def fused(self, num_tokens: int) -> torch.Tensor:  # [num_tokens, hidden_size], new
        """Project the three hidden states that the tapped layers copied in the latest step to one vector per token."""
        out = torch.empty_like(self.given[:num_tokens])
        self.fc.forward(self._tapped[:num_tokens], out=out)
        return out

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        """See Decoder.embed."""
        super().embed(batch, rows)
        layer, size, count = self._own, self.spec.hidden_size, batch.num_tokens
        layer.input_norm.forward(rows.residual, out=layer.joined[:count, :size])
        layer.hidden_norm.forward(self.given[:count], out=layer.joined[:count, size:])
        self.ops.copy(self.given[:count], rows.residual)

    def last_norm(self, rows: StepRows) -> None:
        """Write the unnormed sum to rows.hidden: the next draft continues from it, and `logits` norms it."""
        self.ops.add(rows.hidden, rows.residual)

    @torch.inference_mode()
    def logits(
        self,
        hidden: torch.Tensor,
        out: torch.Tensor | None = None,
        which: Which | None = None,  # noqa: ARG002 - no row has an adapter
    ) -> torch.Tensor:
        """See Decoder.logits; tokens without a row in the head get -inf."""
        out = self.empty_logits(len(hidden)) if out is None else out
        count = len(hidden)
        normed, known = self._kept if count <= len(self._kept[0]) else self._scores(count)
        self.norm.forward(hidden, out=normed[:count])
        self.head.forward(normed[:count], out=known[:count, :-1])
        for row, own in zip(known[:count], out[:, self.own_columns], strict=True):
            if not look_up(row[:, None], self._places, own[:, None]):
                own.copy_(row[self._places])
        return out

    def keep(self, num_rows: int) -> None:
        """Keep memory for the scores of `num_rows` rows, which a recorded `logits` needs."""
        self._kept = self._scores(num_rows)

    def _scores(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for normed hidden states, [num_rows, hidden_size], and for the scores of the head's tokens and in the
        last column of all others, float32 [num_rows, num_tokens + 1]."""
        device, count = self.tokens.device, len(self.tokens) + 1
        normed = torch.zeros(num_rows, self.spec.hidden_size, dtype=self.given.dtype, device=device)
        return normed, torch.full((num_rows, count), -torch.inf, device=device)

    def _take_tokens(self, tokens: torch.Tensor) -> None:  # int64 [num_tokens]
        """Set the tokens of the head's rows."""
        self.tokens = tokens
        places = torch.full((self.spec.vocab_size,), len(tokens), dtype=torch.int64, device=tokens.device)
        places[tokens] = torch.arange(len(tokens), device=tokens.device)
        self._places = places[self.own_columns].contiguous()

    def weight_groups(self) -> Iterator[WeightGroup]:
        """Tensors that belong to the head, not to the model."""
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
        self._take_tokens(tokens)

    def ignores(self, name: str) -> bool:
        """See Decoder.ignores: the mask of the head's tokens, and a copy of the model's embedding."""
        return name in ("t2d", "model.embed_tokens.weight") or super().ignores(name)
