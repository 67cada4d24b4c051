"""Specs of the towers of LLaVA, LLaVA-NeXT and LLaVA-OneVision, and of the sizes of their images. No torch.

An image is shown whole, in one square. With resolutions, the whole is resized to the square without regard to its
ratio, and the image is shown again as large as one of the resolutions allows, in a grid of such squares. There its
ratio is kept: the rest is black, and rows or columns of patches that are entirely padding are dropped.
"""

import math
from typing import Any, Literal, NamedTuple

import msgspec

from vllm_lite.checkpoint.layer_specs.vision import (
    Activation,
    TileVisionSpec,
    TowerConfig,
    VisionColors,
    check_depth,
    check_heads,
)
from vllm_lite.checkpoint.typed_json import Positive, Size, convert
from vllm_lite.errors import ModelError

EDGES = 384, 768, 1152, 1536, 1920, 2304
PINPOINTS = [[height, width] for height in EDGES for width in EDGES]
NEXT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
"""Default resolutions of LLaVA-OneVision and of LLaVA-NeXT."""
AnyresActivation = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu"]
ASPECT = "anyres_max_"
FEW_PATCHES = 1.1
"""Patches are downsampled if their edge exceeds the limit by more than this factor."""
MAX_PINPOINTS = 256
UNREAD = "model.vision_tower.post_layernorm.", "model.vision_tower.head."
"""Prefixes of tensors after the layers, for other uses."""

Resolution = tuple[int, int]
"""Height and width."""


class AnyresGrid(NamedTuple):
    """The grid of an image's squares, besides that of the whole, and of its patches."""

    rows: int
    cols: int
    first: Resolution
    """First row and column of patches that are kept."""
    kept: Resolution
    """Number of rows and columns of patches that are kept."""
    shown: Resolution
    """Rows and columns of vectors made of them; each row ends with a line-end vector."""

    @property
    def num_vectors(self) -> int:
        height, width = self.shown
        return height * (width + 1)


