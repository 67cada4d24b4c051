"""The quantization_config of AutoRound, which stores GPTQ's or AWQ's tensors and says so in `packing_format`."""

import re
from typing import Any

import msgspec

from vllm_lite.checkpoint.quantization.gptq import check_bits, group_of
from vllm_lite.checkpoint.quantization.patterns import check_expression
from vllm_lite.checkpoint.quantization.spec import PART, REGEX, Awq, Gptq, GptqLayers
from vllm_lite.checkpoint.tensor_names import canonical
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError

GPTQ = ("auto_round:auto_gptq", "auto_round:gptq")
GPTQ_V2 = ("auto_round", "auto_round:gptqmodel")
AWQ = ("auto_round:auto_awq", "auto_round:awq")
DENSE_BITS = 16
"""From so many bits on layers are dense."""
_NAME = re.compile(r"[\w.-]+")


class _Layers(msgspec.Struct):
    bits: int
    group_size: int
    data_type: str = "int"


class _Config(msgspec.Struct):
    bits: int
    group_size: int = 128
    data_type: str = "int"
    packing_format: str = GPTQ[0]
    act_bits: int | None = None
    extra_config: dict[str, dict[str, Any]] | None = None


def read_auto_round(raw: dict[str, Any]) -> Gptq | Awq:
    """Raises ModelError for a scheme that is not supported, by its name."""
    config = convert(raw, _Config, "quantization_config")
    packing = config.packing_format
    if packing not in GPTQ + GPTQ_V2 + AWQ:
        raise ModelError(
            f"quantization_config packing_format {packing!r} is not supported; supported: "
            f"{', '.join(GPTQ + GPTQ_V2 + AWQ)}"
        )
    if config.data_type != "int" or (config.act_bits or DENSE_BITS) < DENSE_BITS:
        raise ModelError(
            f"quantization_config data_type {config.data_type!r} with act_bits {config.act_bits} is not supported for "
            f"'auto-round'; supported: 'int' with {DENSE_BITS}"
        )
    check_bits(config.bits)
    layers = _layers(config)
    dense = () if any(each.pattern == f"{PART}lm_head" and each.bits for each in layers) else ("lm_head",)
    group_size = group_of(config.group_size)
    if packing not in AWQ:
        v1 = packing in GPTQ
        return Gptq(
            dense=dense, bits=config.bits, group_size=group_size, zeros_less_one=v1, has_indices=False, layers=layers
        )
    others = [
        each.pattern for each in layers if each.bits not in (None, 4) or (each.bits and each.group_size != group_size)
    ]
    if config.bits != 4 or others:
        raise ModelError(
            f"quantization_config with packing_format {packing!r} is not supported for {config.bits} bits, and with "
            f"extra_config for {others}; supported: 4 bits in one group_size"
        )
    return Awq(dense=(*dense, *(each.pattern for each in layers if each.bits is None)), group_size=group_size)


def _layers(config: _Config) -> tuple[GptqLayers, ...]:
    """Names come before expressions, which AutoRound searches for anywhere in a name."""
    named = (config.extra_config or {}).items()
    usual = {"bits": config.bits, "group_size": config.group_size}
    found = []
    for key, values in sorted(named, key=lambda item: _NAME.fullmatch(item[0]) is None):
        own = convert(usual | values, _Layers, "quantization_config.extra_config")
        pattern = _pattern(key)
        if own.bits >= DENSE_BITS:
            found.append(GptqLayers(pattern=pattern, bits=None))
            continue
        check_bits(own.bits)
        if own.data_type != "int":
            raise ModelError(f"quantization_config.extra_config data_type {own.data_type!r} is not supported")
        found.append(GptqLayers(pattern=pattern, bits=own.bits, group_size=group_of(own.group_size)))
    return tuple(found)


def _pattern(key: str) -> str:
    if _NAME.fullmatch(key):
        return PART + canonical(f"{key}.").removesuffix(".")
    check_expression("extra_config", key)
    return f"{REGEX}.*(?:{key})"
