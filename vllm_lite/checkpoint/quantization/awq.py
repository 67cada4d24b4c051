"""The quantization_config of AWQ checkpoints."""

from typing import Any

import msgspec

from vllm_lite.checkpoint.quantization.gptq import group_of
from vllm_lite.checkpoint.quantization.matching import module_pattern
from vllm_lite.checkpoint.quantization.spec import Awq
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError


class _Config(msgspec.Struct):
    bits: int = 4
    group_size: int = 128
    zero_point: bool = True
    version: str | None = None
    format: str = "gemm"
    """GPTQModel's and transformers' name of the version."""
    backend: str = ""
    modules_to_not_convert: list[str] | None = None


def read_awq(raw: dict[str, Any]) -> Awq:
    """Read the config. Raises ModelError, by name, for an unsupported scheme."""
    older = {"w_bit": "bits", "q_group_size": "group_size"}
    config = convert({older.get(key, key): value for key, value in raw.items()}, _Config, "quantization_config")
    version = "llm-awq" if config.backend == "llm-awq" else config.version or config.format
    if config.bits != 4 or version.lower() != "gemm" or not config.zero_point:
        raise ModelError(
            f"quantization_config with bits {config.bits}, version {version!r} and zero_point "
            f"{config.zero_point} is not supported for 'awq'; supported: 4, 'gemm', True"
        )
    skipped = ["lm_head", *(config.modules_to_not_convert or ())]
    dense = tuple(module_pattern("modules_to_not_convert", name) for name in skipped)
    return Awq(dense=dense, group_size=group_of(config.group_size))
