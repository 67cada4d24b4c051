"""A gated short convolution: a recurrent layer whose state is a sequence's last few inputs."""

from collections.abc import Iterator

import torch

from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.select import short_conv_op
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.block import RecurrentBlock, by_tap, conv_slots, specs_of
from vllm_lite.layers.weights.weight_slot import WeightSlot


class ShortConvBlock(RecurrentBlock):
    """Short convolution. Channels are split over ranks."""

    projected_as = ("in_proj",) * 3

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        whole, own = specs_of(parts, layer, ShortConvSpec)
        self.whole, self.held = whole, whole.held(parts.shard)
        start, size, total = self.held.start, self.held.size, whole.channels
        hidden, parts_of_it = Split.whole(parts.spec.hidden_size), (start, total + start, 2 * total + start)
        self.projections = parts.linear(hidden, *(Split(3 * total, at, size) for at in parts_of_it), bias=False)
        self.output = parts.row_parallel(self.held, hidden, bias=False)
        self.op = short_conv_op(own, parts.device, parts.dtype)

    def slots(self, prefix: str) -> Iterator[tuple[WeightSlot, ...]]:
        yield conv_slots(f"{prefix}conv.weight", self.whole.conv_size, [self.held])

    def load(self, conv: torch.Tensor) -> None:
        """Keep the convolution's weight; conv: float32 [channels, 1, conv_size]."""
        self.weights = by_tap(conv)
