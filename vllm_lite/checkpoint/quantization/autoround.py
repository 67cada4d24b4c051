"""The quantization_config of AutoRound, whose tensors are GPTQ's or AWQ's, by `packing_format`."""

from typing import Any

import msgspec

from vllm_lite.checkpoint.quantization.gptq import check_bits, group_of
from vllm_lite.checkpoint.quantization.matching import REGEX, check_expression, is_name, module_pattern
from vllm_lite.checkpoint.quantization.spec import Awq, Gptq, GptqLayers
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError

GPTQ = ("auto_round:auto_gptq", "auto_round:gptq")
GPTQ_V2 = ("auto_round", "auto_round:gptqmodel")
AWQ = ("auto_round:auto_awq", "auto_round:awq")
DENSE_BITS = 16
"""Number of bits from which layers are dense."""


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
    """Read the config. Raises ModelError, by name, for an unsupported scheme."""
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
    dense: tuple[str, ...] = () if layers.get("lm_head") and layers["lm_head"].bits else ("lm_head",)
    group_size = group_of(config.group_size)
    if packing in AWQ:
        _check_for_awq(config, layers)
        dense += tuple(each.pattern for each in layers.values() if each.bits is None)
        return Awq(dense=dense, group_size=group_size)
    return Gptq(
        dense=dense,
        bits=config.bits,
        group_size=group_size,
        zeros_less_one=packing in GPTQ,
        has_indices=False,
        layers=tuple(layers.values()),
    )


def _check_for_awq(config: _Config, layers: dict[str, GptqLayers]) -> None:
    """Raise ModelError for settings that are unsupported with AWQ's tensors."""
    usual = (None, None), (4, group_of(config.group_size))
    others = [key for key, each in layers.items() if (each.bits, each.group_size) not in usual]
    if config.bits != 4 or others:
        raise ModelError(
            f"quantization_config with packing_format {config.packing_format!r} is not supported for {config.bits} "
            f"bits, and with extra_config for {others}; supported: 4 bits in one group_size"
        )


def _layers(config: _Config) -> dict[str, GptqLayers]:
    """Layers of extra_config by its keys. Names precede regular expressions, which AutoRound searches anywhere in a
    name."""
    named = (config.extra_config or {}).items()
    usual = {"bits": config.bits, "group_size": config.group_size}
    found = {}
    for key, values in sorted(named, key=lambda item: not is_name(item[0])):
        own = convert(usual | values, _Layers, "quantization_config.extra_config")
        pattern = _pattern(key)
        if own.bits >= DENSE_BITS:
            found[key] = GptqLayers(pattern=pattern, bits=None)
            continue
        check_bits(own.bits)
        if own.data_type != "int":
            raise ModelError(f"quantization_config.extra_config data_type {own.data_type!r} is not supported")
        found[key] = GptqLayers(pattern=pattern, bits=own.bits, group_size=group_of(own.group_size))
    return found


def _pattern(key: str) -> str:
    if is_name(key):
        return module_pattern("extra_config", key)
    check_expression("extra_config", key)
    return f"{REGEX}.*(?:{key})"
