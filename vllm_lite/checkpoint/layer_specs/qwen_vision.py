"""Specs of the towers of Qwen2-VL to Qwen3.5. No torch."""

import math
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from vllm_lite.checkpoint.layer_specs.vision import Activation, Gelu, VisionColors, VisionSpec, check_heads
from vllm_lite.checkpoint.typed_json import Size, convert
from vllm_lite.errors import ModelError

Index = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
"""Index of a layer."""


class QwenVisionSpec(VisionSpec, frozen=True, kw_only=True):
    """Towers of Qwen, for images of any size: patches have rope in two dimensions, and an image's tokens have positions
    along three axes."""

    frames: int
    """Number of equal video frames into which an image is turned."""
    mixes_axes: ClassVar[bool]
    """Whether the rotated pairs of the axes are interleaved, or side by side."""

    @property
    def merger_parameters(self) -> int:
        """Number of parameters of two matrices with biases, which make a vector for the text model of `merge` x `merge`
        patches."""
        merged = self.hidden_size * self.merge**2
        return merged * (merged + 1) + self.out_size * (merged + 1)


class Qwen3VisionSpec(QwenVisionSpec, frozen=True, kw_only=True):
    """Tower of Qwen3-VL and Qwen3.5: a square table of learned positions is interpolated over the image."""

    mixes_axes: ClassVar[bool] = True
    side: int
    """Number of rows, and of columns, of the position table."""
    deep_layers: tuple[int, ...] = ()
    """Layers whose outputs also become vectors (deepstack): those of the first are added after the first layer of the
    text model, and so on."""

    @property
    def num_deep(self) -> int:
        return len(self.deep_layers)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the tower and the mergers."""
        size = self.hidden_size
        own = size * (3 * self.frames * self.patch_size**2 + 1 + self.side**2) + 2 * size + self.merger_parameters
        deep = 2 * size * self.merge**2 + self.merger_parameters
        return self.layer_parameters + own + len(self.deep_layers) * deep


class Qwen2VisionSpec(QwenVisionSpec, frozen=True, kw_only=True):
    """Tower of Qwen2-VL, and of Qwen2.5-VL, whose layers have windows, gated MLPs and RMSNorms."""

    mixes_axes: ClassVar[bool] = False
    window: int = 0
    """Tokens along each side of a window; 0: full attention over the image."""
    full_layers: tuple[int, ...] = ()
    """Layers without windows."""
    is_gated: bool = False

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the tower and the merger."""
        size, inner = self.hidden_size, self.intermediate_size
        patches = 3 * size * self.frames * self.patch_size**2
        if not self.is_gated:
            return self.layer_parameters + patches + 2 * size + self.merger_parameters
        layer = 4 * size * (size + 1) + 3 * size * inner + 2 * inner + size + 2 * size
        return self.num_layers * layer + patches + size + self.merger_parameters


class _Vision(msgspec.Struct, kw_only=True):
    """Keys of vision_config that all of Qwen's towers have; a family sets its own defaults."""

    depth: Size = 32
    hidden_size: Size = 3584
    hidden_act: Activation
    num_heads: Size = 16
    in_channels: Literal[3] = 3
    patch_size: Size = 14
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2


class _Qwen3Vision(_Vision, kw_only=True):
    depth: Size = 27
    hidden_size: Size = 1152
    hidden_act: Gelu = "gelu_pytorch_tanh"
    intermediate_size: Size = 4304
    patch_size: Size = 16
    out_hidden_size: Size = 3584
    num_position_embeddings: Size = 2304
    deepstack_visual_indexes: tuple[Index, ...] = (8, 16, 24)


class _Qwen25Vision(_Vision, kw_only=True):
    hidden_act: Literal["silu"] = "silu"
    intermediate_size: Size = 3420
    window_size: Size = 112
    out_hidden_size: Size = 3584
    fullatt_block_indexes: tuple[Index, ...] = (7, 15, 23, 31)


class _Qwen2Vision(_Vision, kw_only=True):
    embed_dim: Size = 1280
    hidden_act: Gelu | Literal["quick_gelu"] = "quick_gelu"
    mlp_ratio: Size = 4


