"""`CudaOps`: the small operations between matrix products on a GPU. Kernels: csrc/cuda/fused.cuh."""

import numpy as np
import torch

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cuda.launcher import Arg, Kernel, Launcher, cuda_type, require
from vllm_lite.kernels.cuda.moe import routing as router
from vllm_lite.kernels.ops import Rotation, TorchOps
from vllm_lite.kernels.routing import Chosen, Routing

SOURCE = "fused.cuh"
_KERNELS: dict[Activation, str] = {"silu": "silu_and_mul", "gelu_tanh": "gelu_and_mul"}
MAX_THREADS = 1024
SCRATCH_BYTES = 32 * 4
"""Shared memory of a sum over a block: one float per warp."""


def vector_width(length: int, *tensors: torch.Tensor) -> int:
    """Elements per access: 16 bytes of the first tensor, or 1 if the alignment of rows of `length` elements does not
    allow that. The last axis of each tensor is contiguous; addresses and the other strides count."""
    width = 16 // tensors[0].element_size()
    if length % width:
        return 1
    for tensor in tensors:
        if tensor.data_ptr() % (width * tensor.element_size()):
            return 1
        if any(stride % width for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False) if size > 1):
            return 1
    return width


def threads_for(num_items: int, most: int = MAX_THREADS) -> int:
    """Threads in whole warps, one per item, up to `most`."""
    return min(most, -(-num_items // 32) * 32)


def require_rows(what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or (tensor.stride(-1) != 1 and shape[-1] != 1):
        raise ValueError(
            f"{what} must be {dtype} {list(shape)} with contiguous rows, "
            f"got {tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}"
        )


class CudaOps(TorchOps):
    """Ops with CUDA kernels; TorchOps computes the others. Raises ValueError for wrong shapes."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        size = x.shape[-1]
        require_rows("weight", weight, x.dtype, (size,))
        require_rows("x", x, x.dtype, tuple(x.shape))
        require_rows("out", out, x.dtype, tuple(x.shape))
        if x.numel() == 0:
            return
        inner, x_outer, x_inner = _rows(x)
        out_inner_size, out_outer, out_inner = _rows(out)
        if inner != out_inner_size:
            raise ValueError(f"x and out must be alike in the axes that hold rows, got {list(x.shape)}")
        width = vector_width(size, x, weight, out)
        args = (x, weight, out, np.int32(size), np.float32(eps), np.int32(inner))
        strides = (np.int64(x_outer), np.int64(x_inner), np.int64(out_outer), np.int64(out_inner))
        self._launch_rows("rms_norm", x, size, width, (*args, *strides))

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        num_tokens, size = residual.shape
        require_rows("weight", weight, residual.dtype, (size,))
        for what, tensor in (("residual", residual), ("x", x), ("out", out)):
            require_rows(what, tensor, residual.dtype, (num_tokens, size))
        if residual.numel() == 0:
            return
        width = vector_width(size, residual, x, weight, out)
        args = (residual, x, weight, out, np.int32(size), np.float32(eps))
        strides = tuple(np.int64(tensor.stride(0)) for tensor in (residual, x, out))
        self._launch_rows("add_rms_norm", residual, size, width, (*args, *strides))

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> None:
        num_tokens, num_heads, head_size = heads.shape
        require_rows("heads", heads, heads.dtype, tuple(heads.shape))
        require_rotation(rotation, num_tokens, head_size, heads.dtype)
        if heads.numel() == 0:
            return
        width = vector_width(head_size // 2, heads, *rotation)
        strides = (heads.stride(0), heads.stride(1), rotation.cos.stride(0), rotation.sin.stride(0))
        args: tuple[Arg, ...] = (heads, *rotation, np.int32(num_heads), np.int32(head_size), *map(np.int64, strides))
        threads = threads_for(num_heads * (head_size // 2 // width), 256)
        self._kernel("rotate", heads, width)((num_tokens, 1, 1), (threads, 1, 1), args)

    def activate_and_mul(self, kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        if kind in _KERNELS:
            self._gated(_KERNELS[kind], gate_up, out)
        else:
            super().activate_and_mul(kind, gate_up, out)

    def route(self, logits: torch.Tensor, routing: Routing, chosen: Chosen) -> None:
        router.route(self._launcher, logits, routing, chosen)

    def add_gated(self, residual: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
        num_tokens, size = residual.shape
        for what, tensor in (("residual", residual), ("x", x)):
            require_rows(what, tensor, residual.dtype, (num_tokens, size))
        require_rows("gates", gates, torch.float32, (num_tokens, 1))
        if residual.numel() == 0:
            return
        width = vector_width(size, residual, x)
        strides = (np.int64(tensor.stride(0)) for tensor in (residual, x, gates))
        self._launch_elements("add_gated", residual, width, (residual, x, gates, np.int32(size), *strides))

    def _gated(self, name: str, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens, size = out.shape
        require_rows("out", out, gate_up.dtype, (num_tokens, size))
        require_rows("gate_up", gate_up, gate_up.dtype, (num_tokens, 2 * size))
        if out.numel() == 0:
            return
        args = (gate_up, out, np.int32(size), np.int64(gate_up.stride(0)), np.int64(out.stride(0)))
        self._launch_elements(name, out, vector_width(size, gate_up, out), args)

    def _launch_elements(self, name: str, out: torch.Tensor, width: int, args: tuple[Arg, ...]) -> None:
        """Launch with a thread for every `width` elements of `out`."""
        num_tokens, size = out.shape
        threads = threads_for(size // width, 256)
        grid = (num_tokens, -(-size // (width * threads)), 1)
        self._kernel(name, out, width)(grid, (threads, 1, 1), args)

    def _launch_rows(self, name: str, x: torch.Tensor, size: int, width: int, args: tuple[Arg, ...]) -> None:
        """Launch with one block per row; its number of threads depends only on the length of a row."""
        grid = (x.numel() // size, 1, 1)
        self._kernel(name, x, width)(grid, (threads_for(size // width), 1, 1), args, SCRATCH_BYTES)

    def _kernel(self, name: str, x: torch.Tensor, width: int) -> Kernel:
        return self._launcher.kernel(SOURCE, f"{name}<{cuda_type(x.dtype, name)}, {width}>")


def require_rotation(rotation: Rotation, num_tokens: int, head_size: int, dtype: torch.dtype) -> None:
    require(head_size % 2 == 0, f"only heads of an even size can be turned, got {head_size}")
    for what, tensor in (("cos", rotation.cos), ("sin", rotation.sin)):
        require_rows(what, tensor, dtype, (num_tokens, head_size))


def _rows(x: torch.Tensor) -> tuple[int, int, int]:
    """(rows of the second-last axis, stride of the axes before, its stride), for any x of up to 3 axes, or dense."""
    if x.dim() <= 2:
        return 1, x.stride(0) if x.dim() == 2 else 0, 0
    if x.dim() > 3:
        x = x.view(-1, x.shape[-2], x.shape[-1])  # raises if the strides of the outer axes do not allow it
    return x.shape[1], x.stride(0), x.stride(1)
