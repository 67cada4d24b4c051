"""Per-layer vectors of tokens: for each layer a vector of a table, and a projection of the token's embedding."""

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.buffers import PerLayerRows, StepRows
from vllm_lite.layers.norm import WideNorm
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup


class PerLayerVectors:
    """(norm(projection(x) / sqrt(hidden_size)) + sqrt(size) * table[token]) / sqrt(2), with a norm over each layer's.

    One table has the vectors of all layers, and ranks share its tokens.
    """

    def __init__(self, parts: Parts, vocabulary: Split) -> None:
        spec = parts.spec
        self.size, self.ops = spec.per_layer_size, ops_for(parts.device)
        width = spec.num_layers * self.size
        self.table = parts.embedding(vocabulary, width)
        self.projection = parts.linear(Split.whole(spec.hidden_size), Split.whole(width), bias=False)
        # A norm of x / sqrt(n) is one of x with n times the epsilon.
        norm = replace(spec.norm, eps=spec.norm.eps * spec.hidden_size)
        self.norm = WideNorm(self.size, norm, device=parts.device)

    def forward(self, token_ids: torch.Tensor, x: torch.Tensor, rows: PerLayerRows) -> None:
        """token_ids: int [num_tokens], x: [num_tokens, hidden_size] -> the latter half of rows.gated."""
        size = self.size
        self.table.forward(token_ids, out=rows.looked_up)
        self.projection.forward(x, out=rows.projected)
        vectors = rows.gated.view(-1, 2 * size)[:, size:]  # [num_tokens * num_layers, size]
        self.norm.forward(rows.projected.view(-1, size), out=vectors)
        self.ops.scale(rows.looked_up, (size / 2) ** 0.5)
        self.ops.add(vectors, rows.looked_up.view(-1, size))

    def weight_groups(self) -> Iterator[WeightGroup]:
        yield self.table.group("model.embed_tokens_per_layer")
        yield self.projection.group("model.per_layer_model_projection")
        (stack,) = self.norm.group("model.per_layer_projection_norm").stacks
        yield WeightGroup((stack,), lambda weight: self.norm.load(weight * 0.5**0.5))


class PerLayerBlock:
    """norm(projection(activation(gate(x)) * the layer's vector of the token)). Every rank computes all of it."""

    def __init__(self, parts: Parts, layer: int) -> None:
        spec = parts.spec
        self.layer, self.size, self.activation = layer, spec.per_layer_size, spec.activation
        self.ops = ops_for(parts.device)
        hidden, inner = Split.whole(spec.hidden_size), Split.whole(self.size)
        self.gate = parts.linear(hidden, inner, bias=False)
        self.projection = parts.linear(inner, hidden, bias=False)
        self.norm = parts.norm()

    def forward(self, rows: StepRows) -> None:
        """Write to rows.hidden the term that is to be added to rows.residual."""
        own = rows.per_layer
        if own is None:
            raise ValueError("the buffers were made for a model without vectors for each layer")
        gated = own.gated[:, self.layer]
        self.gate.forward(rows.residual, out=gated[:, : self.size])
        self.ops.activate_and_mul(self.activation, gated, own.activated)
        self.projection.forward(own.activated, out=rows.hidden)
        self.norm.forward(rows.hidden, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "model.layers.0."."""
        yield self.gate.group(f"{prefix}per_layer_input_gate")
        yield self.projection.group(f"{prefix}per_layer_projection")
        yield self.norm.group(f"{prefix}post_per_layer_input_norm")
