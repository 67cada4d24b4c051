"""Pooling heads: from a text's pooled hidden state to its embedding or to a score per label, all in float32."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import gelu, layer_norm, linear, normalize, relu, silu

from vllm_lite.checkpoint.layer_specs.pooling import DenseSpec, HeadActivation, HeadSpec
from vllm_lite.checkpoint.tensors.tensor_names import EMBEDDING, HEAD
from vllm_lite.errors import ModelError
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack, whole_slot

LEAST_NORM = 1e-12
"""Lower bound of the norm that divides a vector, so that zeros remain zeros."""
_ACTIVATIONS: dict[HeadActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "silu": silu,
}


class _Weights:
    """A weight [outputs, inputs] and perhaps a bias [outputs], by `load`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def load(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Pooler:
    """The layers after pooling. Every rank holds them whole; rank 0 runs them."""

    def __init__(self, parts: Parts) -> None:
        spec = parts.spec.pooling
        if spec is None:
            raise ValueError("a pooler is for a model whose spec has one")
        self.spec, self.model, self.device = spec, parts.spec, parts.device
        self.modules: list[tuple[_Weights, DenseSpec]] = []
        self.dense, self.output, self.norm = _Weights(), _Weights(), _Weights()

    # ---- weights

    def weight_groups(self) -> Iterator[WeightGroup]:
        """Weights of the head in the checkpoint."""
        head, size = self.spec.head, self.model.hidden_size
        if head is None:
            return
        if head.tokens is not None:
            yield self._difference(head.tokens)
            return
        if head.dense:
            yield self._group(head.dense, (size, size), self.dense, bias=head.dense_bias)
        if head.norm:
            yield self._group(head.norm, (size,), self.norm, bias=self.model.norm.bias)
        yield self._group(head.output, (len(self.spec.labels), size), self.output, bias=head.output_bias)

    def _group(self, name: str, shape: tuple[int, ...], to: _Weights, *, bias: bool) -> WeightGroup:
        slots = [whole_slot(f"{name}.weight", *shape)]
        slots += [whole_slot(f"{name}.bias", shape[0])] if bias else []
        stacks = tuple(WeightStack((slot,), torch.float32, self.device) for slot in slots)
        return WeightGroup(stacks, to.load)

    def _difference(self, tokens: tuple[int, int]) -> WeightGroup:
        """Load two rows of the LM head as one layer: the second token's logit minus the first's."""
        shape = self.model.vocab_size, self.model.hidden_size
        name = EMBEDDING if self.model.tie_word_embeddings else HEAD
        slot = WeightSlot(name, shape, (0, 0), (2, shape[1]), tokens)

        def load(rows: torch.Tensor) -> None:
            self.output.load(rows[1:] - rows[:1])

        return WeightGroup((WeightStack((slot,), torch.float32, self.device),), load)

    def load_modules(self, folder: Path, open_source: Callable[[Path, ExitStack], object]) -> None:
        """Read the linear layers stored in folders of their own. Raises ModelError."""
        for spec in self.spec.dense:
            weights = _Weights()
            shapes = {
                "linear.weight": (spec.outputs, spec.inputs),
                **({"linear.bias": (spec.outputs,)} if spec.bias else {}),
            }
            with ExitStack() as stack:
                found = open_source(folder / spec.folder, stack)
                if {name: found[name].shape for name in found} != shapes:  # type: ignore[index,attr-defined]
                    raise ModelError(f"{folder / spec.folder}: its tensors must be {shapes}")
                weights.load(*(found[name].mapped().to(self.device, torch.float32, copy=True) for name in shapes))  # type: ignore[index]
            self.modules.append((weights, spec))

    # ---- vectors and numbers

    def vectors(self, states: torch.Tensor, dimensions: int, *, use_activation: bool) -> torch.Tensor:
        """states: float32 [n, hidden_size] -> [n, size]: the first `dimensions` elements (0: all), perhaps normed."""
        for weights, spec in self.modules:
            states = _ACTIVATIONS[spec.activation](weights.forward(states))
        if dimensions:
            states = states[:, :dimensions]
        return normalize(states, dim=1, eps=LEAST_NORM) if use_activation else states

    def numbers(self, states: torch.Tensor, *, use_activation: bool) -> torch.Tensor:
        """states: float32 [n, hidden_size] -> [n, labels], perhaps through the model's sigmoid or softmax."""
        head: HeadSpec | None = self.spec.head
        if head is None:
            raise ValueError("this model has no head for labels")
        if head.dense:
            states = _ACTIVATIONS[head.activation](self.dense.forward(states))
        if head.norm:
            states = layer_norm(states, states.shape[1:], self.norm.weight, self.norm.bias, self.model.norm.eps)
        found = self.output.forward(states)
        if not use_activation or self.spec.activation == "none":
            return found
        if self.spec.activation == "sigmoid":
            # torch computes the last values of a tensor by another formula: in float32 a score would depend on the
            # number of texts.
            return found.double().sigmoid().float()
        return found.softmax(1)
