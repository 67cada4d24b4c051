"""A layer's experts on a GPU, with nothing that waits for the host. Kernels: csrc/cuda/experts.cuh.

The pairs of a token and one of its experts are put in the order of the experts, then each expert multiplies its rows,
then each token adds up what its pairs gave. The matrix products are behind a seam, `Products`.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cuda.fused import threads_for, vector_width
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require
from vllm_lite.kernels.cuda.moe.routing import check_chosen
from vllm_lite.kernels.routing import Chosen

# ---- The pairs of tokens and experts in the order of the experts, and the seam for what multiplies them with weights


class Sorted(NamedTuple):
    """Pairs in the order of their experts; behind them those whose expert another rank holds."""

    pairs: torch.Tensor  # int32 [num_pairs]: the number of the pair at each place
    places: torch.Tensor  # int32 [num_pairs]: the place of each pair
    starts: torch.Tensor  # int32 [num_experts + 1]: where the pairs of each expert begin


class Stacks(NamedTuple):
    """The weights of all experts that a rank holds, and their biases where they have some that this rank adds."""

    gate_up: torch.Tensor  # [num_experts, 2 * inner, hidden], the gate first; without one [num_experts, inner, hidden]
    down: torch.Tensor  # [num_experts, hidden, inner]
    gate_up_bias: torch.Tensor | None = None  # [num_experts, 2 * inner]
    down_bias: torch.Tensor | None = None  # [num_experts, hidden]


class Products(Protocol):
    """One way to multiply rows with the weights of their experts."""

    def forward(self, x: torch.Tensor, in_order: Sorted, stacks: Stacks, activation: Activation) -> torch.Tensor:
        """x: [num_tokens, hidden] -> what each pair's expert makes of its token, [num_pairs, hidden] in the order of
        places without down's bias, float32 or of x's type. The rows behind in_order.starts[-1] may hold anything."""
        ...


SOURCE = "experts.cuh"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WARPS, COLUMNS, PITCH_BYTES = 4, 64, 144  # as in SOURCE
THREADS = 32 * WARPS
SORT_WARPS = 32
"""At most, of a block that sorts; it has one for each 32 pairs."""
MAX_PAIRS = 16384
"""So many pairs are computed at once: their outputs in float32 take 128 MiB for 2048 elements, and an expert of 128
still gets as many rows as a tile has."""
MANY_ROWS = 32
"""With so many pairs for each expert tiles have 64 rows instead of 16: fewer reads of the weights, more of the rows."""
FOR_MANY = 64
"""Pairs for each expert from which on other products are used, if there are any: what they are made for is computing,
not reading weights. Not measured: no GPU has run either."""

_KINDS: dict[Activation, str] = {
    "silu": "SILU",
    "gelu_tanh": "GELU_TANH",
    "gelu": "GELU",
    "relu": "RELU",
    "relu2": "RELU2",
    "swiglu_oai": "SWIGLU_OAI",
}


UNGATED: Activation = "relu2"
"""The activation of experts without a gate, and of no others."""


class TileProducts:
    """Our own kernels: any number of rows for each expert, read from the device's memory."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def forward(self, x: torch.Tensor, in_order: Sorted, stacks: Stacks, activation: Activation) -> torch.Tensor:
        num_pairs, (_, hidden, inner) = len(in_order.pairs), stacks.down.shape
        activated = x.new_empty(num_pairs, inner)
        wide = torch.empty(num_pairs, hidden, dtype=torch.float32, device=x.device)
        self._multiply(activated, x, (stacks.gate_up, stacks.gate_up_bias), in_order, activation)
        self._multiply(wide, activated, (stacks.down, None), in_order, None)
        return wide

    def _multiply(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        weights_and_biases: tuple[torch.Tensor, torch.Tensor | None],
        in_order: Sorted,
        activation: Activation | None,
    ) -> None:
        """With an activation `rows` are those of tokens, else those of places."""
        weights, biases = weights_and_biases
        is_gated = activation not in (None, UNGATED)
        (num_pairs, size), (num_experts, _, depth) = out.shape, weights.shape
        kind, columns = "NONE" if activation is None else _KINDS[activation], COLUMNS // 2 if is_gated else COLUMNS
        tiles = 4 if num_pairs >= MANY_ROWS * num_experts else 1
        vector = "true" if vector_width(depth, rows, weights) > 1 else "false"
        types = f"{cuda_type(rows.dtype, 'x')}, {cuda_type(out.dtype, 'out')}"
        name = f"expert_tiles<{types}, experts::{kind}, {tiles}, {vector}>"
        at_once = -(-num_pairs // (num_experts * 16 * tiles))  # tiles of an expert if all have as many rows
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
        shared_bytes = 2 * PITCH_BYTES * (16 * tiles + COLUMNS)
        self._launcher.kernel(SOURCE, name)(grid, (THREADS, 1, 1), args, shared_bytes)


class StackedExperts:
    """Experts from number `first` on, each an MLP, with a gate unless its activation is UNGATED, with their weights in
    two tensors."""

    def __init__(
        self, launcher: Launcher, stacks: Stacks, first: int, activation: Activation, for_many: Products | None = None
    ) -> None:
        """`for_many` multiplies where each expert has FOR_MANY rows or more on average.

        Raises ValueError unless the weights are those of such MLPs in a type that the kernels take."""
        gate_up, down = stacks.gate_up, stacks.down
        num_experts, hidden, inner = down.shape
        self._gated = activation != UNGATED
        kind = "with" if self._gated else "without"
        require(
            gate_up.shape == (num_experts, (1 + self._gated) * inner, hidden) and min(down.shape) > 0,
            f"experts of {list(gate_up.shape)} and {list(down.shape)} are no MLPs {kind} a gate",
        )
        require(
            gate_up.dtype == down.dtype and down.dtype in DTYPES and gate_up.is_contiguous() and down.is_contiguous(),
            f"weights of experts must be contiguous floats of one type, got {gate_up.dtype} and {down.dtype}",
        )
        for what, biases, weights in (
            ("gate and up", stacks.gate_up_bias, gate_up),
            ("down", stacks.down_bias, down),
        ):
            require(
                biases is None
                or (biases.shape == weights.shape[:2] and biases.dtype == down.dtype and biases.is_contiguous()),
                f"biases of {what} must be {down.dtype} {list(weights.shape[:2])}, contiguous",
            )
        self._launcher, self._stacks, self._first, self._activation = launcher, stacks, first, activation
        self._products, self._for_many = TileProducts(launcher), for_many

    def forward(self, x: torch.Tensor, chosen: Chosen, out: torch.Tensor) -> None:
        """As ExpertMatmul.forward. It can be captured in a CUDA graph, which then reads what is chosen when it runs.

        Raises ValueError for other tensors than these.
        """
        down = self._stacks.down
        num_tokens, hidden = len(x), down.shape[1]
        for what, tensor in (("x", x), ("out", out)):
            require(
                tensor.dtype == down.dtype and tensor.shape == (num_tokens, hidden) and tensor.stride(1) == 1,
                f"{what} must be {down.dtype} {[num_tokens, hidden]} with contiguous rows, got {tensor.dtype} "
                f"{list(tensor.shape)}, strides {list(tensor.stride())}",
            )
        check_chosen(chosen, num_tokens, chosen.experts.shape[-1])
        num_parts = max(1, -(-chosen.experts.numel() // MAX_PAIRS))
        at_once = max(1, -(-num_tokens // num_parts))
        for start in range(0, num_tokens, at_once):
            part = slice(start, start + at_once)
            self._forward(x[part], Chosen(chosen.experts[part], chosen.weights[part]), out[part])

    def _forward(self, x: torch.Tensor, chosen: Chosen, out: torch.Tensor) -> None:
        in_order = self._sort(chosen.experts)
        many = chosen.experts.numel() >= FOR_MANY * len(self._stacks.down)
        products: Products = self._products
        if many and self._gated and self._for_many is not None:
            products = self._for_many
        wide = products.forward(x, in_order, self._stacks, self._activation)
        (num_tokens, hidden), top = x.shape, chosen.experts.shape[1]
        threads = threads_for(hidden, 256)
        held = self._first, len(self._stacks.down)
        self._launcher.kernel(SOURCE, f"sum_experts<{cuda_type(out.dtype, 'out')}, {cuda_type(wide.dtype, 'wide')}>")(
            (num_tokens, -(-hidden // threads), 1),
            (threads, 1, 1),
            (
                out,
                wide,
                self._stacks.down_bias,
                in_order.places,
                *chosen,
                np.int64(out.stride(0)),
                *map(np.int32, (hidden, top, *held)),
            ),
            12 * top,
        )

    def _sort(self, experts: torch.Tensor) -> Sorted:
        num_experts = len(self._stacks.down)
        pairs, places = (experts.new_empty(experts.numel()) for _ in range(2))
        starts = experts.new_empty(num_experts + 1)
        sizes = map(np.int32, (experts.numel(), self._first, num_experts))
        warps = min(SORT_WARPS, -(-experts.numel() // 32))
        self._launcher.kernel(SOURCE, "sort_pairs")(
            (num_experts + 1, 1, 1), (32 * warps, 1, 1), (experts, pairs, places, starts, *sizes), 8 * warps
        )
        return Sorted(pairs, places, starts)
