"""Spec of Pixtral's tower, in Mistral 3 and in Pixtral itself, which is stored as a LLaVA. No torch."""

from typing import Any, Literal

import msgspec

from vllm_lite.checkpoint.layer_specs.vision import (
    Activation,
    TowerConfig,
    VisionColors,
    VisionSpec,
    check_depth,
    check_heads,
)
from vllm_lite.checkpoint.typed_json import Positive, Size, convert

PixtralActivation = Literal["silu", "gelu", "gelu_pytorch_tanh"]


class PixtralVisionSpec(VisionSpec, frozen=True, kw_only=True):
    """A tower with rope in two dimensions, RMS norms and gated MLPs. Each row of an image ends with a token that is not
    the tower's, so an image has more tokens than vectors."""

    rope_theta: float
    image_size: int
    """Maximum edge of an image in pixels, before edges are rounded to multiples of patches."""
    merger_eps: float | None
    """Epsilon of the norm before patches are merged; None: no merging, `merge` is 1."""
    projector_bias: bool
    projector_activation: Activation = "gelu"

    @property
    def bytes_vary(self) -> bool:
        return True

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the tower and the projector."""
        size, inner, out = self.hidden_size, self.intermediate_size, self.out_size
        layers = self.num_layers * (4 * size * size + 3 * size * inner + 2 * size)
        merger = 0 if self.merger_eps is None else size + size * size * self.merge**2
        projector = out * (size + out) + (2 * out if self.projector_bias else 0)
        return layers + size * (3 * self.patch_size**2 + 1) + merger + projector

    def num_tokens(self, rows: int, cols: int) -> int:
        """Number of tokens of an image with these rows and columns of vectors, without the last row's end."""
        return rows * (cols + 1) - 1


class _Rope(msgspec.Struct):
    rope_theta: Positive = 10000.0


class _Vision(TowerConfig, kw_only=True):
    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 16
    image_size: Size = 1024
    patch_size: Size = 16
    hidden_act: PixtralActivation = "gelu"
    rope_theta: Positive | None = None
    rope_parameters: _Rope | None = None


class _Text(msgspec.Struct):
    rms_norm_eps: Positive = 1e-5


class _Outer(msgspec.Struct):
    vision_config: _Vision
    text_config: _Text = msgspec.field(default_factory=_Text)
    image_token_index: int | None = None
    image_token_id: int | None = None
    projector_hidden_act: PixtralActivation = "gelu"
    vision_feature_layer: int | list[int] = -1
    vision_feature_select_strategy: Literal["full"] = "full"
    """This tower has no vector but those of patches."""
    multimodal_projector_bias: bool | None = None
    spatial_merge_size: Size = 2


def read_mistral3(raw: Any, colors: VisionColors, out_size: int) -> PixtralVisionSpec:
    """Read the tower of a Mistral 3, which merges patches. Raises ModelError."""
    return _read(convert(raw, _Outer), colors, out_size, merges=True)


def read_pixtral(raw: Any, colors: VisionColors, out_size: int) -> PixtralVisionSpec:
    """Read the tower of a Pixtral, stored as a LLaVA, where each patch is a vector. Raises ModelError."""
    return _read(convert(raw, _Outer), colors, out_size, merges=False)


def _read(outer: _Outer, colors: VisionColors, out_size: int, *, merges: bool) -> PixtralVisionSpec:
    own = outer.vision_config
    check_heads(own.hidden_size, own.num_attention_heads, by_four=True)
    token_id = outer.image_token_index if outer.image_token_index is not None else outer.image_token_id
    bias = outer.multimodal_projector_bias
    depth = check_depth(outer.vision_feature_layer, own.num_hidden_layers)
    theta = own.rope_theta or (own.rope_parameters or _Rope()).rope_theta
    return PixtralVisionSpec(
        **(own.common(colors, out_size) | {"num_layers": depth}),
        norm_eps=1e-5,
        merge=outer.spatial_merge_size if merges else 1,
        token_id=(10 if merges else 32000) if token_id is None else token_id,
        rope_theta=theta,
        merger_eps=outer.text_config.rms_norm_eps if merges else None,
        projector_bias=not merges if bias is None else bias,
        projector_activation=outer.projector_hidden_act,
    )
