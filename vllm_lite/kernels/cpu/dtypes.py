"""Codes of element types in csrc/cpu. They are not in library.py, because that is imported without torch."""

import torch

DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
}
"""The same numbers as DType in csrc/cpu/common.h."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that kernels compute in; the others are for KV caches only."""


def dtype_code(dtype: torch.dtype) -> int:
    """The code of a dtype. Raises ValueError for a dtype that the kernels do not know."""
    code = DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    return code
