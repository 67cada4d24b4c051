"""Scales of a checkpoint for a float8 KV cache: one for K and one for V in each layer. No torch.

The cache stores K / scale. Tools use different tensor names; those read here are vLLM's.
"""

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_lite.checkpoint.gguf.checkpoint import GgufCheckpoint
from vllm_lite.checkpoint.tensors.headers import TensorPlace, locate
from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.errors import ModelError

_NAME = re.compile(
    r"model\.layers\.(\d{1,6})\.(?:self_attn|attn|attention)\."
    r"(?:(?:attn\.|qkv_proj\.|[kv]_proj\.)?([kv])_scale|([kv])_proj\.output_scale|(?:attn\.)?(kv)_scale)"
)
_WITHOUT = "give --kv-cache-dtype bfloat16 or int8 to do without"


class KVScales(NamedTuple):
    """Scales of one layer's float8 cache."""

    key: float = 1.0
    value: float = 1.0


def read_kv_scales(folder: Path, num_layers: int) -> tuple[KVScales, ...]:
    """The scales of each layer; empty if the checkpoint has none.

    Raises ModelError, with the tensor's name, for a value that is not a positive number, for a layer with only one of
    its scales, and if only some layers have scales.
    """
    if GgufCheckpoint.find(folder) is not None:
        return ()
    found: dict[tuple[int, str], float] = {}
    for stored_as, place in locate(folder).items():
        if (named := _NAME.fullmatch(canonical(stored_as))) is None or int(named[1]) >= num_layers:
            continue
        number = _read(stored_as, place)
        for part in named[2] or named[3] or named[4]:
            if found.setdefault((int(named[1]), part), number) != number:
                raise ModelError(f"{folder}: layer {named[1]} has several scales of {part.upper()}; {_WITHOUT}")
    return tuple(_layer(folder, index, found) for index in range(num_layers)) if found else ()


def has_kv_scales(folder: Path) -> bool:
    """Whether the checkpoint has scales. Raises ModelError for damaged files."""
    return GgufCheckpoint.find(folder) is None and any(_NAME.fullmatch(canonical(name)) for name in locate(folder))


def _layer(folder: Path, index: int, found: Mapping[tuple[int, str], float]) -> KVScales:
    for part in "kv":
        if (index, part) not in found:
            raise ModelError(f"{folder}: layer {index} has no {part}_scale and others have; {_WITHOUT}")
    return KVScales(found[index, "k"], found[index, "v"])


def _read(name: str, place: TensorPlace) -> float:
    """Read a tensor of one number. Raises ModelError."""
    if math.prod(place.shape) != 1:
        raise ModelError(
            f"{place.file}: {name} has {math.prod(place.shape)} numbers; a KV cache has one scale a layer, not one a "
            f"head; {_WITHOUT}"
        )
    try:
        data = bytes(place.read())
        if place.dtype == "BF16":
            data, form = b"\0\0" + data, "<f"
        else:
            form = "<f" if place.dtype == "F32" else "<e"
        (number,) = struct.unpack(form, data)
    except (OSError, struct.error) as error:
        raise ModelError(f"{place.file}: {name} cannot be read ({error})") from error
    if not (math.isfinite(number) and number > 0):
        raise ModelError(f"{place.file}: {name} is {number:g}; a scale must be a positive number; {_WITHOUT}")
    return float(number)
