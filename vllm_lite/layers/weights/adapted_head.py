"""Adapters of the LM head, which add to the logits of their rows what they would add to those of a linear layer.

The rows of a product with the head are some of those that the forward pass has left: `select` says which.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.layers.weights.adapter_rows import AdapterMask, GroupedRows
from vllm_lite.layers.weights.embedding import Embedding
from vllm_lite.layers.weights.lora import Adapters, Site

Which = slice | NDArray[np.int64]
"""Some rows of what a forward pass has left."""


class AdaptedHead:
    """The adapters of the matrix `name`, of which a rank has the tokens that it scores. On a CPU."""

    def __init__(self, name: str, table: Embedding, adapters: Adapters) -> None:
        self._site = adapters.others[name] = Site((name,), (name,), table.shape, adapters)
        self._held = table.vocabulary
        self._rows = adapters.rows

    @staticmethod
    def can_be(adapters: Adapters) -> bool:
        """Whether there can be such adapters: not on a GPU, whose slots would have room for the whole vocabulary."""
        return isinstance(adapters.rows, GroupedRows | AdapterMask) and adapters.device.type == "cpu"

    def add(self, hidden: torch.Tensor, out: torch.Tensor, which: Which | None) -> None:
        """hidden: [k, hidden_size], the rows `which` of what the forward pass has left (None: all of them), out:
        float32 [k, vocab_size], of which this rank's columns are those of the base model."""
        if which is not None and isinstance(self._rows, GroupedRows | AdapterMask):
            self._rows.select(which)
        self._site.slots.add(hidden, out.narrow(1, self._held.start, self._held.size))
