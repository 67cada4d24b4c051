"""quantization_config -> QuantizationSpec, by its quant_method. What is not supported is refused by name."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_lite.checkpoint.quantization.autoround import read_auto_round
from vllm_lite.checkpoint.quantization.awq import read_awq
from vllm_lite.checkpoint.quantization.bitsandbytes import read_bitsandbytes
from vllm_lite.checkpoint.quantization.compressed_tensors import read_compressed_tensors
from vllm_lite.checkpoint.quantization.fp8 import read_fp8
from vllm_lite.checkpoint.quantization.gptq import read_gptq
from vllm_lite.checkpoint.quantization.mxfp4 import read_mxfp4
from vllm_lite.checkpoint.quantization.spec import AnyQuantization
from vllm_lite.errors import ModelError

METHODS: Mapping[str, Callable[[dict[str, Any]], AnyQuantization | None]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "intel/auto-round": read_auto_round,
    "mxfp4": read_mxfp4,
}
"""quant_method -> what reads the rest, and is None if no weights are quantized. Each raises ModelError for what it does
not know."""


def read_quantization(config: dict[str, Any] | None) -> AnyQuantization | None:
    """`config`: the quantization_config of config.json; None, and empty, where there is none. Raises ModelError."""
    if not config:
        return None
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"quantization_config {method!r} is not supported; supported: {', '.join(sorted(METHODS))}, "
            "or an unquantized checkpoint with --quantization"
        )
    return METHODS[method](config)
