"""The quantization_config written by llm-compressor; see https://github.com/vllm-project/compressed-tensors."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.quantization.matching import REGEX, check_expression
from vllm_lite.checkpoint.quantization.spec import BlockScaled, Mixed, PackedInts
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError

CLASSES = ("Linear",)
"""Targets that are torch classes: all matrices of projections."""
_Size = Annotated[int, Meta(ge=1, le=2**24)]


class _Numbers(msgspec.Struct):
    """Number format of weights or activations."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    group_size: Annotated[int, Meta(ge=-1)] | None = None
    block_structure: tuple[_Size, _Size] | None = None
    symmetric: bool = True
    dynamic: bool | str = False
    actorder: str | bool | None = None

    @property
    def kind(self) -> str:
        return f"{self.type}{self.num_bits}"

    @property
    def group(self) -> int | None:
        """Number of inputs that share a scale; None: all."""
        return self.group_size if self.group_size and self.group_size > 0 else None


class _Group(msgspec.Struct):
    weights: _Numbers | None = None
    input_activations: _Numbers | None = None
    output_activations: _Numbers | None = None
    targets: list[str] = []
    format: str | None = None


class _Config(msgspec.Struct):
    config_groups: dict[str, _Group] = {}
    format: str = "dense"
    ignore: list[str] = []
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    kv_cache_scheme: dict[str, Any] | None = None


def read_compressed_tensors(raw: dict[str, Any]) -> PackedInts | BlockScaled | Mixed | None:
    """Read the config; None if only the KV cache is quantized. Raises ModelError, by name, for an unsupported
    scheme."""
    config = convert(raw, _Config, "quantization_config")
    sparsity = (config.sparsity_config or {}).get("format", "dense")
    if sparsity != "dense":
        raise ModelError(
            f"quantization_config.sparsity_config format {sparsity!r} is not supported; supported: 'dense'"
        )
    if (config.transform_config or {}).get("config_groups"):
        raise ModelError("quantization_config.transform_config, by which activations are rotated, is not supported")
    ignored = _patterns("ignore", config.ignore)
    groups = [group for group in config.config_groups.values() if group.weights is not None]
    if not groups and config.kv_cache_scheme is not None:
        return None
    if not groups:
        raise ModelError("quantization_config.config_groups has no scheme for weights")
    specs = tuple(_spec(group, group.format or config.format, ignored) for group in groups)
    return specs[0] if len(specs) == 1 else Mixed(parts=specs)


def _patterns(key: str, patterns: list[str]) -> tuple[str, ...]:
    for pattern in patterns:
        if pattern.startswith(REGEX):
            check_expression(key, pattern.removeprefix(REGEX))
    return tuple(patterns)


def _spec(group: _Group, form: str, ignored: tuple[str, ...]) -> PackedInts | BlockScaled:
    weights = group.weights
    assert weights is not None  # noqa: S101 (the caller's)
    everything = not group.targets or any(target in CLASSES for target in group.targets)
    targets = () if everything else _patterns("config_groups.targets", group.targets)
    if form == "pack-quantized" and weights.kind in ("int4", "int8") and weights.strategy in ("group", "channel", None):
        return PackedInts(
            dense=ignored,
            targets=targets,
            bits=weights.num_bits,
            group_size=weights.group if weights.strategy != "channel" else None,
            zeros=not weights.symmetric,
            sorted_columns=weights.actorder in ("group", "dynamic", True),
        )
    block = _block(weights)
    if form not in ("float-quantized", "int-quantized", "naive-quantized") or block is None:
        raise ModelError(
            f"quantization_config format {form!r} with {weights.kind} weights by {weights.strategy!r} is not "
            "supported; supported: 'pack-quantized' with int4 or int8 by group or channel, 'float-quantized' with "
            "float8, 'int-quantized' with int8"
        )
    rows = group.input_activations
    return BlockScaled(
        dense=ignored,
        targets=targets,
        numbers="float8" if weights.type == "float" else "int8",
        block=block,
        scale="weight_scale",
        zeros=None if weights.symmetric else "weight_zero_point",
        unread=tuple(
            _of_activations("input", group.input_activations) + _of_activations("output", group.output_activations)
        ),
        float8_rows=weights.type == "float" and rows is not None and rows.kind == "float8",
    )


def _block(weights: _Numbers) -> tuple[int | None, int | None] | None:
    """Numbers of outputs and inputs that share a scale; None for an unsupported scheme."""
    if weights.kind not in ("float8", "int8") or weights.actorder in ("group", "dynamic", True):
        return None
    match weights.strategy:
        case "tensor" | None:
            return None, None
        case "channel":
            return 1, None
        case "group":
            return 1, weights.group
        case "block":
            return weights.block_structure
    return None


def _of_activations(which: str, numbers: _Numbers | None) -> list[str]:
    """Tensors of static activation scales, which are not read."""
    if numbers is None or numbers.dynamic:
        return []
    return [f"{which}_scale"] if numbers.symmetric else [f"{which}_scale", f"{which}_zero_point"]
