"""Gated DeltaNet, used in a decoder layer instead of attention. It keeps a state and no KV."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec, Projections
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.delta_rule import DeltaNetWeights
from vllm_lite.kernels.select import delta_net_op
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.block import RecurrentBlock, by_tap, conv_slots, specs_of, vector_slots
from vllm_lite.layers.weights.weight_slot import WeightSlot


class DeltaNetNames(NamedTuple):
    """A checkpoint's names for the parts of the layer."""

    mixed: str = "in_proj_qkv"
    z: str = "in_proj_z"
    b: str = "in_proj_b"
    a: str = "in_proj_a"
    conv: str = "conv1d.weight"
    decay: str = "A_log"
    dt_bias: str = "dt_bias"
    norm: str = "norm.weight"

    @property
    def projections(self) -> tuple[str, ...]:
        """The tensors of Q, K, V, z, b and a."""
        return self.mixed, self.mixed, self.mixed, self.z, self.b, self.a

    @classmethod
    def of(cls, stored: Projections) -> "DeltaNetNames":
        """Return the names of a checkpoint that stores the projections as `stored` says."""
        gates = {} if stored == "apart" else dict.fromkeys(("b", "a"), "in_proj_ba")
        wide = dict.fromkeys(("mixed", "z"), "in_proj_qkvz") if stored == "by key head" else {}
        return cls(**gates, **wide)


def rows_by_key_head(key_heads: Split, sizes: Sequence[int]) -> tuple[Split, ...]:
    """For a tensor in which each key head has consecutive parts of `sizes` rows: a rank's rows of each part."""
    each, ends = sum(sizes), tuple(accumulate(sizes))
    held = range(key_heads.start, key_heads.end)
    return tuple(
        Split.of(key_heads.total * each, [head * each + row for head in held for row in range(end - size, end)])
        for size, end in zip(sizes, ends, strict=True)
    )


class DeltaNetBlock(RecurrentBlock):
    """Gated DeltaNet. Heads are split over ranks: each has some key heads and their value heads."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        whole, own = specs_of(parts, layer, DeltaNetSpec)
        self.whole, self.eps, self.names = whole, parts.spec.norm.eps, DeltaNetNames.of(whole.stored)
        self.projected_as = self.names.projections
        key_heads, self.heads = whole.heads(parts.shard)
        keys, values = key_heads.times(whole.key_size), self.heads.times(whole.value_size)
        self.mixed = (
            Split(whole.conv_channels, keys.start, keys.size),
            Split(whole.conv_channels, whole.key_width + keys.start, keys.size),
            Split(whole.conv_channels, 2 * whole.key_width + values.start, values.size),
        )
        hidden = Split.whole(parts.spec.hidden_size)
        self.projections = parts.linear(hidden, *self.projected(key_heads), bias=False)
        self.output = parts.row_parallel(values, hidden, bias=False)
        self.op = delta_net_op(own, parts.device, parts.dtype)

    def projected(self, key_heads: Split) -> tuple[Split, ...]:
        """A rank's rows of Q, K, V, z, b and a, each in the tensor that `names` has for it."""
        spec = self.whole
        each = spec.num_value_heads // spec.num_key_heads
        gates = (self.heads,) * 2 if spec.stored == "apart" else rows_by_key_head(key_heads, (each, each))
        if spec.stored == "by key head":
            sizes = spec.key_size, spec.key_size, *(each * spec.value_size,) * 2
            return (*rows_by_key_head(key_heads, sizes), *gates)
        return (*self.mixed, self.heads.times(spec.value_size), *gates)

    def slots(self, prefix: str) -> Iterator[tuple[WeightSlot, ...]]:
        names, spec = self.names, self.whole
        yield conv_slots(f"{prefix}{names.conv}", spec.conv_size, self.mixed)
        yield vector_slots(f"{prefix}{names.decay}", self.heads)
        yield vector_slots(f"{prefix}{names.dt_bias}", self.heads)
        yield vector_slots(f"{prefix}{names.norm}", Split.whole(spec.value_size))

    def load(self, conv: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor, norm: torch.Tensor) -> None:
        """Keep the weights beside the projections; conv: float32 [conv_channels, 1, conv_size]."""
        self.weights = DeltaNetWeights(by_tap(conv), decay.exp(), dt_bias, norm, self.eps)
