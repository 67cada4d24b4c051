"""One matrix product for each head, of rows whose heads stand side by side."""

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_lite.kernels.cpu.weights.head_linear import HeadLinear
from vllm_lite.layers.weights.matmul import Matmul, NativeMatmul


class HeadMatmul(Protocol):
    """The weights of all heads, each [outputs, inputs]."""

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[:, h] = x[:, h] W[h]^T; x: [num_tokens, num_heads, inputs], out: [num_tokens, num_heads, outputs], both
        strided, but for the last axis."""
        ...


class LoopedHeads:
    """One product after another: for every form of weights and every device, and the reference of the other."""

    def __init__(self, matmuls: Sequence[Matmul]) -> None:
        self.matmuls = matmuls

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for head, matmul in enumerate(self.matmuls):
            matmul.forward(x[:, head], out[:, head])


def make_head_matmul(matmuls: Sequence[Matmul]) -> HeadMatmul:
    """The best product of all heads at once. The matrices are small: called one by one, 16 heads take 32 calls a layer
    that each hand out tasks."""
    native = [matmul.packed for matmul in matmuls if isinstance(matmul, NativeMatmul)]
    return HeadLinear(native) if native and len(native) == len(matmuls) else LoopedHeads(matmuls)
