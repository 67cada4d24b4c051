"""Attention of towers: every patch sees all others of its image, or of its window.

The patches of all images stand one behind the other, so images and windows of any sizes are attended to at once, by
what encoders of texts have.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.encoder import EncoderBackend
from vllm_lite.attention.step_batch import HostLens, StepBatch, to_device
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.kernels.ops import Rotation
from vllm_lite.layers.parts import Parts


class TowerAttention:
    """For the heads of one tower."""

    def __init__(self, parts: Parts, num_heads: int, head_size: int) -> None:
        self.num_heads = num_heads
        self.device = parts.device
        spec = AttentionSpec(num_heads, num_heads, head_size, head_size**-0.5)
        self._backend = EncoderBackend(AttentionShape((spec,), 1, parts.dtype, parts.device, is_encoder=True))
        self._no_cache = torch.empty(0)

    def plan(self, lengths: Sequence[int]) -> StepBatch:
        """Say which patches see each other: so many in a row each. One plan is for all layers that attend alike."""
        starts, lens = np.zeros(len(lengths) + 1, np.int32), np.array(lengths, np.int32)
        lens.cumsum(out=starts[1:])
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        batch = StepBatch(
            num_tokens=int(starts[-1]),
            num_seqs=len(lens),
            max_query_len=int(lens.max()),
            max_seq_len=int(lens.max()),
            token_ids=nothing,
            positions=nothing,
            query_start_loc=to_device(starts, self.device),
            seq_lens=to_device(lens, self.device),
            block_tables=(),
            slot_mapping=(),
            host=HostLens(lens, lens),
        )
        self._backend.prepare(batch)
        return batch

    def forward(self, qkv: torch.Tensor, plan: StepBatch, rotation: Rotation | None = None) -> torch.Tensor:
        """qkv: [num_patches, 3 * num_heads * head_size], of which Q and K are turned in place -> what the patches get:
        [num_patches, num_heads * head_size]."""
        query, key, value = qkv.view(len(qkv), 3, self.num_heads, -1).unbind(1)
        out = query.new_empty(query.shape)
        self._backend.write_kv(Heads(query, key, value, rotation), self._no_cache, plan, 0)
        self._backend.attend(query, self._no_cache, plan, 0, out)
        return out.flatten(1)
