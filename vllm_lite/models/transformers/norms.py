"""RMSNorms of transformers' models that prove equal to Llama's, computed by one operation instead of seven."""

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from vllm_lite.kernels.ops import Ops, TorchOps

SHARE = 0.05
"""Share of elements that may differ by rounding in a trial. A norm that multiplies by its weight before rounding
differs in a third of them in bfloat16."""


class NormModule(nn.Module):
    """RMSNorm over the last axis."""

    engine: Ops
    eps: float
    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not x.is_meta:
            self.engine.rms_norm(x, self.weight, self.eps, out)
        return out


def replace_norms(model: Any, ops: Ops, dtype: torch.dtype) -> int:
    """Turn the RMSNorms of `model` into NormModules if a trial with random numbers gives the same results. Returns
    their number. A class is tried once for each size and eps."""
    found: dict[tuple[type, int, float], bool] = {}
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float) or names != ["weight"]:
            continue
        key = type(module), module.weight.numel(), eps
        if key not in found:
            found[key] = module.weight.dim() == 1 and _is_plain(module, eps, dtype)
        if found[key]:
            module.__class__, module.engine, module.eps = NormModule, ops, eps
    return sum(isinstance(module, NormModule) for module in model.modules())


@torch.inference_mode()
def _is_plain(module: Any, eps: float, dtype: torch.dtype) -> bool:
    """Whether the module computes the same as Ops.rms_norm."""
    generator = torch.Generator().manual_seed(0)
    size = module.weight.numel()
    weight = torch.randn(size, generator=generator).to(dtype)
    x = (torch.randn(8, size, generator=generator) * torch.logspace(-4, 2, 8)[:, None]).to(dtype)
    ours = torch.empty_like(x)
    TorchOps().rms_norm(x, weight, eps, ours)
    try:
        theirs = functional_call(module, {"weight": weight}, (x,))
    except Exception:
        return False
    if not isinstance(theirs, torch.Tensor) or theirs.dtype != dtype or theirs.shape != x.shape:
        return False
    if dtype == torch.float32:
        return torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6)
    return float((theirs != ours).float().mean()) < SHARE