class _Qwen3Outer(msgspec.Struct):
    vision_config: _Qwen3Vision = msgspec.field(default_factory=_Qwen3Vision)
    image_token_id: int = 248056


class _Qwen25Outer(msgspec.Struct):
    vision_config: _Qwen25Vision = msgspec.field(default_factory=_Qwen25Vision)
    image_token_id: int = 151655


class _Qwen2Outer(msgspec.Struct):
    vision_config: _Qwen2Vision = msgspec.field(default_factory=_Qwen2Vision)
    image_token_id: int = 151655


def read_qwen3_5(raw: Any, colors: VisionColors, out_size: int) -> Qwen3VisionSpec:
    """Read the tower of a Qwen3.5, which has no deepstack layers."""
    return _with_table(convert(raw, _Qwen3Outer), colors, out_size, ())


def read_qwen3_vl(raw: Any, colors: VisionColors, out_size: int) -> Qwen3VisionSpec:
    outer = convert(raw, _Qwen3Outer)
    return _with_table(outer, colors, out_size, outer.vision_config.deepstack_visual_indexes)


def _with_table(
    outer: _Qwen3Outer, colors: VisionColors, out_size: int, deep_layers: tuple[int, ...]
) -> Qwen3VisionSpec:
    own = outer.vision_config
    side = math.isqrt(own.num_position_embeddings)
    if side**2 != own.num_position_embeddings:
        raise ModelError(f"vision_config: num_position_embeddings {own.num_position_embeddings} must be a square")
    if list(deep_layers) != sorted(set(deep_layers)) or any(layer >= own.depth for layer in deep_layers):
        raise ModelError(
            f"vision_config: deepstack_visual_indexes {list(deep_layers)} must be in order, each one of {own.depth} "
            "layers"
        )
    return Qwen3VisionSpec(
        **_common(own, own.hidden_size, own.out_hidden_size, out_size, colors, outer.image_token_id),
        intermediate_size=own.intermediate_size,
        side=side,
        deep_layers=deep_layers,
    )


def read_qwen2_5_vl(raw: Any, colors: VisionColors, out_size: int) -> Qwen2VisionSpec:
    outer = convert(raw, _Qwen25Outer)
    own = outer.vision_config
    window = own.window_size // own.spatial_merge_size // own.patch_size
    if not window:
        raise ModelError(
            f"vision_config: window_size {own.window_size} must have room for {own.spatial_merge_size} patches of "
            f"{own.patch_size} pixels"
        )
    return Qwen2VisionSpec(
        **_common(own, own.hidden_size, own.out_hidden_size, out_size, colors, outer.image_token_id),
        intermediate_size=own.intermediate_size,
        window=window,
        full_layers=own.fullatt_block_indexes,
        is_gated=True,
    )


def read_qwen2_vl(raw: Any, colors: VisionColors, out_size: int) -> Qwen2VisionSpec:
    """Read the tower of a Qwen2-VL, whose `hidden_size` is the text model's."""
    outer = convert(raw, _Qwen2Outer)
    own = outer.vision_config
    return Qwen2VisionSpec(
        **_common(own, own.embed_dim, own.hidden_size, out_size, colors, outer.image_token_id),
        intermediate_size=own.embed_dim * own.mlp_ratio,
    )


def _common(
    own: _Vision,
    size: int,
    own_out_size: int,
    out_size: int,
    colors: VisionColors,
    token_id: int,
) -> dict[str, Any]:
    """The fields common to all of Qwen's towers."""
    check_heads(size, own.num_heads, by_four=True)
    if out_size and own_out_size != out_size:
        raise ModelError(
            f"vision_config: out_hidden_size {own_out_size} must be the text model's hidden_size {out_size}"
        )
    return {
        "hidden_size": size,
        "num_layers": own.depth,
        "num_heads": own.num_heads,
        "patch_size": own.patch_size,
        "norm_eps": 1e-6,
        "activation": own.hidden_act,
        "merge": own.spatial_merge_size,
        "out_size": own_out_size,
        "token_id": token_id,
        "mean": colors.image_mean,
        "std": colors.image_std,
        "frames": own.temporal_patch_size,
    }
