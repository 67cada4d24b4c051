"""A gated short convolution: a recurrent layer whose state is a sequence's last few inputs."""

from collections.abc import Iterator

import torch

from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.select import short_conv_op
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.block import RecurrentBlock
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack


class ShortConvBlock(RecurrentBlock):
    """Ranks share the channels."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        whole, own = parts.spec.layers[layer].recurrent, parts.layers[layer].recurrent
        if not isinstance(whole, ShortConvSpec) or not isinstance(own, ShortConvSpec):
            raise TypeError(f"layer {layer} is no short convolution")
        self.whole, self.held = whole, whole.held(parts.shard)
        start, size, total = self.held.start, self.held.size, whole.channels
        hidden, parts_of_it = Split.whole(parts.spec.hidden_size), (start, total + start, 2 * total + start)
        self.projections = parts.linear(hidden, *(Split(3 * total, at, size) for at in parts_of_it), bias=False)
        self.output = parts.row_parallel(self.held, hidden, bias=False)
        self.op = short_conv_op(own, parts.device, parts.dtype)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights of it in a checkpoint under `prefix`, like "model.layers.0.conv."."""
        spec, held = self.whole, self.held
        yield self.projections.group(*(f"{prefix}in_proj",) * 3)
        shape = (spec.channels, 1, spec.conv_size)
        conv = WeightSlot(f"{prefix}conv.weight", shape, (held.start, 0, 0), (held.size, 1, spec.conv_size))
        yield WeightGroup((WeightStack((conv,), torch.float32, self.device),), self.load)
        yield self.output.group(f"{prefix}out_proj")

    def load(self, conv: torch.Tensor) -> None:
        """Keep the convolution's weight; conv: float32 [channels, 1, conv_size]."""
        self.weights = conv[:, 0].T.contiguous()
