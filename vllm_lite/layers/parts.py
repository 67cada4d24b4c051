"""What the layers of a model are made with: its spec, a type, a device, this rank's shard, the weights' form."""

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.shard import SINGLE, Shard, Split
from vllm_lite.layers.linear import Linear
from vllm_lite.layers.matmul import Quantization
from vllm_lite.layers.norm import RMSNorm
from vllm_lite.layers.weight_form import DENSE, WeightForm


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
    def layers(self) -> tuple[LayerSpec, ...]:
        """Each layer with the heads that this rank holds of it."""
        return tuple(LayerSpec(own.attention.per_rank(self.shard.world), own.rope) for own in self.spec.layers)

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The different kinds of `layers`: AttentionBlock.kind and Rows.by_kind count by them."""
        return tuple(dict.fromkeys(self.layers))
