"""VisionSpec: the spec of a vision tower. No torch."""

import re
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, TypeVar

import msgspec

from vllm_lite.checkpoint.typed_json import Positive, Size, convert, read_json
from vllm_lite.errors import ModelError

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
GREY = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
Colors = tuple[float, float, float]
Activation = Literal["gelu_pytorch_tanh", "gelu", "silu", "quick_gelu"]
Gelu = Literal["gelu_pytorch_tanh", "gelu"]
T = TypeVar("T", bound=msgspec.Struct)
_LAYER = re.compile(r"\.layers\.(\d{1,6})\.")


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tower, which computes vectors for the text model from patches of an image. Subclasses are kinds of towers."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    norm_eps: float
    activation: Activation
    merge: int
    """Number of patches along each side that become one vector."""
    out_size: int
    """Elements of a vector of the text model."""
    token_id: int
    """Id of the placeholder token."""
    mean: Colors = GREY
    std: Colors = GREY
    """A color c of 0 to 255 becomes (c / 255 - mean) / std."""
    whole_in: Literal["no layers", "all layers", "sliding layers"] = "no layers"
    """Layers of the text model with bidirectional attention within an image."""
    most_tokens: int = 0
    """Maximum number of vectors of an image, if there are such layers."""

    def whole_images(self, window: int | None) -> int:
        """AttentionSpec.whole_images of a layer of the text model with this window."""
        sees = self.whole_in == "all layers" or (self.whole_in == "sliding layers" and window is not None)
        return self.most_tokens if sees else 0

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of parameters of the tower and of its projection to the text model."""

    @property
    def num_deep(self) -> int:
        """Number of further vectors per token (deepstack): one is added after each of the text model's first layers."""
        return 0

    @property
    def vector_size(self) -> int:
        """Elements of a token's vector and its further ones, which are kept in one row."""
        return self.out_size * (1 + self.num_deep)

    @property
    def token_bytes(self) -> int:
        """Bytes of an image per token: three colors per pixel."""
        return 3 * (self.patch_size * self.merge) ** 2

    @property
    def bytes_vary(self) -> bool:
        """Whether an image may have fewer bytes per token."""
        return False

    def reads(self, name: str) -> bool:
        """Whether the tower has the tensor of this canonical name; layers after its last are not read."""
        found = _LAYER.search(name)
        return found is None or int(found[1]) < self.num_layers

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of the layers."""
        size, inner = self.hidden_size, self.intermediate_size
        return self.num_layers * (4 * size * (size + 1) + 2 * size * inner + inner + size + 4 * size)


class TileVisionSpec(VisionSpec, frozen=True, kw_only=True):
    """A tower of tiles of `image_size` x `image_size` pixels."""

    image_size: int

    @property
    def side(self) -> int:
        """Number of patches along each side of a tile."""
        return self.image_size // self.patch_size


class SiglipSpec(TileVisionSpec, frozen=True, kw_only=True):
    """Tower of Idefics 3."""

    @property
    def num_tokens(self) -> int:
        """Number of vectors of one tile."""
        return (self.side // self.merge) ** 2

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the tower and the projection."""
        size = self.hidden_size
        own = size * (3 * self.patch_size**2 + 1 + self.side**2) + 2 * size
        return self.layer_parameters + own + size * self.merge**2 * self.out_size


class TowerConfig(msgspec.Struct, kw_only=True):
    """Keys of vision_config that most towers of tiles have; a family sets its own defaults."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_channels: Literal[3] = 3
    image_size: Size
    patch_size: Size
    hidden_act: Activation

    def common(self, colors: "VisionColors", out_size: int) -> dict[str, Any]:
        """The fields of the tower's spec that have these values."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_layers": self.num_hidden_layers,
            "num_heads": self.num_attention_heads,
            "patch_size": self.patch_size,
            "image_size": self.image_size,
            "activation": self.hidden_act,
            "out_size": out_size,
            "mean": colors.image_mean,
            "std": colors.image_std,
        }


class _Vision(TowerConfig, kw_only=True):
    hidden_size: Size = 1152
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 16
    image_size: Size = 224
    patch_size: Size = 32
    hidden_act: Gelu = "gelu_pytorch_tanh"
    layer_norm_eps: Positive = 1e-6


class _Outer(msgspec.Struct):
    vision_config: _Vision = msgspec.field(default_factory=_Vision)
    scale_factor: Size = 2
    image_token_id: int = 128257


class VisionColors(msgspec.Struct):
    """Colors in the processor's file."""

    image_mean: Colors = GREY
    image_std: Colors = GREY


class _ClipColors(VisionColors):
    image_mean: Colors = CLIP_MEAN
    image_std: Colors = CLIP_STD


