"""The quantization_config that llm-compressor writes, see https://github.com/vllm-project/compressed-tensors."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.quantization.patterns import check_expression
from vllm_lite.checkpoint.quantization.spec import REGEX, PackedInts
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError


class _Weights(msgspec.Struct):
    num_bits: int
    type: str = "int"
    strategy: str | None = None
    group_size: Annotated[int, Meta(ge=-1)] | None = None
    symmetric: bool = True
    actorder: Any = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None
    targets: list[str] = []


class _Config(msgspec.Struct):
    config_groups: dict[str, _Group]
    format: str = "dense"
    ignore: list[str] = []


def read_compressed_tensors(raw: dict[str, Any]) -> PackedInts:
    """Raises ModelError for a scheme that is not supported, by its name."""
    config = convert(raw, _Config)
    schemes = [group.weights for group in config.config_groups.values() if group.weights is not None]
    if len(schemes) != 1:
        raise ModelError(f"quantization_config has {len(schemes)} schemes in config_groups; one is supported")
    weights = schemes[0]
    if config.format != "pack-quantized" or weights.type != "int" or weights.num_bits not in (4, 8):
        raise ModelError(
            f"quantization_config format {config.format!r} with {weights.type}{weights.num_bits} weights is not "
            "supported; supported: 'pack-quantized' with int4 or int8"
        )
    if not weights.symmetric or weights.actorder == "group":
        raise ModelError("quantization_config with zero points, or with actorder 'group', is not supported")
    group = weights.group_size if weights.strategy == "group" else None
    for pattern in config.ignore:
        if pattern.startswith(REGEX):
            check_expression("ignore", pattern.removeprefix(REGEX))
    return PackedInts(
        dense=tuple(config.ignore),
        bits=weights.num_bits,
        group_size=group if group and group > 0 else None,
    )
