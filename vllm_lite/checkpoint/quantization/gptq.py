"""The quantization_config of GPTQ checkpoints."""

from typing import Any

import msgspec

from vllm_lite.checkpoint.quantization.matching import REGEX, check_expression
from vllm_lite.checkpoint.quantization.spec import Gptq, GptqLayers
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError

FORMATS = ("gptq", "gptq_v2")
BITS = (2, 3, 4, 8)
EXCEPT, ONLY = "-:", "+:"
"""Prefixes of keys of `dynamic` whose layers are dense, or differ; without a prefix they differ."""


class _Config(msgspec.Struct):
    bits: int
    group_size: int = 128
    desc_act: bool = False
    checkpoint_format: str | None = None
    format: str = "gptq"
    """checkpoint_format in newer files."""
    pack_dtype: str = "int32"
    lm_head: bool = False
    dynamic: dict[str, dict[str, Any]] | None = None
    modules_in_block_to_quantize: list[list[str] | str] | None = None


class _Layers(msgspec.Struct):
    """Fields of `dynamic` for some layers; the others only describe how they were quantized."""

    bits: int
    group_size: int
    desc_act: bool


def read_gptq(raw: dict[str, Any]) -> Gptq:
    """Read the config. Raises ModelError, by name, for an unsupported scheme."""
    config = convert(raw, _Config, "quantization_config")
    check_bits(config.bits)
    stored_as = config.checkpoint_format or config.format
    if stored_as not in FORMATS or config.pack_dtype != "int32":
        raise ModelError(
            f"quantization_config checkpoint_format {stored_as!r} with pack_dtype {config.pack_dtype!r} is not "
            f"supported; supported: {', '.join(FORMATS)} with int32"
        )
    return Gptq(
        dense=() if config.lm_head else ("lm_head",),
        bits=config.bits,
        group_size=group_of(config.group_size),
        sorted_columns=config.desc_act,
        zeros_less_one=stored_as == "gptq",
        layers=tuple(_layers(config, key, values) for key, values in (config.dynamic or {}).items()),
        only=_only(config.modules_in_block_to_quantize),
    )


def check_bits(bits: int) -> None:
    """Raise ModelError for an unsupported number of bits."""
    if bits not in BITS:
        raise ModelError(
            f"quantization_config bits {bits} is not supported for 'gptq'; supported: {', '.join(map(str, BITS))}"
        )


def group_of(size: int) -> int | None:
    """Convert a group_size, where -1 means all inputs. Raises ModelError for an invalid one."""
    if size == 0 or size < -1:
        raise ModelError(f"quantization_config group_size {size} must be -1, or a number of inputs")
    return None if size == -1 else size


def _layers(config: _Config, key: str, values: dict[str, Any]) -> GptqLayers:
    expression = key.removeprefix(ONLY).removeprefix(EXCEPT)
    check_expression("dynamic", expression)
    if key.startswith(EXCEPT):
        return GptqLayers(pattern=f"{REGEX}{expression}", bits=None)
    usual = {"bits": config.bits, "group_size": config.group_size, "desc_act": config.desc_act}
    own = convert(usual | values, _Layers, "quantization_config.dynamic")
    check_bits(own.bits)
    return GptqLayers(
        pattern=f"{REGEX}{expression}",
        bits=own.bits,
        group_size=group_of(own.group_size),
        sorted_columns=own.desc_act,
    )


def _only(names: list[list[str] | str] | None) -> tuple[str, ...]:
    """Read modules_in_block_to_quantize: layers within a block, in one list or several."""
    flat = [[name] if isinstance(name, str) else name for name in names or ()]
    return tuple(f".{name}" for part in flat for name in part)
