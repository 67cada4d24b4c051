"""Products of experts with torch's grouped_mm, for large prefill steps.

This package's kernels read each weight once per 64 rows and multiply with sm_80's instructions; torch's are made for
Hopper. It rounds an expert's output once more to x's dtype, so that a row's last bits depend on the number of rows of
the step.
"""

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cuda.fused import CudaOps, vector_width
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.moe.experts import Products, Stacks
from vllm_lite.kernels.cuda.moe.sorted_experts import Sorted

CAPABILITIES = (9, 10)
"""Major capabilities for which torch has a kernel that needs no sizes on the host, and so can be captured; on others it
loops."""


class TorchProducts:
    """Products with torch; bfloat16 only."""

    def __init__(self, launcher: Launcher) -> None:
        self._ops = CudaOps(launcher)

    def forward(self, x: torch.Tensor, in_order: Sorted, stacks: Stacks, activation: Activation) -> torch.Tensor:
        top, ends = len(in_order.pairs) // len(x), in_order.starts[1:]
        rows = x.index_select(0, in_order.pairs // top)
        both = functional.grouped_mm(rows, stacks.gate_up.transpose(1, 2), offs=ends)
        if stacks.gate_up_bias is not None:
            places = torch.arange(len(rows), dtype=ends.dtype, device=ends.device)
            experts = torch.searchsorted(ends, places, right=True)
            both += stacks.gate_up_bias.index_select(0, experts.clamp_(max=len(ends) - 1))  # others: of other ranks
        activated = both.new_empty(len(rows), stacks.down.shape[2])
        self._ops.activate_and_mul(activation, both, activated)
        return functional.grouped_mm(activated, stacks.down.transpose(1, 2), offs=ends)


def for_weights(launcher: Launcher, stacks: Stacks) -> Products | None:
    """Torch's products for these weights; None if torch has no fast ones."""
    down = stacks.down
    if not (down.is_cuda and down.dtype == torch.bfloat16 and hasattr(functional, "grouped_mm")):
        return None
    aligned = all(vector_width(weight.shape[2], weight) > 1 for weight in (stacks.gate_up, down))
    if not aligned or torch.cuda.get_device_capability(down.device)[0] not in CAPABILITIES:
        return None
    return TorchProducts(launcher)