class AnyresSpec(TileVisionSpec, frozen=True, kw_only=True):
    """A SigLIP or CLIP tower on squares, without its last norm, followed by two matrices."""

    pinpoints: tuple[Resolution, ...]
    """Resolutions; without any, an image is shown only whole."""
    max_squares: int | None
    """Maximum number of patches shown of an image besides the whole, in squares; None: no limit."""
    is_clip: bool
    """Whether the tower is CLIP, with a class vector that is dropped after the layers, and a norm before them."""
    projector_bias: bool
    projector_activation: Activation

    @property
    def bytes_vary(self) -> bool:
        return True

    def reads(self, name: str) -> bool:
        return super().reads(name) and not name.startswith(UNREAD)

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions."""
        return self.side**2 + self.is_clip

    @property
    def token_bytes(self) -> int:
        """Upper bound: that of the largest grid, as if it only had the whole image's vectors."""
        squares = max((height * width // self.image_size**2 for height, width in self.pinpoints), default=0)
        return -(-(1 + squares) * 3 * self.image_size**2 // self.side**2)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the tower, the projector and the line end."""
        size, out = self.hidden_size, self.out_size
        own = size * (3 * self.patch_size**2 + (3 if self.is_clip else 1) + self.num_positions)
        end = out if self.pinpoints else 0
        return self.layer_parameters + own + out * (size + out) + end + (2 * out if self.projector_bias else 0)

    def grid(self, height: int, width: int) -> AnyresGrid:
        """The grid for an image of this size in pixels."""
        rows, cols = (edge // self.image_size for edge in best_resolution(height, width, self.pinpoints))
        all_rows, all_cols = rows * self.side, cols * self.side
        if width / height > all_cols / all_rows:
            padding = (all_rows - int(round(height * (all_cols / width), 7))) // 2, 0
        else:
            padding = 0, (all_cols - int(round(width * (all_rows / height), 7))) // 2
        kept = all_rows - 2 * padding[0], all_cols - 2 * padding[1]
        squares = self.max_squares or rows * cols
        ratio = math.sqrt(kept[0] * kept[1] / (squares * self.side**2))
        shown = (int(kept[0] // ratio), int(kept[1] // ratio)) if ratio > FEW_PATCHES else kept
        return AnyresGrid(rows, cols, padding, kept, shown)

    def num_tokens(self, height: int, width: int) -> int:
        """Number of vectors of an image of this size in pixels."""
        return self.side**2 + (self.grid(height, width).num_vectors if self.pinpoints else 0)


def best_resolution(height: int, width: int, pinpoints: tuple[Resolution, ...]) -> Resolution:
    """The resolution that keeps most of an image's pixels, and of those the one that wastes least."""
    best, most, least_wasted = pinpoints[0], 0, math.inf
    for rows, cols in pinpoints:
        scale = min(cols / width, rows / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        wasted = rows * cols - used
        if used > most or (used == most and wasted < least_wasted):
            best, most, least_wasted = (rows, cols), used, wasted
    return best


def within(height: int, width: int, resolution: Resolution) -> Resolution:
    """The size of an image fitted into a resolution, nearly keeping its ratio."""
    rows, cols = resolution
    if cols / width < rows / height:
        return min(math.ceil(height * (cols / width)), rows), cols
    return rows, min(math.ceil(width * (rows / height)), cols)


class _Vision(TowerConfig, kw_only=True):
    hidden_act: AnyresActivation
    layer_norm_eps: Positive


class _Outer(msgspec.Struct):
    image_token_index: int | None = None
    image_token_id: int | None = None
    projector_hidden_act: AnyresActivation = "gelu"
    vision_feature_layer: int | list[int] | None = None
    vision_feature_select_strategy: Literal["full", "default"] | None = None
    multimodal_projector_bias: bool = True
    image_grid_pinpoints: list[tuple[Size, Size]] | None = None
    vision_aspect_ratio: str = "anyres_max_9"


SIGLIP: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
CLIP: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""Default config of CLIP."""


def read_onevision(raw: Any, colors: VisionColors, out_size: int) -> AnyresSpec:
    """Read the tower of a LLaVA-OneVision. Raises ModelError."""
    outer = convert(raw, _Outer)
    squares = outer.vision_aspect_ratio.removeprefix(ASPECT)
    if not (squares.isascii() and squares.isdigit() and int(squares)) or squares == outer.vision_aspect_ratio:
        raise ModelError(f"vision_aspect_ratio {outer.vision_aspect_ratio!r} must be {ASPECT} and a number")
    return _read(raw, colors, out_size, (PINPOINTS, int(squares)), is_clip=False)


def read_next(raw: Any, colors: VisionColors, out_size: int) -> AnyresSpec:
    """Read the tower of a LLaVA-NeXT. Raises ModelError."""
    return _read(raw, colors, out_size, (NEXT_PINPOINTS, None), is_clip=True)


def read_llava(raw: Any, colors: VisionColors, out_size: int) -> AnyresSpec:
    """Read the tower of a LLaVA 1.5. Raises ModelError."""
    return _read(raw, colors, out_size, None, is_clip=True)


def _read(
    raw: Any,
    colors: VisionColors,
    out_size: int,
    grids: tuple[list[list[int]], int | None] | None,
    *,
    is_clip: bool,
) -> AnyresSpec:
    """Read a tower. `grids`: default resolutions, and the maximum number of squares; None: images are shown only
    whole."""
    outer, usual = convert(raw, _Outer), CLIP if is_clip else SIGLIP
    own = convert(usual | raw["vision_config"], _Vision, within="vision_config")
    pinpoints = () if grids is None else checked_pinpoints(outer.image_grid_pinpoints or grids[0])
    _check(own, outer, pinpoints, is_clip=is_clip)
    token_id = outer.image_token_index if outer.image_token_index is not None else outer.image_token_id
    layer = (-2 if is_clip else -1) if outer.vision_feature_layer is None else outer.vision_feature_layer
    return AnyresSpec(
        **(own.common(colors, out_size) | {"num_layers": check_depth(layer, own.num_hidden_layers)}),
        norm_eps=own.layer_norm_eps,
        merge=1,
        token_id=(32000 if is_clip else 151646) if token_id is None else token_id,
        pinpoints=pinpoints,
        max_squares=None if grids is None else grids[1],
        is_clip=is_clip,
        projector_bias=outer.multimodal_projector_bias,
        projector_activation=outer.projector_hidden_act,
    )


def _check(own: _Vision, outer: _Outer, pinpoints: tuple[Resolution, ...], *, is_clip: bool) -> None:
    check_heads(own.hidden_size, own.num_attention_heads)
    if own.patch_size > own.image_size:
        raise ModelError(f"vision_config: patch_size {own.patch_size} is more than image_size {own.image_size}")
    strategy = "default" if is_clip else "full"
    if outer.vision_feature_select_strategy not in (None, strategy):
        raise ModelError(
            f"vision_feature_select_strategy {outer.vision_feature_select_strategy} is not supported; with this tower "
            f"it must be {strategy}"
        )
    if any(edge % own.image_size for each in pinpoints for edge in each):
        raise ModelError(f"image_grid_pinpoints: edges must be multiples of image_size {own.image_size}")


def checked_pinpoints(given: Any) -> tuple[Resolution, ...]:
    """Check the resolutions in config.json. Raises ModelError for none, or for too many."""
    if not 0 < len(given) <= MAX_PINPOINTS:
        raise ModelError(f"image_grid_pinpoints has {len(given)} resolutions; 1 to {MAX_PINPOINTS} are supported")
    return tuple((height, width) for height, width in given)
