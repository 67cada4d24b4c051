"""KV cache dtypes: their names and bytes, and the interface by which a model gives the size of its cache."""

from typing import Any, Protocol

KV_DTYPE_NAMES: dict[str, Any] = {"auto": None, "fp8": "fp8_e4m3"}
"""Values of kv_cache_dtype that stand for another. "auto" is the dtype for which the checkpoint was calibrated, or else
the model's dtype."""
KV_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes of one element of the KV cache, by the resolved kv_cache_dtype."""
KV_SCALE_BYTES = {"int8": 4}
"""Bytes of the scale stored after the elements of each token and head, for the kv_cache_dtypes with scales."""


class KVShape(Protocol):
    """Facts about a model's KV cache that resolve() needs. ModelSpec implements it."""

    @property
    def kv_groups(self) -> tuple[Any, ...]: ...

    @property
    def kv_cache_dtype(self) -> str | None: ...

    def kv_block_bytes(self, block_size: int, dtype_bytes: int, tp: int = 1, scale_bytes: int = 0) -> int: ...
