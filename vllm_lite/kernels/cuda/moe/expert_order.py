"""The pairs of tokens and experts in the order of the experts, and the seam for what multiplies them with weights."""

from typing import NamedTuple, Protocol

import torch

from vllm_lite.checkpoint.layer_specs.activation import Activation


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
