"""The interface between kernel functions and the device or emulator that runs kernels, and shared code."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

Scalar: TypeAlias = np.int32 | np.int64 | np.uint32 | np.uint64 | np.float32
Arg: TypeAlias = torch.Tensor | Scalar | None
"""A kernel's argument: a tensor is passed as the address of its first element, None as the null pointer. Python's int
and float are refused: their width may not be the parameter's, which a GPU would not notice."""

SCALARS = frozenset((np.int32, np.int64, np.uint32, np.uint64, np.float32))

DEFAULT_SHARED_BYTES = 48 * 1024
"""Maximum dynamic shared memory without asking the driver for more."""


class Kernel(Protocol):
    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Arg], shared_bytes: int = 0
    ) -> None: ...


class Launcher(Protocol):
    @property
    def multiprocessor_bytes(self) -> int:
        """Shared memory of a multiprocessor in bytes, which bounds its concurrent blocks."""
        ...

    def kernel(self, source: str, name: str) -> Kernel:
        """The instantiation `name` of a template in the file `source` of csrc/cuda; built once, then kept. For example
        kernel("paged_attention.cuh", "paged_attention_v1<__half, __half, 128, 16>")."""
        ...


def check_args(name: str, args: Sequence[Arg]) -> None:
    """Raise TypeError for arguments whose width may not be the parameter's."""
    for position, arg in enumerate(args):
        if arg is not None and type(arg) not in SCALARS and not isinstance(arg, torch.Tensor):
            raise TypeError(
                f"{name}: argument {position} is a {type(arg).__name__}; "
                "a kernel takes tensors, None and numpy scalars of 32 or 64 bits (np.int32, np.float32, ...)"
            )


def packed(name: str, args: Sequence[Arg]) -> list[Any]:
    """The arguments, with addresses in place of tensors. Raises TypeError like `check_args`."""
    try:
        return [arg if type(arg) in SCALARS else 0 if arg is None else arg.data_ptr() for arg in args]  # type: ignore[union-attr]
    except AttributeError:
        check_args(name, args)
        raise


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


CUDA_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
"""Names of the element types in csrc/cuda."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def cuda_type(dtype: torch.dtype, what: str) -> str:
    """The name of `dtype` in csrc/cuda; `what` is the tensor's name for the error."""
    if dtype not in CUDA_TYPES:
        raise ValueError(f"{what} is {dtype}; kernels take {', '.join(map(str, CUDA_TYPES))}")
    return CUDA_TYPES[dtype]
