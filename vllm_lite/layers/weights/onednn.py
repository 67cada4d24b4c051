"""Matrix products on a CPU without native kernels, with a weight that oneDNN has reordered once.

Measured on one EPYC core for 4096 x 768, against torch.mm: float32 twice as fast for any number of rows; bfloat16 2.4
times for one row, 1.4 times for 32, the same from 128 on.

torch has these operators for its compiler and does not document them, so they may be absent: then `pack` returns None
and the caller keeps its dense weight. Also, a row's result hardly depends on the other rows.
"""

import torch


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """weight: [out_features, in_features] -> an opaque reordered copy, or None if oneDNN does not support it.

    Unsupported: other devices than a CPU, float16 on most CPUs, and bfloat16 on CPUs without AVX512.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())  # noqa: SLF001
    except (AttributeError, RuntimeError, TypeError):
        return None
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [num_rows, in_features] -> x W^T + bias, a new tensor [num_rows, out_features]."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001
    return out
