"""Specs of the towers of Gemma 3 and 4, and of the matrices that Gemma 4 Unified has instead. No torch."""

import math
from typing import Any, Literal

import msgspec

from vllm_lite.checkpoint.layer_specs.vision import Gelu, SiglipSpec, TowerConfig, VisionColors, VisionSpec, check_heads
from vllm_lite.checkpoint.typed_json import Positive, Size, convert
from vllm_lite.errors import ModelError

MAX_SOFT_TOKENS = 1120
"""Maximum number of tokens of an image in Gemma 4."""
BLACK, WHITE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


class Gemma3VisionSpec(SiglipSpec, frozen=True, kw_only=True):
    """Gemma 3's SigLIP: `merge` x `merge` patches are averaged, normed and projected."""

    def reads(self, name: str) -> bool:
        """As for any tower, without SigLIP's pooling head."""
        return super().reads(name) and not name.startswith("model.vision_tower.head.")

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the tower, the norm and the projection."""
        size = self.hidden_size
        own = size * (3 * self.patch_size**2 + 1 + self.side**2) + 2 * size
        return self.layer_parameters + own + size * (self.out_size + 1)


class Gemma4VisionSpec(VisionSpec, frozen=True, kw_only=True):
    """Gemma 4's tower, for images of any size: gated MLPs, norms after each block, rope in two dimensions, and a table
    of learned positions for each."""

    head_size: int
    theta: float
    num_positions: int
    """Rows of each position table."""
    clipped: bool
    """Whether inputs and outputs of the layers' matrices are clipped."""
    pad_id: int
    """The token whose per-layer embeddings placeholders get."""
    standardized: bool
    """Whether vectors are shifted and scaled, element by element, before they are projected."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the tower and the projection; clipping limits are not counted."""
        size, inner, heads = self.hidden_size, self.intermediate_size, self.num_heads * self.head_size
        each = 4 * size * heads + 3 * size * inner + 4 * size + 2 * self.head_size
        own = size * (3 * self.patch_size**2 + 2 * self.num_positions) + 2 * size * self.standardized
        return self.num_layers * each + own + size * self.out_size


class UnifiedVisionSpec(VisionSpec, frozen=True, kw_only=True):
    """Gemma 4 Unified's: no tower, but two matrices with norms, and two tables of learned positions."""

    num_positions: int

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        size = self.hidden_size
        return self.token_bytes * (size + 2) + size * (1 + 4 + 2 * self.num_positions) + size * self.out_size


class _Vision3(TowerConfig, kw_only=True):
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    image_size: Size = 224
    patch_size: Size = 16
    hidden_act: Gelu = "gelu_pytorch_tanh"
    layer_norm_eps: Positive = 1e-6


class _Outer3(msgspec.Struct):
    vision_config: _Vision3 = msgspec.field(default_factory=_Vision3)
    mm_tokens_per_image: Size = 256
    image_token_index: int = 262_144


class _Rope(msgspec.Struct):
    rope_type: Literal["axial"] = "axial"
    rope_theta: Positive = 100.0


class _Vision4(msgspec.Struct):
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 16
    num_attention_heads: Size = 12
    num_key_value_heads: Size = 12
    head_dim: Size = 64
    hidden_activation: Gelu = "gelu_pytorch_tanh"
    rms_norm_eps: Positive = 1e-6
    attention_bias: Literal[False] | None = False
    rope_parameters: _Rope | None = None
    pooling_kernel_size: Size = 3
    patch_size: Size = 16
    position_embedding_size: Size = 10_240
    use_clipped_linears: bool = False
    standardize: bool = False


class _Unified(msgspec.Struct):
    patch_size: Size = 16
    pooling_kernel_size: Size = 3
    mm_embed_dim: Size = 3840
    mm_posemb_size: Size = 1120
    output_proj_dims: Size | None = None
    rms_norm_eps: Positive = 1e-6


class _Text(msgspec.Struct):
    use_bidirectional_attention: str | None = None
    pad_token_id: int | None = 0


class _TextUnified(msgspec.Struct):
    use_bidirectional_attention: str | None = "vision"


