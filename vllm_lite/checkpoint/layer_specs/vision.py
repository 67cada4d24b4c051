"""A tower that sees images before a model reads them, in numbers: SigLIP, on tiles of one size. No torch."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from vllm_lite.checkpoint.typed_json import Positive, Size, convert, read_json
from vllm_lite.errors import ModelError

PREPROCESSOR_FILE = "preprocessor_config.json"
GREY = (0.5, 0.5, 0.5)
ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
"""Those that see images here. The others of their kind are served as models of text."""


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tower that makes of each tile of `image_size` x `image_size` pixels `num_tokens` vectors of the text model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    norm_eps: float
    activation: Literal["gelu_pytorch_tanh", "gelu"]
    merge: int
    """So many patches along each side become one vector."""
    token_id: int
    """The placeholder."""
    mean: tuple[float, float, float] = GREY
    std: tuple[float, float, float] = GREY
    """A color c of 0 to 255 becomes (c / 255 - mean) / std."""

    @property
    def side(self) -> int:
        """Patches along each side of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Vectors of one tile."""
        return (self.side // self.merge) ** 2

    @property
    def token_bytes(self) -> int:
        """Bytes of a tile for each of its vectors: three colors of so many pixels."""
        return 3 * (self.patch_size * self.merge) ** 2

    @property
    def num_parameters(self) -> int:
        """Weights of the tower, without the projection behind it."""
        size, inner = self.hidden_size, self.intermediate_size
        layer = 4 * size * (size + 1) + 2 * size * inner + inner + size + 4 * size
        return self.num_layers * layer + size * (3 * self.patch_size**2 + 1 + self.side**2) + 2 * size


class _Vision(msgspec.Struct):
    hidden_size: Size = 1152
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 16
    num_channels: Size = 3
    image_size: Size = 224
    patch_size: Size = 32
    layer_norm_eps: Positive = 1e-6
    hidden_act: str = "gelu_pytorch_tanh"


class _Outer(msgspec.Struct):
    vision_config: _Vision = msgspec.field(default_factory=_Vision)
    scale_factor: Size = 2
    image_token_id: int = 128257


class _Colors(msgspec.Struct):
    image_mean: tuple[float, float, float] = GREY
    image_std: tuple[float, float, float] = GREY
    rescale_factor: float = 1 / 255


def read_vision(architecture: str, raw: Any, folder: Path) -> VisionSpec | None:
    """The tower by config.json and the file for the processor; None for a model that sees no images here. Raises
    ModelError, by name, for what is not supported."""
    if architecture not in ARCHITECTURES:
        return None
    outer = convert(raw, _Outer)
    own = outer.vision_config
    if own.num_channels != 3 or own.hidden_act not in ("gelu_pytorch_tanh", "gelu"):
        raise ModelError(
            f"vision_config: num_channels {own.num_channels} with hidden_act {own.hidden_act!r} is not supported; "
            "supported: 3 with gelu_pytorch_tanh or gelu"
        )
    divides = own.image_size % own.patch_size == 0 and (own.image_size // own.patch_size) % outer.scale_factor == 0
    if not divides or own.hidden_size % own.num_attention_heads:
        raise ModelError(
            f"vision_config: image_size {own.image_size} must be a multiple of patch_size {own.patch_size} times "
            f"scale_factor {outer.scale_factor}, and hidden_size {own.hidden_size} of its heads"
        )
    colors = (
        read_json(folder / PREPROCESSOR_FILE, _read_colors) if (folder / PREPROCESSOR_FILE).is_file() else _Colors()
    )
    return VisionSpec(
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_layers=own.num_hidden_layers,
        num_heads=own.num_attention_heads,
        image_size=own.image_size,
        patch_size=own.patch_size,
        norm_eps=own.layer_norm_eps,
        activation="gelu" if own.hidden_act == "gelu" else "gelu_pytorch_tanh",
        merge=outer.scale_factor,
        token_id=outer.image_token_id,
        mean=colors.image_mean,
        std=colors.image_std,
    )


def _read_colors(raw: Any) -> _Colors:
    return convert(raw, _Colors)
