"""Reads a quantization_config into a QuantizationSpec, by its quant_method. Unsupported methods are refused by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from vllm_lite.checkpoint.quantization.autoround import read_auto_round
from vllm_lite.checkpoint.quantization.awq import read_awq
from vllm_lite.checkpoint.quantization.bitsandbytes import read_bitsandbytes
from vllm_lite.checkpoint.quantization.compressed_tensors import read_compressed_tensors
from vllm_lite.checkpoint.quantization.fp8 import read_fp8
from vllm_lite.checkpoint.quantization.gptq import read_gptq
from vllm_lite.checkpoint.quantization.mxfp4 import read_mxfp4
from vllm_lite.checkpoint.quantization.spec import AnyQuantization
from vllm_lite.checkpoint.typed_json import convert, read_json
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
"""quant_method -> reader, which returns None if no weights are quantized. Each raises ModelError for unsupported
values."""


def read_quantization(config: dict[str, Any] | None) -> AnyQuantization | None:
    """Read the quantization_config of config.json, which may be None or empty. Raises ModelError."""
    if not config:
        return None
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"quantization_config {method!r} is not supported; supported: {', '.join(sorted(METHODS))}, "
            "or an unquantized checkpoint with --quantization"
        )
    return METHODS[method](config)


# ---- Older files beside config.json in which tools described a quantization


OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""File -> its quant_method, if it has none."""


def older_quantization(folder: Path) -> dict[str, Any] | None:
    """Read such a file as a quantization_config; None if there is none. Raises ModelError for a damaged one."""
    for name, method in OLDER_FILES.items():
        if (folder / name).exists():
            return {"quant_method": method} | read_json(folder / name, _as_object)
    return None


def _as_object(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ModelError(f"it holds {type(raw).__name__}; it must be an object")
    return raw


# ---- The KV cache dtype that a checkpoint was calibrated for: compressed-tensors' `kv_cache_scheme`


class _Scheme(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True


class _Config(msgspec.Struct):
    kv_cache_scheme: _Scheme | None = None


def read_kv_cache(raw: dict[str, Any] | None) -> Literal["fp8_e4m3"] | None:
    """The kv_cache_dtype for "auto": float8 with one scale per tensor. Other schemes are ignored: the cache then has
    the model's dtype, which is more precise. Raises ModelError for an invalid scheme."""
    if not raw or raw.get("quant_method") != "compressed-tensors":
        return None
    scheme = convert(raw, _Config, "quantization_config").kv_cache_scheme
    if scheme is None or (scheme.type, scheme.num_bits, scheme.symmetric) != ("float", 8, True):
        return None
    return "fp8_e4m3" if scheme.strategy in ("tensor", None) else None
