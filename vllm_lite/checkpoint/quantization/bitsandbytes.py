"""The quantization_config of checkpoints that transformers quantized with bitsandbytes."""

from typing import Any

import msgspec

from vllm_lite.checkpoint.quantization.matching import module_pattern
from vllm_lite.checkpoint.quantization.spec import BitsAndBytes4, BitsAndBytes8
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError


class _Config(msgspec.Struct):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str | None = None
    llm_int8_has_fp16_weight: bool = False
    llm_int8_skip_modules: list[str] | None = None


def read_bitsandbytes(raw: dict[str, Any]) -> BitsAndBytes4 | BitsAndBytes8:
    """Read the config. Raises ModelError, by name, for an unsupported scheme."""
    config = convert(raw, _Config, "quantization_config")
    if config.load_in_4bit == config.load_in_8bit:
        raise ModelError(
            f"quantization_config load_in_4bit and load_in_8bit are both {config.load_in_4bit}; one must be true"
        )
    skipped = ["lm_head"] if config.llm_int8_skip_modules is None else config.llm_int8_skip_modules
    dense = tuple(module_pattern("llm_int8_skip_modules", name) for name in skipped)
    if config.load_in_8bit:
        if config.llm_int8_has_fp16_weight:
            raise ModelError("quantization_config llm_int8_has_fp16_weight is not supported; supported: False")
        return BitsAndBytes8(dense=dense)
    if (table := config.bnb_4bit_quant_type) not in ("nf4", "fp4"):
        raise ModelError(f"quantization_config bnb_4bit_quant_type {table!r} is not supported; supported: nf4, fp4")
    if config.bnb_4bit_quant_storage not in (None, "uint8"):
        raise ModelError(
            f"quantization_config bnb_4bit_quant_storage {config.bnb_4bit_quant_storage!r} is not supported; "
            "supported: 'uint8'"
        )
    return BitsAndBytes4(dense=dense, table="nf4" if table == "nf4" else "fp4", nested=config.bnb_4bit_use_double_quant)
