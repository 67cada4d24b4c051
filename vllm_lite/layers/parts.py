"""Factory of a model's layers, by its spec, dtype, device, ranks and form of weights."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch

from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.layers.norm import Norm, RMSNorm, WideNorm
from vllm_lite.layers.weights.adapted_head import AdaptedHead
from vllm_lite.layers.weights.adapted_tokens import AdaptedTokens
from vllm_lite.layers.weights.embedding import Embedding, LMHead
from vllm_lite.layers.weights.linear import Linear, RowParallelLinear
from vllm_lite.layers.weights.lora import Adapters
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape, WeightForm
from vllm_lite.parallel.communicator import Communicator


@dataclass(frozen=True)
class Parts:
    """Makes this rank's layers of one model, all of one dtype and on one device."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    communicator: Communicator
    form: WeightForm = DENSE
    head_quantization: Quantization | None = None
    """Quantization of an LM head that is dense in the checkpoint."""
    adapters: Adapters | None = None
    """Adapters of the model's layers; None: no adapters are served."""
    exact_rows: bool = False
    """Whether a quantized LM head leaves its input rows unrounded; for all other weights `form` decides."""

    @property
    def linear_form(self) -> WeightForm:
        """Form of the linear layers, with adapters if there are any."""
        return self.form if self.adapters is None else self.adapters.form(self.form)

    @property
    def dense_form(self) -> WeightForm:
        """Form of linear layers that are never quantized; on a CPU with adapters if there are any."""
        return DENSE if self.adapters is None or self.device.type != "cpu" else self.adapters.form(DENSE)

    def without_adapters(self) -> Self:
        """The same parts without adapters, for layers whose weights other operations multiply."""
        return replace(self, adapters=None)

    @property
    def shard(self) -> Shard:
        return self.communicator.shard

    def linear(
        self,
        inputs: Split,
        *outputs: Split,
        bias: bool,
        transposed: bool = False,
        stacked: tuple[int, int] | None = None,
        adds_bias: bool = True,
    ) -> Linear:
        """Make a linear layer without a reduction over ranks. `transposed`: the checkpoint has [inputs, outputs];
        `stacked`: see WeightSlot; `adds_bias`: see Linear."""
        shape = LinearShape(inputs, outputs, self.dtype, self.device, transposed, stacked)
        return Linear(shape, bias=bias, form=self.linear_form, adds_bias=adds_bias)

    def row_parallel(self, inputs: Split, outputs: Split, *, bias: bool, transposed: bool = False) -> RowParallelLinear:
        """Make a linear layer whose inputs are split over ranks and whose outputs are reduced to all ranks."""
        shape = LinearShape(inputs, (outputs,), self.dtype, self.device, transposed)
        return RowParallelLinear(shape, self.communicator, bias=bias, form=self.linear_form)

    def embedding(self, vocabulary: Split, size: int | None = None) -> Embedding:
        """Make the token embedding with this rank's rows `vocabulary`; `size`: of a vector; None: hidden_size."""
        return Embedding(
            vocabulary,
            size or self.spec.hidden_size,
            self.communicator,
            dtype=self.dtype,
            device=self.device,
            form=self.form,
        )

    def adapted_tokens(self, name: str) -> AdaptedTokens | None:
        """Adapters of the embedding `name`; None if it can have none."""
        if self.adapters is None or not AdaptedTokens.can_be(self.spec.vocab_size, self.adapters):
            return None
        return AdaptedTokens(name, self.spec.vocab_size, self.spec.hidden_size, self.adapters)

    def adapted_head(self, name: str, embedding: Embedding) -> AdaptedHead | None:
        """Adapters of the LM head `name` over the tokens of `embedding`; None if it can have none."""
        if self.adapters is None or not AdaptedHead.can_be(self.adapters):
            return None
        return AdaptedHead(name, embedding, self.adapters)

    def lm_head(self, embedding: Embedding, *, tied: bool) -> LMHead:
        """Make the LM head over the tokens of `embedding`, from the same tensor if it is `tied`."""
        return LMHead(embedding, tied=tied, quantization=self.head_quantization, exact_rows=self.exact_rows)

    def norm(self, size: int | None = None) -> Norm:
        """Make the model's norm over `size` elements; None: over the hidden state."""
        size, spec = size or self.spec.hidden_size, self.spec.norm
        if spec.kind == "rms":
            return RMSNorm(size, spec.eps, dtype=self.dtype, device=self.device)
        return WideNorm(size, spec, device=self.device)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Specs of all layers, each with this rank's heads."""
        return self.spec.per_rank(self.shard).layers

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The distinct kinds of layers, which AttentionBlock.kind and Rows.by_kind index."""
        return tuple(dict.fromkeys(block for own in self.layers for block in own.blocks))
