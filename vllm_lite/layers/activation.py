"""The gated activation between the two halves of an MLP."""

import torch

from vllm_lite.kernels.ops import ops_for


class SiluAndMul:
    """out = silu(gate) * up."""

    def __init__(self, device: torch.device) -> None:
        self.ops = ops_for(device)

    def forward(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """gate_up: [num_tokens, 2 * size], out: [num_tokens, size]. May overwrite the gate."""
        self.ops.silu_and_mul(gate_up, out)