class _Outer4(msgspec.Struct):
    vision_config: _Vision4 = msgspec.field(default_factory=_Vision4)
    text_config: _Text = msgspec.field(default_factory=_Text)
    image_token_id: int = 258_880


class _OuterUnified(msgspec.Struct):
    vision_config: _Unified = msgspec.field(default_factory=_Unified)
    text_config: _TextUnified = msgspec.field(default_factory=_TextUnified)
    image_token_id: int = 258_880


def read_gemma3(raw: Any, colors: VisionColors, out_size: int) -> Gemma3VisionSpec:
    """Read the tower of a Gemma 3, as called by layer_specs.vision."""
    outer = convert(raw, _Outer3)
    own, along = outer.vision_config, math.isqrt(outer.mm_tokens_per_image)
    check_heads(own.hidden_size, own.num_attention_heads)
    side = own.image_size // own.patch_size
    if own.image_size % own.patch_size or along**2 != outer.mm_tokens_per_image or side % along:
        raise ModelError(
            f"vision_config: image_size {own.image_size} and patch_size {own.patch_size} must give a square of patches "
            f"that mm_tokens_per_image {outer.mm_tokens_per_image} means divide evenly"
        )
    return Gemma3VisionSpec(
        **own.common(colors, out_size),
        norm_eps=own.layer_norm_eps,
        merge=side // along,
        token_id=outer.image_token_index,
        whole_in="all layers",
        most_tokens=outer.mm_tokens_per_image,
    )


def read_gemma4(raw: Any, _colors: VisionColors, out_size: int) -> Gemma4VisionSpec:
    """Read the tower of a Gemma 4, as called by layer_specs.vision."""
    outer = convert(raw, _Outer4)
    own, rope = outer.vision_config, outer.vision_config.rope_parameters or _Rope()
    if own.num_key_value_heads != own.num_attention_heads or own.head_dim % 4:
        raise ModelError(
            f"vision_config: {own.num_attention_heads} heads of {own.head_dim} elements with "
            f"{own.num_key_value_heads} KV heads are not supported; supported: as many KV heads as heads, of a "
            "multiple of 4 elements"
        )
    return Gemma4VisionSpec(
        **_common(outer, out_size),
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_layers=own.num_hidden_layers,
        num_heads=own.num_attention_heads,
        head_size=own.head_dim,
        activation=own.hidden_activation,
        theta=rope.rope_theta,
        num_positions=own.position_embedding_size,
        clipped=own.use_clipped_linears,
        pad_id=outer.text_config.pad_token_id or 0,
        standardized=own.standardize,
    )


def read_unified(raw: Any, _colors: VisionColors, out_size: int) -> UnifiedVisionSpec:
    """Read the matrices of a Gemma 4 Unified, as called by layer_specs.vision."""
    outer = convert(raw, _OuterUnified)
    own = outer.vision_config
    if own.output_proj_dims not in (None, own.mm_embed_dim):
        raise ModelError(
            f"vision_config: output_proj_dims {own.output_proj_dims} must be mm_embed_dim {own.mm_embed_dim}"
        )
    return UnifiedVisionSpec(
        **_common(outer, out_size),
        hidden_size=own.mm_embed_dim,
        intermediate_size=0,
        num_layers=0,
        num_heads=1,
        activation="gelu_pytorch_tanh",
        num_positions=own.mm_posemb_size,
    )


def _common(outer: _Outer4 | _OuterUnified, out_size: int) -> dict[str, Any]:
    """The fields common to both of Gemma 4's. Colors are in 0 to 1, regardless of the processor's file."""
    own, both_ways = outer.vision_config, outer.text_config.use_bidirectional_attention == "vision"
    return {
        "patch_size": own.patch_size,
        "norm_eps": own.rms_norm_eps,
        "merge": own.pooling_kernel_size,
        "out_size": out_size,
        "token_id": outer.image_token_id,
        "mean": BLACK,
        "std": WHITE,
        "whole_in": "sliding layers" if both_ways else "no layers",
        "most_tokens": MAX_SOFT_TOKENS,
    }
