"""A Gated DeltaNet layer: what stands in a decoder layer where others have attention. It keeps a state and no KV."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm_lite.checkpoint.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.delta_rule import DeltaNetWeights, delta_net_op
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrent import RecurrentBlock
from vllm_lite.layers.weight_slot import WeightGroup, WeightSlot, WeightStack, whole_slot


class DeltaNetNames(NamedTuple):
    """What a checkpoint calls the parts of the layer."""

    mixed: str = "in_proj_qkv"
    z: str = "in_proj_z"
    b: str = "in_proj_b"
    a: str = "in_proj_a"
    conv: str = "conv1d.weight"
    decay: str = "A_log"
    dt_bias: str = "dt_bias"
    norm: str = "norm.weight"
    output: str = "out_proj"


class DeltaNetBlock(RecurrentBlock):
    """Ranks share the heads: each has some key heads and the value heads that these serve."""

    names = DeltaNetNames()

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        whole, own = parts.spec.layers[layer].recurrent, parts.layers[layer].recurrent
        if not isinstance(whole, DeltaNetSpec) or not isinstance(own, DeltaNetSpec):
            raise TypeError(f"layer {layer} is no Gated DeltaNet")
        self.whole, self.eps = whole, parts.spec.norm.eps
        key_heads, self.heads = whole.heads(parts.shard)
        keys, values = key_heads.times(whole.key_size), self.heads.times(whole.value_size)
        self.mixed = (
            Split(whole.conv_channels, keys.start, keys.size),
            Split(whole.conv_channels, whole.key_width + keys.start, keys.size),
            Split(whole.conv_channels, 2 * whole.key_width + values.start, values.size),
        )
        hidden = Split.whole(parts.spec.hidden_size)
        self.projections = parts.linear(hidden, *self.mixed, values, self.heads, self.heads, bias=False)
        self.output = parts.row_parallel(values, hidden, bias=False)
        self.op = delta_net_op(own, parts.device, parts.dtype)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """What a checkpoint has of it under `prefix`, like "model.layers.0.linear_attn."."""
        names, spec, heads = self.names, self.whole, self.heads
        projections = (names.mixed, names.mixed, names.mixed, names.z, names.b, names.a)
        yield self.projections.group(*(f"{prefix}{name}" for name in projections))
        conv = tuple(
            WeightSlot(
                f"{prefix}{names.conv}",
                (spec.conv_channels, 1, spec.conv_size),
                (part.start, 0, 0),
                (part.size, 1, spec.conv_size),
            )
            for part in self.mixed
        )
        vectors = [
            (WeightSlot(f"{prefix}{name}", (heads.total,), (heads.start,), (heads.size,)),)
            for name in (names.decay, names.dt_bias)
        ]
        norm = (whole_slot(f"{prefix}{names.norm}", spec.value_size),)
        stacks = (WeightStack(slots, torch.float32, self.device) for slots in (conv, *vectors, norm))
        yield WeightGroup(tuple(stacks), self.load)
        yield self.output.group(f"{prefix}{names.output}")

    def load(self, conv: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor, norm: torch.Tensor) -> None:
        """Keep what lies beside the projections; conv: float32 [conv_channels, 1, conv_size]."""
        by_tap = conv[:, 0].T.contiguous()
        self.weights = DeltaNetWeights(by_tap, decay.exp(), dt_bias, norm, self.eps)
