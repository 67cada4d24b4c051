"""The quantization_config of float8 checkpoints: with blocks, as DeepSeek V3's and Qwen3's, and with one scale per
matrix.

transformers and AutoFP8 name the tensors differently. Only the former writes weight_block_size, possibly as null.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.quantization.spec import BlockScaled
from vllm_lite.checkpoint.typed_json import convert

_Block = Annotated[int, Meta(ge=1, le=2**16)]


class _Config(msgspec.Struct):
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[_Block, _Block] | msgspec.UnsetType | None = msgspec.UNSET
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None


def read_fp8(raw: dict[str, Any]) -> BlockScaled:
    """Read the config. Raises ModelError, by name, for an unsupported scheme."""
    config = convert(raw, _Config, "quantization_config")
    block = config.weight_block_size
    of_transformers = block is not msgspec.UNSET
    static = "activation_scale" if of_transformers else "input_scale"
    return BlockScaled(
        numbers="float8",
        dense=("lm_head", *(config.modules_to_not_convert or ()), *(config.ignored_layers or ())),
        block=(None, None) if block is msgspec.UNSET or block is None else block,
        scale="weight_scale_inv" if of_transformers else "weight_scale",
        unread=(static,) if config.activation_scheme == "static" else (),
        float8_rows=True,
    )