def read_vision(architecture: str, raw: Any, folder: Path, out_size: int = 0) -> VisionSpec | None:
    """Read the vision tower from config.json and the processor's file; None for a model without a supported one.
    `out_size`: elements of the text model's vectors. Raises ModelError, by name, for unsupported values."""
    vision = raw.get("vision_config")
    kind = vision.get("model_type") if isinstance(vision, dict) else None
    named = READERS.get(f"{architecture} {kind}") or READERS.get(architecture)
    if named is None or not vision:
        return None
    reader: Callable[[Any, VisionColors, int], VisionSpec] = resolve_name(named)
    colors = _ClipColors if architecture in CLIP_COLORED else VisionColors
    return reader(raw, read_processor(folder, colors), out_size)


def read_processor(folder: Path, kind: type[T]) -> T:
    """Read the image processor's settings from either of its files; the defaults without a file. Raises ModelError."""
    if (file := folder / PREPROCESSOR_FILE).is_file():
        return read_json(file, lambda raw: convert(raw, kind))
    if (file := folder / PROCESSOR_FILE).is_file():
        return read_json(file, lambda raw: convert(raw.get("image_processor") or {}, kind))
    return kind()


def check_depth(layer: int | list[int], num_layers: int) -> int:
    """Number of layers to run for `vision_feature_layer`, which counts hidden states from the first layer's input on.
    Raises ModelError."""
    if isinstance(layer, list) and len(layer) == 1:
        layer = layer[0]
    depth = layer if isinstance(layer, list) or layer >= 0 else num_layers + 1 + layer
    if isinstance(depth, list) or not 1 <= depth <= num_layers:
        raise ModelError(f"vision_feature_layer {layer} is not supported; it must be one of {num_layers} layers")
    return depth


def _siglip(raw: Any, colors: VisionColors, out_size: int) -> SiglipSpec:
    outer = convert(raw, _Outer)
    own = outer.vision_config
    check_heads(own.hidden_size, own.num_attention_heads)
    if own.image_size % own.patch_size or (own.image_size // own.patch_size) % outer.scale_factor:
        raise ModelError(
            f"vision_config: image_size {own.image_size} must be a multiple of patch_size {own.patch_size} times "
            f"scale_factor {outer.scale_factor}"
        )
    return SiglipSpec(
        **own.common(colors, out_size),
        norm_eps=own.layer_norm_eps,
        merge=outer.scale_factor,
        token_id=outer.image_token_id,
    )


def check_heads(size: int, num_heads: int, *, by_four: bool = False) -> None:
    """Raise ModelError unless all heads have equally many elements. `by_four`: a multiple of 4, as
    rope turns pairs along two axes."""
    if size % (4 * num_heads if by_four else num_heads):
        times = "4 times " if by_four else ""
        raise ModelError(f"vision_config: hidden_size {size} must be a multiple of {times}its {num_heads} heads")


_OWN = __name__
READERS = {
    "Gemma3ForConditionalGeneration": "vllm_lite.checkpoint.layer_specs.gemma_vision:read_gemma3",
    "Gemma4ForConditionalGeneration": "vllm_lite.checkpoint.layer_specs.gemma_vision:read_gemma4",
    "Gemma4UnifiedForConditionalGeneration": "vllm_lite.checkpoint.layer_specs.gemma_vision:read_unified",
    "Idefics3ForConditionalGeneration": f"{_OWN}:_siglip",
    "LlavaForConditionalGeneration clip_vision_model": "vllm_lite.checkpoint.layer_specs.anyres:read_llava",
    "LlavaForConditionalGeneration pixtral": "vllm_lite.checkpoint.layer_specs.pixtral:read_pixtral",
    "LlavaNextForConditionalGeneration clip_vision_model": "vllm_lite.checkpoint.layer_specs.anyres:read_next",
    "LlavaOnevisionForConditionalGeneration siglip_vision_model": (
        "vllm_lite.checkpoint.layer_specs.anyres:read_onevision"
    ),
    "Mistral3ForConditionalGeneration pixtral": "vllm_lite.checkpoint.layer_specs.pixtral:read_mistral3",
    "SmolVLMForConditionalGeneration": f"{_OWN}:_siglip",
    "Qwen2VLForConditionalGeneration": "vllm_lite.checkpoint.layer_specs.qwen_vision:read_qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "vllm_lite.checkpoint.layer_specs.qwen_vision:read_qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "vllm_lite.checkpoint.layer_specs.qwen_vision:read_qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "vllm_lite.checkpoint.layer_specs.qwen_vision:read_qwen3_vl",
    "Qwen3_5ForConditionalGeneration": "vllm_lite.checkpoint.layer_specs.qwen_vision:read_qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "vllm_lite.checkpoint.layer_specs.qwen_vision:read_qwen3_5",
}
"""Readers of towers by architecture, or by architecture and model_type of the tower. Other models are served as text
models."""
CLIP_COLORED = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
"""Architectures whose processors default to CLIP's colors."""
