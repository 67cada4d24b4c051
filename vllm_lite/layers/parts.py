"""What the layers of a model are made with: its spec, a type, a device, this rank's shard, the weights' form."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from vllm_lite.checkpoint.model_spec import ModelSpec, Rope
from vllm_lite.layers.linear import Linear
from vllm_lite.layers.matmul import Quantization
from vllm_lite.layers.norm import RMSNorm
from vllm_lite.layers.weight_form import DENSE, WeightForm
from vllm_lite.layers.weight_slot import SINGLE, Shard, Split


class HeadLayout(NamedTuple):
    """How this rank's heads of a layer lie in its activations, and how they are rotated. Few layers differ in it."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: Rope | None

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


@dataclass(frozen=True)
class Parts:
    """Makes the parts of one model, all of one type and on one device."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    shard: Shard = SINGLE
    form: WeightForm = DENSE
    head_quantization: Quantization | None = None
    """What the LM head becomes, whose checkpoint tensor is dense whatever `form` is."""

    def linear(self, inputs: Split, *outputs: Split, bias: bool) -> Linear:
        return Linear(inputs, outputs, bias=bias, dtype=self.dtype, device=self.device, form=self.form)

    def norm(self, size: int | None = None) -> RMSNorm:
        """Over `size` elements, or over the whole hidden state."""
        return RMSNorm(size or self.spec.hidden_size, self.spec.norm_eps, dtype=self.dtype, device=self.device)

    @cached_property
    def layouts(self) -> tuple[HeadLayout, ...]:
        """Each that some layer has, once."""
        return tuple(dict.fromkeys(self.layout(layer) for layer in range(self.spec.num_layers)))

    def layout(self, layer: int) -> HeadLayout:
        own = self.spec.layers[layer]
        heads = own.attention.per_rank(self.shard.world)
        return HeadLayout(heads.num_heads, heads.num_kv_heads, heads.head_size, own.rope)
