"""Adapters of the LM head, which add to logits as other adapters add to the outputs of a linear layer.

A product with the head takes some of the rows that the forward pass has returned; `select` sets which.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.layers.weights.adapter_rows import AdapterMask, GroupedRows
from vllm_lite.layers.weights.embedding import Embedding
from vllm_lite.layers.weights.lora import Adapters, Site

Which = slice | NDArray[np.int64]
"""Selection of rows of a forward pass's hidden states."""


class AdaptedHead:
    """Adapters of the LM head `name`, with the rank's part of the vocabulary. CPU only."""

    def __init__(self, name: str, table: Embedding, adapters: Adapters) -> None:
        self._site = adapters.others[name] = Site((name,), (name,), table.shape, adapters)
        self._held = table.vocabulary
        self._rows = adapters.rows

    @staticmethod
    def can_be(adapters: Adapters) -> bool:
        """Whether an LM head can have adapters: not on a GPU, where each slot would cover the whole vocabulary."""
        return isinstance(adapters.rows, GroupedRows | AdapterMask) and adapters.device.type == "cpu"

    def add(self, hidden: torch.Tensor, out: torch.Tensor, which: Which | None) -> None:
        """Add to this rank's columns of the logits `out`: float32 [k, vocab_size]. hidden: [k, hidden_size], the rows
        `which` of the forward pass's hidden states (None: all)."""
        if which is not None and isinstance(self._rows, GroupedRows | AdapterMask):
            self._rows.select(which)
        self._site.slots.add(hidden, out.narrow(1, self._held.start, self._held.size))
