"""Muse Glimmer's text model: norms before and after each block, gated attention, normed token embeddings."""

import torch
from msgspec.structs import replace

from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.kernels.ops import WideNormWeights
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import SandwichLayer
from vllm_lite.layers.norm import WideNorm
from vllm_lite.layers.parts import Parts
from vllm_lite.models.decoder import Decoder


class MuseLayer(SandwichLayer):
    """A layer whose norms after blocks have a separate eps."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        spec = parts.spec
        norm = replace(spec.norm, eps=spec.output_norm_eps or spec.norm.eps)
        self.attention_output_norm, self.mlp_output_norm = (
            WideNorm(spec.hidden_size, norm, device=parts.device) for _ in range(2)
        )


class MuseGlimmer(Decoder):
    """Token embeddings are normed without a weight; the final norm's weight is stored without an offset."""

    layer = MuseLayer

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        size, norm = parts.spec.hidden_size, replace(parts.spec.norm, plus_one=False)
        self.norm = WideNorm(size, norm, device=parts.device)
        self.token_norm = WideNormWeights(torch.ones(size, device=parts.device), None, norm.eps, centered=False)

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        super().embed(batch, rows)
        self.ops.wide_norm(rows.residual, self.token_norm, rows.residual)
