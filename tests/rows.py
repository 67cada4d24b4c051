"""Rows of numbers for kernels that work on rows, and how near a result must be to the exact one."""

import math
from typing import Any

import torch

from vllm_lite.kernels.ops import TorchOps

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = [1, 3, 7, 8, 15, 16, 17, 31, 64, 100, 1024, 1025]
"""Sizes around those of vectors, on every instruction set."""

twin: Any = type("Twin", (), {name: it for name, it in vars(TorchOps).items() if not name.startswith("__")})()
"""Plain torch, the reference of `Ops`, also where a test takes it away from TorchOps."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that depend on the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def values(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in rows that are further apart, at an address that no vector is aligned to; nan in between."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 13), math.nan, dtype=tensor.dtype)
    view = wide[..., 5 : 5 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def assert_gaps_untouched(view: torch.Tensor) -> None:
    base = view._base
    assert base is not None
    assert base[..., :5].isnan().all()
    assert base[..., 5 + view.shape[-1] :].isnan().all()


def assert_close(found: torch.Tensor, exact: torch.Tensor, units: float | torch.Tensor) -> None:
    """Within so many units in the last place of `found`'s dtype; exact: float64."""
    eps = torch.finfo(found.dtype).eps
    least = float(torch.finfo(found.dtype).tiny) if found.dtype != torch.bfloat16 else 1e-37
    error = (found.double() - exact).abs()
    assert (error <= units * (eps * exact.abs() + least)).all(), (error / exact.abs()).max()
