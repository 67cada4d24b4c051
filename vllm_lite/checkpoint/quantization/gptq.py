"""The quantization_config of GPTQ checkpoints."""

from typing import Any

import msgspec

from vllm_lite.checkpoint.quantization.spec import Gptq
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError

FORMATS = ("gptq", "gptq_v2")


class _Config(msgspec.Struct):
    bits: int
    group_size: int = 128
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    lm_head: bool = False
    dynamic: dict[str, Any] | None = None


def read_gptq(raw: dict[str, Any]) -> Gptq:
    """Raises ModelError for a scheme that is not supported, by its name."""
    config = convert(raw, _Config, "quantization_config")
    if config.bits not in (4, 8):
        raise ModelError(f"quantization_config bits {config.bits} is not supported for 'gptq'; supported: 4, 8")
    if config.checkpoint_format not in FORMATS:
        raise ModelError(
            f"quantization_config checkpoint_format {config.checkpoint_format!r} is not supported; supported: "
            f"{', '.join(FORMATS)}"
        )
    if config.dynamic:
        raise ModelError("quantization_config dynamic, by which layers differ, is not supported for 'gptq'")
    if config.group_size == 0 or config.group_size < -1:
        raise ModelError(f"quantization_config group_size {config.group_size} must be -1, or a number of inputs")
    return Gptq(
        dense=() if config.lm_head else ("lm_head",),
        bits=config.bits,
        group_size=None if config.group_size == -1 else config.group_size,
        sorted_columns=config.desc_act,
        zeros_less_one=config.checkpoint_format == "gptq",
    )
