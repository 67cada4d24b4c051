"""Types of the KV cache: their names, their bytes, and the interface by which a model says how much it keeps."""

from typing import Any, Protocol

KV_DTYPE_NAMES: dict[str, Any] = {"auto": None, "fp8": "fp8_e4m3"}
"""The values of kv_cache_dtype that stand for another; None stands for the one that the checkpoint was calibrated for,
or else the model's dtype."""
KV_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes of one element of the KV cache, by the resolved kv_cache_dtype."""
KV_SCALE_BYTES = {"int8": 4}
"""Bytes behind the elements of each token and head, by those kv_cache_dtypes that keep a scale there."""


class KVShape(Protocol):
    """Facts about a model's KV cache that resolve() needs. A ModelSpec has them."""

    @property
    def kv_groups(self) -> tuple[Any, ...]: ...

    @property
    def kv_cache_dtype(self) -> str | None: ...

    def kv_block_bytes(self, block_size: int, dtype_bytes: int, tp: int = 1, scale_bytes: int = 0) -> int: ...
