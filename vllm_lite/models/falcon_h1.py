"""Falcon-H1: attention and Mamba-2 read one norm in each layer, and both are added to the residual stream."""

from typing import Any, ClassVar

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.kernels.recurrent import KVAndStates, Segments
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames, norm_input
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.mamba import MambaBlock
from vllm_lite.models.decoder import Decoder, DecoderNames


class FalconH1Layer(DecoderLayer):
    """x + mamba(norm(x)) + attend(norm(x)), then the MLP.

    Both blocks share their buffers: first Mamba runs for all tokens, then Q, K and V are computed, then Mamba's output
    is added to the residual stream. Attention's output is added later, in `combine`.
    """

    names: ClassVar = LayerNames(mlp_norm="pre_ff_layernorm", mlp="feed_forward")

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.mamba, self.spec = MambaBlock(parts, layer), parts.spec

    def write(self, rows: StepRows, kv: KVAndStates, batch: StepBatch, backend: AttentionBackend) -> None:  # type: ignore[override]
        norm_input(self.input_norm, rows, first=self.first)
        self.mamba.write(rows.hidden, rows, kv.states, batch, backend)
        self.attention.write(rows.hidden, rows, kv.kv, batch, backend)
        self.mamba.project(rows)
        self.ops.add(rows.residual, rows.hidden)

    def attend(self, rows: StepRows, kv: KVAndStates, batch: StepBatch, backend: AttentionBackend) -> None:  # type: ignore[override]
        self.attention.attend(rows, kv.kv, batch, backend)

    def after_attention(self, rows: StepRows) -> None:
        if self.spec.attention_scale != 1.0:
            self.ops.scale(rows.hidden, self.spec.attention_scale)

    def after_mlp(self, rows: StepRows) -> None:
        if self.spec.residual_scale != 1.0:
            self.ops.scale(rows.hidden, self.spec.residual_scale)

    def weight_groups(self, prefix: str) -> Any:
        yield from super().weight_groups(prefix)
        yield from self.mamba.weight_groups(f"{prefix}mamba.")


class FalconH1(Decoder):
    names: ClassVar = DecoderNames(norm="model.final_layernorm")
    layer = FalconH1Layer

    @torch.inference_mode()
    def take_up(self, tokens: torch.Tensor, segments: Segments, kv_caches: list[Any]) -> None:
        """See hybrid.Hybrid.take_up."""
        rows = self.buffers.rows(len(tokens))
        for layer, cache in zip(self.layers, self.held_of(kv_caches), strict=True):
            if isinstance(layer, FalconH1Layer):
                layer.mamba.take_up(tokens, rows, cache.states, segments)
