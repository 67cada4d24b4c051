"""The gated activation between the two halves of an MLP."""

import torch
from torch.nn.functional import silu


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up, with gate_up: [num_tokens, 2 * size] and out: [num_tokens, size]. Overwrites the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    silu(gate, inplace=True)
    torch.mul(gate, up, out=out)
