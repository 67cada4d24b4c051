"""The quantization_config that llm-compressor writes, see https://github.com/vllm-project/compressed-tensors."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.quantization.spec import REGEX, PackedInts
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError

MAX_REPEATS = 4
"""In a regular expression, as names of 60 characters are matched in less than 60^4 steps."""
MAX_EXPRESSION = 400
"""Characters."""


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
    _check_patterns(config.ignore)
    return PackedInts(
        dense=tuple(config.ignore),
        bits=weights.num_bits,
        group_size=group if group and group > 0 else None,
    )


def _check_patterns(patterns: list[str]) -> None:
    """Raise ModelError for an expression that could take for ever: the file may be a stranger's."""
    for pattern in patterns:
        if not pattern.startswith(REGEX):
            continue
        expression = pattern.removeprefix(REGEX)
        num_repeats = sum(expression.count(sign) for sign in "*+?{")
        if num_repeats > MAX_REPEATS or re.search(r"\)[*+?{]|\(\?", expression) or len(expression) > MAX_EXPRESSION:
            raise ModelError(
                f"quantization_config.ignore: {pattern[:MAX_EXPRESSION]!r} is too complex; at most {MAX_REPEATS} "
                f"repetitions, none of a group, and {MAX_EXPRESSION} characters are supported"
            )
        try:
            re.compile(expression)
        except re.error as error:
            raise ModelError(
                f"quantization_config.ignore: {pattern!r} is not a regular expression ({error})"
            ) from error
