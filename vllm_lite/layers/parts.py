"""Ingredients of a model's layers: its spec, a type, a device, the other ranks, the weights' form."""

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
    """Makes the parts of one model that this rank holds, all of one type and on one device."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    communicator: Communicator
    form: WeightForm = DENSE
    head_quantization: Quantization | None = None
    """What the LM head becomes where the checkpoint has it dense."""
    adapters: Adapters | None = None
    """Those that its linear layers can have; None: none."""
    exact_rows: bool = False
    """Whether the LM head takes its rows as they are, if it is quantized; for all other weights `form` says so."""

    @property
    def linear_form(self) -> WeightForm:
        """The form of linear layers, which may have adapters; the embedding has none."""
        return self.form if self.adapters is None else self.adapters.form(self.form)

    @property
    def dense_form(self) -> WeightForm:
        """The form of linear layers that are never quantized, which on a CPU may have adapters."""
        return DENSE if self.adapters is None or self.device.type != "cpu" else self.adapters.form(DENSE)

    def without_adapters(self) -> Self:
        """For linear layers whose weights are used by others."""
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
        """A linear layer whose outputs are not added up. `transposed`: the checkpoint has [inputs, outputs]; `stacked`:
        as WeightSlot's; `adds_bias`: as Linear's."""
        shape = LinearShape(inputs, outputs, self.dtype, self.device, transposed, stacked)
        return Linear(shape, bias=bias, form=self.linear_form, adds_bias=adds_bias)

    def row_parallel(self, inputs: Split, outputs: Split, *, bias: bool, transposed: bool = False) -> RowParallelLinear:
        """A linear layer of whose inputs every rank has a part, and of whose outputs it gets all."""
        shape = LinearShape(inputs, (outputs,), self.dtype, self.device, transposed)
        return RowParallelLinear(shape, self.communicator, bias=bias, form=self.linear_form)

    def embedding(self, vocabulary: Split, size: int | None = None) -> Embedding:
        """The table of token vectors, of which this rank holds those of `vocabulary`; `size`: of one, if it is not that
        of the hidden state."""
        return Embedding(
            vocabulary,
            size or self.spec.hidden_size,
            self.communicator,
            dtype=self.dtype,
            device=self.device,
            form=self.form,
        )

    def adapted_tokens(self, name: str) -> AdaptedTokens | None:
        """The adapters of the table `name`; None where none can have it."""
        if self.adapters is None or not AdaptedTokens.can_be(self.spec.vocab_size, self.adapters):
            return None
        return AdaptedTokens(name, self.spec.vocab_size, self.spec.hidden_size, self.adapters)

    def adapted_head(self, name: str, embedding: Embedding) -> AdaptedHead | None:
        """The adapters of the LM head `name`, which scores the tokens of `embedding`; None where none can have it."""
        if self.adapters is None or not AdaptedHead.can_be(self.adapters):
            return None
        return AdaptedHead(name, embedding, self.adapters)

    def lm_head(self, embedding: Embedding, *, tied: bool) -> LMHead:
        """The scores of the tokens that `embedding` has, from the same tensor if it is `tied`."""
        return LMHead(embedding, tied=tied, quantization=self.head_quantization, exact_rows=self.exact_rows)

    def norm(self, size: int | None = None) -> Norm:
        """The model's norm, over `size` elements or over the whole hidden state."""
        size, spec = size or self.spec.hidden_size, self.spec.norm
        if spec.kind == "rms":
            return RMSNorm(size, spec.eps, dtype=self.dtype, device=self.device)
        return WideNorm(size, spec, device=self.device)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Each layer with the heads that this rank holds of it."""
        return self.spec.per_rank(self.shard).layers

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The different kinds of the `blocks` of `layers`: AttentionBlock.kind and Rows.by_kind count by them."""
        return tuple(dict.fromkeys(block for own in self.layers for block in own.blocks))
