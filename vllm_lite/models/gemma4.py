"""Gemma 4. Layers are Gemma 2's, and finally multiply the residual stream by a learned factor; mixtures have experts
beside each MLP, and small models per-layer vectors."""

from collections.abc import Iterator
from typing import ClassVar

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.layer_specs.gemma_vision import Gemma4VisionSpec
from vllm_lite.layers.attention.attention_block import Attention
from vllm_lite.layers.attention.shared_kv import SharedKVBlock
from vllm_lite.layers.buffers import ExpertRows, StepRows
from vllm_lite.layers.decoder_layer import SandwichLayer
from vllm_lite.layers.mlp import GatedMLP
from vllm_lite.layers.moe.experts import Router, SparseMLP, SparseNames
from vllm_lite.layers.norm import WideNorm
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.per_layer_vectors import PerLayerBlock, PerLayerVectors
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot
from vllm_lite.models.decoder import Layer
from vllm_lite.models.gemma import Gemma


class ScaledRouter(Router):
    """A router that norms its input, and scales it by a learned vector over sqrt(hidden_size)."""

    def __init__(self, parts: Parts, spec: ExpertsSpec, names: SparseNames) -> None:
        super().__init__(parts, spec, names)
        self.size = parts.spec.hidden_size
        self.norm = WideNorm(self.size, parts.spec.norm, device=parts.device)

    def forward(self, x: torch.Tensor, rows: ExpertRows) -> None:
        self.norm.forward(x, out=rows.shared)
        super().forward(rows.shared, rows)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        yield from super().weight_groups(prefix)
        stack = WeightStack((whole_slot(f"{prefix}gate.scale", self.size),), torch.float32, self.device)
        yield WeightGroup((stack,), lambda scale: self.norm.load(scale * self.size**-0.5))


class MLPAndExperts(SparseMLP):
    """norm1(mlp(x)) + norm2(experts(norm(residual))), where the router reads the residual stream, too."""

    router_block: ClassVar = ScaledRouter

    def __init__(self, parts: Parts, spec: ExpertsSpec) -> None:
        super().__init__(parts, spec)
        self.ops, self.mlp = self.router.ops, GatedMLP(parts)
        self.mlp_norm, self.input_norm, self.output_norm = parts.norm(), parts.norm(), parts.norm()

    def forward(self, x: torch.Tensor, rows: StepRows) -> None:
        """See SparseMLP.forward; x is the normed residual stream, the input of the MLP."""
        own = self.expert_rows(rows)
        self.mlp.forward(x, rows)
        self.mlp_norm.forward(rows.hidden, out=rows.hidden)
        self.router.forward(rows.residual, own)
        self.input_norm.forward(rows.residual, out=own.shared)
        self.experts.forward(own.shared, own, own.shared)
        self.communicator.all_reduce(own.shared)
        self.output_norm.forward(own.shared, out=own.shared)
        self.ops.add(rows.hidden, own.shared)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        layer = prefix.removesuffix("mlp.")
        yield from self.mlp.weight_groups(prefix)
        yield self.mlp_norm.group(f"{layer}post_feedforward_layernorm_1")
        yield self.input_norm.group(f"{layer}pre_feedforward_layernorm_2")
        yield from super().weight_groups(prefix)
        yield self.output_norm.group(f"{layer}post_feedforward_layernorm_2")


class Gemma4Layer(SandwichLayer):
    """Gemma 4's layer. It adds its output to rows.residual itself, and leaves nothing to add in rows.hidden."""

    attention_block: ClassVar[type[Attention]] = SharedKVBlock
    sparse_block: ClassVar = MLPAndExperts

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.scalar, self.device = 1.0, parts.device
        self.per_layer = PerLayerBlock(parts, layer) if parts.spec.per_layer_size else None

    def write(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        self.input_norm.forward(rows.residual, out=rows.hidden)
        self.attention.write(rows.hidden, rows, kv, batch, backend)

    def after_mlp(self, rows: StepRows) -> None:
        super().after_mlp(rows)
        self.ops.add(rows.residual, rows.hidden)
        if self.per_layer is not None:
            self.per_layer.forward(rows)
            self.ops.add(rows.residual, rows.hidden)
        self.ops.scale(rows.residual, self.scalar)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        yield from super().weight_groups(prefix)
        if self.per_layer is not None:
            yield from self.per_layer.weight_groups(prefix)
        stack = WeightStack((whole_slot(f"{prefix}layer_scalar", 1),), torch.float32, self.device)
        yield WeightGroup((stack,), self.load_scalar)

    def load_scalar(self, scalar: torch.Tensor) -> None:
        """Keep the factor of the residual stream after the layer: float32 [1]."""
        self.scalar = float(scalar)


class Gemma4(Gemma):
    layer: ClassVar[type[Layer]] = Gemma4Layer

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        self.per_layer = PerLayerVectors(parts, self.embedding.vocabulary) if parts.spec.per_layer_size else None
        vision = parts.spec.vision
        self.pad_id = vision.pad_id if isinstance(vision, Gemma4VisionSpec) else 0

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        super().embed(batch, rows)
        if self.per_layer is None or rows.per_layer is None:
            return
        token_ids = batch.token_ids
        if batch.vectors is not None:  # placeholders get the per-layer vectors of the padding token
            token_ids = token_ids.index_fill(0, batch.vectors.rows, self.pad_id)
        self.per_layer.forward(token_ids, rows.residual, rows.per_layer)

    def last_norm(self, rows: StepRows) -> None:
        self.norm.forward(rows.residual, out=rows.hidden)

    def embedding_groups(self) -> Iterator[WeightGroup]:
        if self.per_layer is not None:
            yield from self.per_layer.weight_groups()
        yield from super().embedding_groups()
