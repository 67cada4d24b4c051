"""One matrix product per head, on rows of contiguous heads: the projections of latent attention."""

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_lite.kernels.cpu.weights.head_linear import HeadLinear
from vllm_lite.layers.weights.matmul import DenseMatmul, Matmul, NativeMatmul
from vllm_lite.layers.weights.weight_form import RemadeForm, WeightForm


class HeadMatmul(Protocol):
    """The weights of all heads, each [outputs, inputs]."""

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[:, h] = x[:, h] W[h]^T; x: [num_tokens, num_heads, inputs], out: [num_tokens, num_heads, outputs]. Both
        may be strided, except in the last axis."""
        ...


class LoopedHeads:
    """One product after another, for every form of weights; the reference of the other classes."""

    def __init__(self, matmuls: Sequence[Matmul]) -> None:
        self.matmuls = matmuls

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for head, matmul in enumerate(self.matmuls):
            matmul.forward(x[:, head], out[:, head])


class BatchedHeads:
    """One batched product of dense weights without biases."""

    def __init__(self, matmuls: Sequence[DenseMatmul]) -> None:
        """Move the weights to one tensor; each of `matmuls` then holds a view of it."""
        self.weight = torch.stack([matmul.weight for matmul in matmuls])  # [num_heads, outputs, inputs]
        for matmul, part in zip(matmuls, self.weight, strict=True):
            matmul.weight = part

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2), out=out.transpose(0, 1))

    @staticmethod
    def takes(matmuls: Sequence[Matmul]) -> bool:
        dense = [matmul for matmul in matmuls if isinstance(matmul, DenseMatmul) and matmul.bias is None]
        kinds = {(matmul.weight.shape, matmul.weight.dtype, matmul.weight.device) for matmul in dense}
        return len(kinds) == 1 and len(dense) == len(matmuls)


def make_head_matmul(matmuls: Sequence[Matmul]) -> HeadMatmul:
    """Make the fastest product of all heads at once. The matrices are small: called one by one, 16 heads take 32 calls
    a layer that each distribute tasks, and on a GPU 128 heads take 256 launches."""
    native = [matmul.packed for matmul in matmuls if isinstance(matmul, NativeMatmul)]
    if native and len(native) == len(matmuls):
        return HeadLinear(native)
    dense = [matmul for matmul in matmuls if isinstance(matmul, DenseMatmul)]
    return BatchedHeads(dense) if BatchedHeads.takes(matmuls) else LoopedHeads(matmuls)


def form_of_heads(form: WeightForm, device: torch.device) -> WeightForm:
    """Form in which a rank holds heads' matrices. On a GPU quantized ones become dense, as no kernel multiplies those
    of all heads at once: 33.5 MB a layer of DeepSeek V3 instead of 16.8, split over its ranks."""
    return form if device.type == "cpu" else RemadeForm(form)
