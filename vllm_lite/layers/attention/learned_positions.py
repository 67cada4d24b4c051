"""Learned position embeddings, which are added to the token embeddings."""

import torch

from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot


class LearnedPositions:
    """Table of `max_position_embeddings` positions, after `offset` unused rows; or of `num_rows` rows in all, of which
    requests may use fewer."""

    table: torch.Tensor  # [max_position_embeddings, hidden_size], by `load`

    def __init__(self, parts: Parts, offset: int = 0, num_rows: int = 0) -> None:
        self.shape = (num_rows or offset + parts.spec.max_position_embeddings, parts.spec.hidden_size)
        self.offset = offset
        self.dtype = parts.dtype
        self.device = parts.device
        self.ops = ops_for(parts.device)

    def load(self, weight: torch.Tensor) -> None:
        """weight: [offset + max_position_embeddings, hidden_size]."""
        self.table = weight[self.offset :]

    def group(self, name: str) -> WeightGroup:
        """Request the checkpoint tensor `<name>.weight`, which every rank holds in full."""
        slot = whole_slot(f"{name}.weight", *self.shape)
        return WeightGroup((WeightStack((slot,), self.dtype, self.device),), self.load)

    def add_to(self, x: torch.Tensor, positions: torch.Tensor) -> None:
        """x: [num_tokens, hidden_size], positions: int64 [num_tokens], all of which are in the table."""
        self.ops.add_rows(x, self.table, positions)
