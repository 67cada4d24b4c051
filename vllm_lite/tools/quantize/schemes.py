"""Formats of compressed-tensors for a matrix, and their entries in config.json.

The formats are described at https://github.com/vllm-project/compressed-tensors; vLLM and this package read all of
these.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vllm_lite.kernels import cpu, grouped
from vllm_lite.kernels.cpu.weights import grouped as cpu_grouped

LARGEST_FLOAT8 = 448.0


class Scheme(NamedTuple):
    """A way to quantize matrices."""

    form: str
    """compressed-tensors' name of the format."""
    weights: dict[str, Any]
    activations: dict[str, Any] | None
    group_size: int | None
    """The number of inputs must be a multiple of it; None: any number."""
    make: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    """A float matrix [outputs, inputs] -> its tensors, by the suffixes of their names."""

    def takes(self, shape: Sequence[int]) -> bool:
        return len(shape) == 2 and min(shape) > 0 and shape[1] % (self.group_size or 1) == 0

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """config.json's quantization_config. `ignored`: names of matrices that are not quantized."""
        group = {"targets": ["Linear"], "weights": self.weights, "input_activations": self.activations}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.form,
            "config_groups": {"group_0": group | {"output_activations": None}},
            "ignore": sorted(ignored),
            "kv_cache_scheme": None,
        }


def int4(group_size: int) -> Scheme:
    """Groups of inputs, rounded to nearest with the scale of the smallest error, as --quantization int4."""

    def make(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        quantize = cpu_grouped.quantize4 if cpu.available() else grouped.quantize4
        made = quantize(weight, group_size)
        return {
            "weight_packed": _words(made.codes),
            "weight_scale": made.scales.to(torch.bfloat16),  # already rounded to bfloat16
            "weight_shape": torch.tensor(weight.shape),
        }

    return Scheme("pack-quantized", _numbers(4, "int", "group", group_size), None, group_size, make)


def _int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Symmetric int8, with the largest magnitude of each output at 127."""
    exact = weight.to(torch.float32, copy=True)
    least, most = exact.aminmax(dim=1, keepdim=True)
    largest = torch.maximum(-least, most)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)  # number / tensor is not exact
    return {"weight": exact.mul_(inverse).round_().to(torch.int8), "weight_scale": largest / 127}


def _float8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    exact = weight.float()
    scales = exact.abs().amax(1, keepdim=True) / LARGEST_FLOAT8
    codes = torch.where(scales > 0, exact / scales, 0).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scales}


def _numbers(bits: int, kind: str, strategy: str, group_size: int | None = None, **others: Any) -> dict[str, Any]:
    numbers = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group_size, "symmetric": True}
    return numbers | {"dynamic": False, "actorder": None, "block_structure": None} | others


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Pack uint8 [outputs, inputs], below 16, into int32 [outputs, inputs / 8], the first code in the lowest bits."""
    eights = codes.view(len(codes), -1, 8).to(torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (eights << shifts).sum(2, dtype=torch.int32)  # their bits do not overlap


def _by_token(kind: str) -> dict[str, Any]:
    return _numbers(8, kind, "token", dynamic=True)


SCHEMES: dict[str, Scheme] = {
    "int4": int4(128),
    "int4_g32": int4(32),
    "int8": Scheme("int-quantized", _numbers(8, "int", "channel"), _by_token("int"), None, _int8),
    "fp8": Scheme("float-quantized", _numbers(8, "float", "channel"), _by_token("float"), None, _float8),
}
"""int8 and fp8 have one scale per output; vLLM also quantizes the inputs of products, with a scale per token."""
