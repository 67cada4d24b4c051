"""Modules of transformers that become this engine's layers: linear layers, token embedding, the LM head.

A module stays in the model and keeps its class, whose `super().forward` is then ours. Its weight becomes a tensor
without elements, so that code that uses it other than through `forward` or for its type fails in the dry run.
"""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from vllm_lite.layers.weights.embedding import Embedding, LMHead
from vllm_lite.layers.weights.linear import Linear


class LinearModule(nn.Linear):
    """A Linear for inputs with any number of leading axes."""

    engine: Linear
    num_outputs: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(*x.shape[:-1], self.num_outputs)
        if not x.is_meta:
            rows = x.reshape(-1, x.shape[-1])
            self.engine.forward(rows, out.view(-1, self.num_outputs))
        return out


class ConvModule(Conv1D):
    """A Linear that replaces a layer whose weight is stored as [inputs, outputs]."""

    engine: Linear
    num_outputs: int
    forward = LinearModule.forward


class EmbeddingModule(nn.Embedding):
    """An Embedding; ids: [1, num_tokens] -> [1, num_tokens, hidden_size]."""

    engine: Embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        engine = self.engine
        out = torch.empty(*ids.shape, engine.hidden_size, dtype=engine.dtype, device=ids.device)
        if not ids.is_meta:
            engine.forward(ids.view(-1), out.view(-1, engine.hidden_size))
        return out


class HeadModule(nn.Linear):
    """The LMHead. Returns this rank's columns of float32 logits, in `out` if that is set."""

    engine: LMHead
    out: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.engine.embedding.vocabulary
        if x.is_meta or self.out is None:
            return x.new_empty(*x.shape[:-1], held.size, dtype=torch.float32)
        self.engine.forward(x.reshape(-1, x.shape[-1]), self.out)
        own = self.out[:, held.start : held.end]
        return (own if self.bias is None else own.add_(self.bias[held.start : held.end].float()))[None]


def become(module: Any, kind: type[nn.Module], **attributes: Any) -> None:
    """Turn `module`, of a subclass of the class that `kind` extends, into a `kind`."""
    base = type(module)
    original = kind.__bases__[0]
    module.__class__ = kind if base is original else type(base.__name__, (base, kind), {})
    weight = module.weight
    del module.weight
    module.weight = weight.new_empty(0)
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


def settle(model: nn.Module, device: torch.device) -> None:
    """Move buffers and the weights without elements to the device, after the dry run."""
    for module in model.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
        if isinstance(module, (LinearModule, ConvModule, EmbeddingModule, HeadModule)):
            module.weight = torch.empty(0, dtype=module.weight.dtype, device=device)
