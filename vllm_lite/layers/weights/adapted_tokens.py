"""Adapters of the embedding: scale B A[:, token] is added to a token's vector.

All adapters' columns of A for a token are concatenated in one table with a row per token, in which a step looks up its
tokens. The rest is a linear layer over the ranks of all slots: for each slot a matrix that picks the slot's own
columns, and then B. So it uses the kernels and rows of all other layers, and can be recorded.

The table has vocabulary size times slots times maximum rank elements, which is bounded. Its pages take no memory until
an adapter with token vectors is put into a slot.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.lora import LoraModule
from vllm_lite.errors import ModelError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import look_up
from vllm_lite.layers.weights.lora import Adapters, Site, check_matrices, read_tensor
from vllm_lite.layers.weights.weight_form import LinearShape

MAX_TABLE_BYTES = 1 << 30


class TokenMatrices(NamedTuple):
    """One adapter's matrices: down [vocab_size, rank], up [hidden_size, rank], scaled."""

    down: torch.Tensor
    up: torch.Tensor


class AdaptedTokens:
    """Adapters of the embedding `name`, of a model on a CPU. Every rank holds them whole."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, adapters: Adapters) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self._rank = adapters.limits.max_rank
        width = adapters.limits.num_slots * self._rank
        words = np.zeros((vocab_size, width * adapters.dtype.itemsize), np.uint8)  # untouched pages take no memory
        self._table = torch.from_numpy(words).view(adapters.dtype)
        self._native = cpu.available()
        self._found = torch.zeros(adapters.max_num_tokens, width, dtype=adapters.dtype)
        shape = LinearShape(Split.whole(width), (Split.whole(hidden_size),), adapters.dtype, adapters.device)
        self._slots = Site((name,), (name,), shape, adapters).slots
        adapters.tables[name] = self

    @staticmethod
    def can_be(vocab_size: int, adapters: Adapters) -> bool:
        """Whether an embedding can have adapters: on a CPU, if the table is not too large."""
        width = adapters.limits.num_slots * adapters.limits.max_rank
        return adapters.device.type == "cpu" and vocab_size * width * adapters.dtype.itemsize <= MAX_TABLE_BYTES

    def add(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out`: [n, hidden_size] the adapters' part; token_ids: int64 [n], of all rows of a step."""
        found = self._found[: len(token_ids)]
        if not (self._native and look_up(self._table, token_ids, found)):
            torch.index_select(self._table, 0, token_ids, out=found)
        self._slots.add(found, out)

    def check(self, modules: Mapping[str, LoraModule], label: str) -> None:
        """See AdaptedPart.check."""
        for name, module in modules.items():
            check_matrices(name, module, self.vocab_size, self.hidden_size, label)
            if module.magnitude is not None:
                raise ModelError(f"{label} has lengths (DoRA) of {name}, which are not served of token vectors")

    def read(self, modules: Mapping[str, LoraModule]) -> TokenMatrices:
        """See AdaptedPart.read."""
        (module,) = modules.values()
        dtype = self._table.dtype
        up = read_tensor(module.up).float() * module.scale
        return TokenMatrices(read_tensor(module.down).t().to(dtype), up.to(dtype))

    def put(self, slot: int, packed: TokenMatrices | None) -> None:
        """See AdaptedPart.put."""
        if packed is None:
            self._slots.put(slot, None)
            return
        first, rank = slot * self._rank, packed.up.shape[1]
        self._table[:, first : first + rank] = packed.down
        picked = torch.zeros(rank, self._table.shape[1], dtype=self._table.dtype)
        picked[:, first : first + rank] = torch.eye(rank)
        self._slots.put(slot, self._slots.pack([picked], [packed.up.contiguous()]))
