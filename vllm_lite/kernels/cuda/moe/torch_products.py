"""The matrix products of experts by torch's grouped one, for large prefill steps, where tiles have much to compute.

Our own kernels read each weight once for 64 rows and multiply as sm_80 does; torch's is made for Hopper. It rounds what
an expert gives to the type of x once more, so that a row's last bits depend on how many rows its step has.
"""

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cuda.fused import CudaOps, vector_width
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.moe.experts import Products, Stacks
from vllm_lite.kernels.cuda.moe.sorted_experts import Sorted

CAPABILITIES = (9, 10)
"""Where torch has a kernel that needs no numbers on the host, and so can be captured; on others it loops."""


class TorchProducts:
    """See Products; bfloat16 only."""

    def __init__(self, launcher: Launcher) -> None:
        self._ops = CudaOps(launcher)

    def forward(self, x: torch.Tensor, in_order: Sorted, stacks: Stacks, activation: Activation) -> torch.Tensor:
        top, ends = len(in_order.pairs) // len(x), in_order.starts[1:]
        rows = x.index_select(0, in_order.pairs // top)
        both = functional.grouped_mm(rows, stacks.gate_up.transpose(1, 2), offs=ends)
        if stacks.gate_up_bias is not None:
            places = torch.arange(len(rows), dtype=ends.dtype, device=ends.device)
            experts = torch.searchsorted(ends, places, right=True)
            both += stacks.gate_up_bias.index_select(0, experts.clamp_(max=len(ends) - 1))  # behind: of other ranks
        activated = both.new_empty(len(rows), stacks.down.shape[2])
        self._ops.activate_and_mul(activation, both, activated)
        return functional.grouped_mm(activated, stacks.down.transpose(1, 2), offs=ends)


def for_weights(launcher: Launcher, stacks: Stacks) -> Products | None:
    """Torch's products for these weights; None where torch has no fast ones."""
    down = stacks.down
    if not (down.is_cuda and down.dtype == torch.bfloat16 and hasattr(functional, "grouped_mm")):
        return None
    aligned = all(vector_width(weight.shape[2], weight) > 1 for weight in (stacks.gate_up, down))
    if not aligned or torch.cuda.get_device_capability(down.device)[0] not in CAPABILITIES:
        return None
    return TorchProducts(launcher)
