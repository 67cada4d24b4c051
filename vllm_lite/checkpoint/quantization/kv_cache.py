"""The KV cache that a checkpoint was calibrated for: compressed-tensors' `kv_cache_scheme`."""

from typing import Any, Literal

import msgspec

from vllm_lite.checkpoint.typed_json import convert


class _Scheme(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True


class _Config(msgspec.Struct):
    kv_cache_scheme: _Scheme | None = None


def read_kv_cache(raw: dict[str, Any] | None) -> Literal["fp8_e4m3"] | None:
    """The kv_cache_dtype that "auto" stands for: float8 with one scale a tensor. Other schemes, which are not
    supported, are as none: the cache is then in the model's dtype, and finer. Raises ModelError for what is none."""
    if not raw or raw.get("quant_method") != "compressed-tensors":
        return None
    scheme = convert(raw, _Config, "quantization_config").kv_cache_scheme
    if scheme is None or (scheme.type, scheme.num_bits, scheme.symmetric) != ("float", 8, True):
        return None
    return "fp8_e4m3" if scheme.strategy in ("tensor", None) else None
