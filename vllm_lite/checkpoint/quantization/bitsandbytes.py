"""The quantization_config of checkpoints that transformers quantized with bitsandbytes."""

import re
from typing import Any

import msgspec

from vllm_lite.checkpoint.quantization.spec import REGEX, BitsAndBytes4, BitsAndBytes8
from vllm_lite.checkpoint.tensor_names import canonical
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError

_NAME = re.compile(r"[\w.-]+")


class _Config(msgspec.Struct):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str | None = None
    llm_int8_has_fp16_weight: bool = False
    llm_int8_skip_modules: list[str] | None = None


def read_bitsandbytes(raw: dict[str, Any]) -> BitsAndBytes4 | BitsAndBytes8:
    """Raises ModelError for a scheme that is not supported, by its name."""
    config = convert(raw, _Config, "quantization_config")
    if config.load_in_4bit == config.load_in_8bit:
        raise ModelError(
            f"quantization_config load_in_4bit and load_in_8bit are both {config.load_in_4bit}; one must be true"
        )
    dense = _dense(config.llm_int8_skip_modules)
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


def _dense(skipped: list[str] | None) -> tuple[str, ...]:
    """A skipped module is dense, and all below it; transformers also takes it for the end of a longer name. If none is
    given it skips the head, and else only those that are."""
    patterns = []
    for name in ["lm_head"] if skipped is None else skipped:
        if not _NAME.fullmatch(name):
            raise ModelError(f"quantization_config llm_int8_skip_modules: {name!r} is not the name of a module")
        own = canonical(f"{name}.").removesuffix(".")
        patterns.append(rf"{REGEX}(?:.*\.)?{re.escape(own)}(?:\.|$)")
    return tuple(patterns)
