"""Experts with dense weights on a GPU. Kernels: csrc/cuda/experts.cuh. `Products` is the interface of their matrix
products."""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cuda.fused import vector_width
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require
from vllm_lite.kernels.cuda.moe.sorted_experts import SOURCE, Sorted, SortedExperts

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WARPS, COLUMNS, PITCH_BYTES = 4, 64, 144  # as in SOURCE
THREADS = 32 * WARPS
STAGES = {1: 4, 4: 2}
"""Tiles of 16 rows per block -> pairs of tiles in its shared memory; as `experts::stages` in SOURCE."""
MANY_ROWS = 32
"""With this many pairs per expert, tiles have 64 rows instead of 16: fewer reads of weights, more of rows."""
FOR_MANY = 64
"""Pairs per expert from which `for_many` products are used, if there are any, as computing then dominates over reading
weights. Not measured on a GPU."""

KINDS: dict[Activation, str] = {
    "silu": "SILU",
    "gelu_tanh": "GELU_TANH",
    "gelu": "GELU",
    "relu": "RELU",
    "relu2": "RELU2",
    "swiglu_oai": "SWIGLU_OAI",
}


UNGATED: Activation = "relu2"
"""The activation of experts without a gate, and only of those."""


class Stacks(NamedTuple):
    """The weights of all experts of a rank, and the biases that this rank adds."""

    gate_up: torch.Tensor  # [num_experts, 2 * inner, hidden], gate first; without a gate [num_experts, inner, hidden]
    down: torch.Tensor  # [num_experts, hidden, inner]
    gate_up_bias: torch.Tensor | None = None  # [num_experts, 2 * inner]
    down_bias: torch.Tensor | None = None  # [num_experts, hidden]


class Products(Protocol):
    """An implementation of products of rows with the weights of their experts."""

    def forward(self, x: torch.Tensor, in_order: Sorted, stacks: Stacks, activation: Activation) -> torch.Tensor:
        """x: [num_tokens, hidden] -> each pair's expert output, [num_pairs, hidden] in the order of places, without
        down's bias, in float32 or x's dtype. Rows from in_order.starts[-1] on are undefined."""
        ...


class TileProducts:
    """This package's kernels, for any number of rows per expert, read from device memory."""

    def __init__(self, launcher: Launcher, num_experts: int | None = None) -> None:
        """num_experts: total number of experts of the pairs, if `multiply` gets the weights of only some."""
        self._launcher, self._num_experts = launcher, num_experts

    def forward(self, x: torch.Tensor, in_order: Sorted, stacks: Stacks, activation: Activation) -> torch.Tensor:
        num_pairs, (_, hidden, inner) = len(in_order.pairs), stacks.down.shape
        activated = x.new_empty(num_pairs, inner)
        wide = torch.empty(num_pairs, hidden, dtype=torch.float32, device=x.device)
        self.multiply(activated, x, (stacks.gate_up, stacks.gate_up_bias), in_order, activation)
        self.multiply(wide, activated, (stacks.down, None), in_order, None)
        return wide

    def multiply(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        weights_and_biases: tuple[torch.Tensor, torch.Tensor | None],
        in_order: Sorted,
        activation: Activation | None,
    ) -> None:
        """Multiply with the weights of the experts in in_order.starts. With an activation, `rows` are tokens, else
        places."""
        weights, biases = weights_and_biases
        is_gated = activation not in (None, UNGATED)
        (num_pairs, size), (num_experts, _, depth) = out.shape, weights.shape
        kind, columns = "NONE" if activation is None else KINDS[activation], COLUMNS // 2 if is_gated else COLUMNS
        sharing = self._num_experts or num_experts
        tiles = 4 if num_pairs >= MANY_ROWS * sharing else 1
        vector = "true" if vector_width(depth, rows, weights) > 1 else "false"
        types = f"{cuda_type(rows.dtype, 'x')}, {cuda_type(out.dtype, 'out')}"
        name = f"expert_tiles<{types}, experts::{kind}, {tiles}, {vector}>"
        at_once = -(-num_pairs // (sharing * 16 * tiles))  # tiles per expert if all have as many rows
        pairs, top = (None, 1) if activation is None else (in_order.pairs, num_pairs // len(rows))
        args = (
            out,
            rows,
            weights,
            biases,
            in_order.starts,
            pairs,
            np.int64(rows.stride(0)),
            *map(np.int32, (depth, size, top)),
        )
        grid = (-(-size // columns), num_experts, at_once)
        shared_bytes = STAGES[tiles] * PITCH_BYTES * (16 * tiles + COLUMNS)
        self._launcher.kernel(SOURCE, name)(grid, (THREADS, 1, 1), args, shared_bytes)


class StackedExperts(SortedExperts):
    """Experts from number `first` on, each an MLP, gated unless its activation is UNGATED, with their weights in two
    tensors."""

    def __init__(
        self, launcher: Launcher, stacks: Stacks, first: int, activation: Activation, for_many: Products | None = None
    ) -> None:
        """`for_many` is used if experts have FOR_MANY rows or more on average. Raises ValueError unless the weights are
        those of such MLPs in a supported dtype."""
        gate_up, down = stacks.gate_up, stacks.down
        num_experts, hidden, inner = down.shape
        super().__init__(launcher, first, (num_experts, hidden, inner), down.dtype)
        self._gated = activation != UNGATED
        kind = "with" if self._gated else "without"
        require(
            gate_up.shape == (num_experts, (1 + self._gated) * inner, hidden) and min(down.shape) > 0,
            f"experts of {list(gate_up.shape)} and {list(down.shape)} are not MLPs {kind} a gate",
        )
        require(
            gate_up.dtype == down.dtype and down.dtype in DTYPES and gate_up.is_contiguous() and down.is_contiguous(),
            f"weights of experts must be contiguous floats of one type, got {gate_up.dtype} and {down.dtype}",
        )
        check_bias("gate and up", stacks.gate_up_bias, gate_up.shape[:2], down.dtype)
        check_bias("down", stacks.down_bias, down.shape[:2], down.dtype)
        self._stacks, self._activation = stacks, activation
        self._products, self._for_many = TileProducts(launcher), for_many

    @property
    def down_bias(self) -> torch.Tensor | None:
        return self._stacks.down_bias

    def multiply(self, x: torch.Tensor, in_order: Sorted) -> torch.Tensor:
        many = len(in_order.pairs) >= FOR_MANY * self.num_experts
        products: Products = self._products
        if many and self._gated and self._for_many is not None:
            products = self._for_many
        return products.forward(x, in_order, self._stacks, self._activation)


def check_bias(what: str, biases: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless biases are None, or contiguous with this shape [num_experts, outputs] and dtype."""
    require(
        biases is None or (biases.shape == shape and biases.dtype == dtype and biases.is_contiguous()),
        f"biases of {what} must be {dtype} {list(shape)}, contiguous",
    )
