"""The quantization_config of gpt-oss, whose experts are stored in the microscaling format of 4 bits."""

from typing import Any

import msgspec

from vllm_lite.checkpoint.quantization.spec import EXPERTS, MxFp4
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.errors import ModelError


class _Config(msgspec.Struct):
    modules_to_not_convert: list[str] | None = None


def read_mxfp4(raw: dict[str, Any]) -> MxFp4:
    """Read the config. Only experts are quantized, regardless of other modules listed as dense. Raises ModelError if
    experts are listed."""
    config = convert(raw, _Config, "quantization_config")
    for name in config.modules_to_not_convert or ():
        if EXPERTS in f"{name}.":
            raise ModelError(f"quantization_config modules_to_not_convert {name!r} is not supported for 'mxfp4'")
    return MxFp4()
