"""SortedExperts: sorting of (token, expert) pairs, and the sum of their outputs, on a GPU.

Nothing waits for the host. Pairs are sorted by expert, each expert multiplies its rows, and each token adds up its
pairs' outputs. Kernels: csrc/cuda/experts.cuh.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.kernels.cuda.fused import threads_for
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require
from vllm_lite.kernels.cuda.moe.routing import check_chosen
from vllm_lite.kernels.routing import Chosen

SOURCE = "experts.cuh"
SORT_WARPS = 32
"""Maximum warps of the sorting block, which has one per 32 pairs."""
MAX_PAIRS = 16384
"""Maximum pairs computed at once: their float32 outputs take 128 MiB with 2048 elements, and each of 128 experts still
gets a whole tile of rows."""


class Sorted(NamedTuple):
    """Pairs sorted by expert, followed by those of other ranks' experts."""

    pairs: torch.Tensor  # int32 [num_pairs]: the number of the pair at each place
    places: torch.Tensor  # int32 [num_pairs]: the place of each pair
    starts: torch.Tensor  # int32 [num_experts + 1]: the first place of each expert's pairs


class SortedExperts(ABC):
    """Experts from number `first` on; subclasses have the weights and products."""

    def __init__(self, launcher: Launcher, first: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        """shape: [num_experts, hidden, inner] of down. dtype: of rows."""
        self.launcher, self.first, self.shape, self.dtype = launcher, first, shape, dtype

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    @property
    @abstractmethod
    def down_bias(self) -> torch.Tensor | None:
        """[num_experts, hidden], added to outputs by this rank; None: none."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, in_order: Sorted) -> torch.Tensor:
        """x: [num_tokens, hidden] -> each pair's expert output, [num_pairs, hidden] in the order of places, without
        down's bias, in float32 or x's dtype. Rows from in_order.starts[-1] on are undefined."""

    def forward(self, x: torch.Tensor, chosen: Chosen, out: torch.Tensor) -> None:
        """As ExpertMatmul.forward. It can be captured in a CUDA graph, which reads `chosen` when it runs. Raises
        ValueError for other shapes or types."""
        num_tokens, hidden = len(x), self.shape[1]
        for what, tensor in (("x", x), ("out", out)):
            require(
                tensor.dtype == self.dtype and tensor.shape == (num_tokens, hidden) and tensor.stride(1) == 1,
                f"{what} must be {self.dtype} {[num_tokens, hidden]} with contiguous rows, got {tensor.dtype} "
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
        wide = self.multiply(x, in_order)
        (num_tokens, hidden), top = x.shape, chosen.experts.shape[1]
        threads = threads_for(hidden, 256)
        kernel = f"sum_experts<{cuda_type(out.dtype, 'out')}, {cuda_type(wide.dtype, 'wide')}>"
        self.launcher.kernel(SOURCE, kernel)(
            (num_tokens, -(-hidden // threads), 1),
            (threads, 1, 1),
            (
                out,
                wide,
                self.down_bias,
                in_order.places,
                *chosen,
                np.int64(out.stride(0)),
                *map(np.int32, (hidden, top, self.first, self.num_experts)),
            ),
            12 * top,
        )

    def _sort(self, experts: torch.Tensor) -> Sorted:
        pairs, places = (experts.new_empty(experts.numel()) for _ in range(2))
        starts = experts.new_empty(self.num_experts + 1)
        sizes = map(np.int32, (experts.numel(), self.first, self.num_experts))
        warps = min(SORT_WARPS, -(-experts.numel() // 32))
        self.launcher.kernel(SOURCE, "sort_pairs")(
            (self.num_experts + 1, 1, 1), (32 * warps, 1, 1), (experts, pairs, places, starts, *sizes), 8 * warps
        )
        return Sorted(pairs, places, starts)
