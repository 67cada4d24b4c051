"""Attention of towers: every patch attends to all patches of its image, or of its window.

The patches of all images are concatenated, and the backend for text encoders computes all images or windows in one
call, whatever their sizes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.encoder import EncoderBackend
from vllm_lite.attention.step_batch import HostLens, StepBatch, to_device
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.kernels.ops import Rotation
from vllm_lite.layers.parts import Parts


class TowerPlan(NamedTuple):
    """The groups of patches that attend to each other, the number of heads in one call, and the backend for this
    number."""

    batch: StepBatch
    num_heads: int
    backend: EncoderBackend


class TowerAttention:
    """Computes attention for the heads of one tower."""

    def __init__(self, parts: Parts, num_heads: int, head_size: int) -> None:
        self.num_heads = num_heads
        self.device = parts.device
        specs = {count: AttentionSpec(count, count, head_size, head_size**-0.5) for count in (1, num_heads)}
        shapes = {
            count: AttentionShape((own,), 1, parts.dtype, self.device, is_encoder=True) for count, own in specs.items()
        }
        self._backends = {count: EncoderBackend(shape) for count, shape in shapes.items()}
        self._no_cache = torch.empty(0)

    def plan(self, lengths: Sequence[int], *, in_pieces: bool = False) -> TowerPlan:
        """Plan the attention of consecutive groups of `lengths` patches, in which all attend to each other. Layers with
        the same groups share a plan. `in_pieces`: the tower pauses after each head."""
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
        num_heads = 1 if in_pieces else self.num_heads
        plan = TowerPlan(batch, num_heads, self._backends[num_heads])
        plan.backend.prepare(batch)
        return plan

    def forward(
        self,
        qkv: torch.Tensor,  # [num_patches, 3 * num_heads * head_size]; Q and K are rotated in place
        plan: TowerPlan,
        rotation: Rotation | None,
        attended: torch.Tensor,  # [num_patches, num_heads * head_size], the output
    ) -> Iterator[None]:
        """Compute attention; pauses after each call of the plan's `num_heads` heads."""
        query, key, value = qkv.view(len(qkv), 3, self.num_heads, -1).unbind(1)
        out = attended.view(query.shape)
        for first in range(0, self.num_heads, plan.num_heads):
            some = slice(first, first + plan.num_heads)
            heads = Heads(query[:, some], key[:, some], value[:, some], rotation)
            plan.backend.write_kv(heads, self._no_cache, plan.batch, 0)
            plan.backend.attend(heads.query, self._no_cache, plan.batch, 0, out[:, some])
            yield
