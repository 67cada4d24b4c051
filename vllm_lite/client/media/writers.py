"""Families' formats of an image in a prompt: the placeholder of their templates, the text that replaces it, and the
media among its tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from vllm_lite.checkpoint.layer_specs.anyres import AnyresSpec, Resolution, checked_pinpoints
from vllm_lite.checkpoint.layer_specs.gemma_vision import Gemma3VisionSpec, Gemma4VisionSpec, UnifiedVisionSpec
from vllm_lite.checkpoint.layer_specs.pixtral import PixtralVisionSpec
from vllm_lite.checkpoint.layer_specs.qwen_vision import QwenVisionSpec
from vllm_lite.checkpoint.layer_specs.vision import PROCESSOR_FILE, SiglipSpec, VisionSpec, read_processor
from vllm_lite.checkpoint.typed_json import Size, convert, read_json
from vllm_lite.client.media import processors
from vllm_lite.client.media.changes import (
    FittedChanges,
    NoChanges,
    PatchChanges,
    RowChanges,
    SizeChanges,
    SquareChanges,
    TileChanges,
    changed,
)
from vllm_lite.client.media.processors import BUDGETS, ColorImage, PanAndScan, ProcessorSettings
from vllm_lite.client.spans import ShownMedia
from vllm_lite.errors import ModelError
from vllm_lite.protocol.spans import Media

ROW_TOKENS = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
"""A part of an image, the end of a row, and the end of the last one."""
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"

V = TypeVar("V", bound=VisionSpec)
I = TypeVar("I")  # noqa: E741


class ImageWriter(ABC, Generic[V, I]):
    """Writes images into prompts of one model; `I`: the type of a preprocessed image."""

    placeholder: str
    """Text that a chat template writes for an image."""
    settings: ProcessorSettings
    changes: ClassVar[type[SizeChanges[Any]]] = NoChanges
    """The changes of `settings` that `mm_processor_kwargs` may make."""

    def __init__(self, vision: V, folder: Path, max_pixels: int) -> None:
        """Raises ModelError for an unsupported processor."""
        self.vision = vision
        self.settings = self.read_settings(folder, max_pixels)

    @property
    def vector(self) -> str:
        """Text of the placeholder token of each vector."""
        return self.placeholder

    @abstractmethod
    def read_settings(self, folder: Path, max_pixels: int) -> ProcessorSettings:
        """Settings of the model's processor."""

    @abstractmethod
    def text(self, image: I) -> str:
        """Text of an image, with a placeholder for each of its vectors."""

    @abstractmethod
    def media(self, image: I) -> Iterator[ShownMedia]:
        """The media of an image, in the order of their placeholders."""

    def pattern(self, medium: Media) -> list[bool]:
        """Whether each token of a medium is the placeholder."""
        return [True] * medium.num_tokens

    def changed(self, given: Mapping[str, Any]) -> ProcessorSettings:
        """Return the settings changed by `mm_processor_kwargs`. Raises RequestError for a name or value that this
        processor does not support."""
        settings: ProcessorSettings = changed(self.settings, self.changes, given)
        return settings


def in_one(colors: bytes, num_tokens: int, rows: int, cols: int) -> Iterator[ShownMedia]:
    """The only medium of an image with this grid."""
    grid = 1, rows, cols
    digest = blake2b(colors, digest_size=32, key=repr(grid).encode()).digest()
    yield ShownMedia(Media("image", digest, num_tokens, grid=grid), colors)


class TileWriter(ImageWriter[SiglipSpec, processors.ImageTiles]):
    """Idefics 3 and SmolVLM: tiles row by row, then the whole image, each a medium."""

    placeholder = "<image>"
    changes = TileChanges

    def read_settings(self, folder: Path, max_pixels: int) -> processors.TileSettings:
        own, size = read_processor(folder, _Tiles), self.vision.image_size
        if own.max_image_size.longest_edge != size or not own.do_resize:
            raise ModelError(
                f"{folder}: images are resized to tiles of image_size {size}; max_image_size "
                f"{own.max_image_size.longest_edge} with do_resize {own.do_resize} is not supported"
            )
        return processors.TileSettings(size, own.size.longest_edge, own.resample, own.do_image_splitting, max_pixels)

    def text(self, image: processors.ImageTiles) -> str:
        vectors = self.placeholder * self.vision.num_tokens
        rows = (
            "".join(f"{AROUND}<row_{row}_col_{col}>{vectors}" for col in range(1, image.cols + 1)) + "\n"
            for row in range(1, image.rows + 1)
        )
        return "".join(rows) + "\n" * (image.rows > 0) + f"{AROUND}{WHOLE}{vectors}{AROUND}"

    def media(self, image: processors.ImageTiles) -> Iterator[ShownMedia]:
        for tile in image.tiles:
            yield ShownMedia(Media("image", blake2b(tile, digest_size=32).digest(), self.vision.num_tokens), tile)


class PatchWriter(ImageWriter[QwenVisionSpec, ColorImage]):
    """Qwen3.5: an image of any size is one medium."""

    placeholder = "<|image_pad|>"
    changes = PatchChanges

    def read_settings(self, folder: Path, max_pixels: int) -> processors.PatchSettings:
        own, vision = read_processor(folder, _Patches), self.vision
        sizes = own.patch_size, own.merge_size, own.temporal_patch_size
        if sizes != (vision.patch_size, vision.merge, vision.frames) or not own.do_resize:
            raise ModelError(
                f"{folder}: the processor's patch_size, merge_size and temporal_patch_size {sizes} with do_resize "
                f"{own.do_resize} must be the tower's {(vision.patch_size, vision.merge, vision.frames)}"
            )
        least, most = own.min_pixels or own.size.shortest_edge, own.max_pixels or own.size.longest_edge
        return processors.PatchSettings(vision.patch_size * vision.merge, least, most, own.resample, max_pixels)

    def text(self, image: ColorImage) -> str:
        return self.placeholder * self._num_tokens(image)

    def media(self, image: ColorImage) -> Iterator[ShownMedia]:
        size = self.vision.patch_size
        return in_one(image.colors, self._num_tokens(image), image.height // size, image.width // size)

    def _num_tokens(self, image: ColorImage) -> int:
        return image.height * image.width // (self.vision.patch_size * self.vision.merge) ** 2


class RowWriter(ImageWriter[PixtralVisionSpec, ColorImage]):
    """Pixtral and Mistral 3: an image of any size is one medium, in rows that end with other tokens."""

    placeholder = ROW_TOKENS[0]
    changes = RowChanges

    def read_settings(self, folder: Path, max_pixels: int) -> processors.RowSettings:
        vision, own, raw = self.vision, read_processor(folder, _Rows), folder / PROCESSOR_FILE
        outer = read_json(raw, lambda found: convert(found, _RowTokens)) if raw.is_file() else _RowTokens()
        self._ends, self.placeholder = (outer.image_break_token, outer.image_end_token), outer.image_token
        sizes = outer.patch_size or vision.patch_size, outer.spatial_merge_size or vision.merge
        if sizes != (vision.patch_size, vision.merge) or not own.do_resize:
            raise ModelError(
                f"{folder}: the processor's patch_size and spatial_merge_size {sizes} with do_resize {own.do_resize} "
                f"must be the tower's {(vision.patch_size, vision.merge)}"
            )
        height, width = own.size.sides
        return processors.RowSettings(vision.patch_size * vision.merge, height, width, own.resample, max_pixels)

    def text(self, image: ColorImage) -> str:
        rows, cols = self._grid(image)
        row = self.placeholder * cols
        return self._ends[0].join([row] * rows) + self._ends[1]

    def media(self, image: ColorImage) -> Iterator[ShownMedia]:
        grid = self._grid(image)
        return in_one(image.colors, self.vision.num_tokens(*grid), *grid)

    def pattern(self, medium: Media) -> list[bool]:
        cols = medium.grid[2]
        return [place % (cols + 1) < cols for place in range(medium.num_tokens)]

    def _grid(self, image: ColorImage) -> tuple[int, int]:
        unit = self.vision.patch_size * self.vision.merge
        return image.height // unit, image.width // unit


class GridWriter(ImageWriter[AnyresSpec, ColorImage]):
    """LLaVA, LLaVA-NeXT and LLaVA-OneVision: an image is one medium, whose grid is its own size in pixels."""

    placeholder = "<image>"

    def read_settings(self, folder: Path, max_pixels: int) -> processors.GridSettings:
        vision, own, edge = self.vision, read_processor(folder, _Squares), self.vision.image_size
        edges = {_edges(own.size, edge), _edges(own.crop_size, edge) if own.do_center_crop else (edge, edge)}
        if edges != {(edge, edge)} or not own.do_resize or (own.do_pad and not vision.pinpoints):
            raise ModelError(
                f"{folder}: the processor's sizes {sorted(edges)} with do_resize {own.do_resize} and do_pad "
                f"{own.do_pad} must be the tower's image_size {edge} for both edges, with do_resize"
            )
        given = own.image_grid_pinpoints if vision.pinpoints else None
        if given is not None and checked_pinpoints(given) != vision.pinpoints:
            raise ModelError(f"{folder}: image_grid_pinpoints of the processor must be those of config.json")
        return processors.GridSettings(edge, vision.pinpoints, own.resample, max_pixels)

    def text(self, image: ColorImage) -> str:
        return self.placeholder * self.vision.num_tokens(image.height, image.width)

    def media(self, image: ColorImage) -> Iterator[ShownMedia]:
        size = image.height, image.width
        return in_one(image.colors, self.vision.num_tokens(*size), *size)


class _Edge(msgspec.Struct):
    longest_edge: int


class _Tiles(msgspec.Struct):
    size: _Edge = msgspec.field(default_factory=lambda: _Edge(4 * 364))
    max_image_size: _Edge = msgspec.field(default_factory=lambda: _Edge(364))
    resample: int = 1
    do_image_splitting: bool = True
    do_resize: bool = True


class _Edges(msgspec.Struct):
    """Numbers of pixels, whatever their names."""

    shortest_edge: Size = 56 * 56
    longest_edge: Size = 28 * 28 * 1280


class _Patches(msgspec.Struct):
    size: _Edges = msgspec.field(default_factory=_Edges)
    min_pixels: Size | None = None
    max_pixels: Size | None = None
    patch_size: Size = 14
    merge_size: Size = 2
    temporal_patch_size: Size = 2
    resample: int = 3
    do_resize: bool = True


class _Sides(msgspec.Struct):
    longest_edge: Size | None = None
    shortest_edge: Size | None = None
    height: Size | None = None
    width: Size | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width."""
        most = self.longest_edge or 1024
        return (most, most) if self.longest_edge or not (self.height and self.width) else (self.height, self.width)


def _edges(given: "_Sides | int | None", edge: int) -> tuple[int, int]:
    """Height and width of a square; `edge` by default."""
    if isinstance(given, int):
        return given, given
    own = given or _Sides()
    return own.shortest_edge or own.height or edge, own.shortest_edge or own.width or edge


class _Rows(msgspec.Struct):
    size: _Sides = msgspec.field(default_factory=_Sides)
    resample: int = 3
    do_resize: bool = True


class _RowTokens(msgspec.Struct):
    """Settings of the processor as a whole."""

    patch_size: Size | None = None
    spatial_merge_size: Size | None = None
    image_token: str = ROW_TOKENS[0]
    image_break_token: str = ROW_TOKENS[1]
    image_end_token: str = ROW_TOKENS[2]


class _Squares(msgspec.Struct):
    size: _Sides | Size | None = None
    crop_size: _Sides | Size | None = None
    image_grid_pinpoints: list[Resolution] | None = None
    resample: int = 3
    do_resize: bool = True
    do_center_crop: bool | None = None
    do_pad: bool | None = None


# ---- Gemma. The tokenizer's file names the tokens around an image and that of its vectors.

TOKENIZER_FILE = "tokenizer_config.json"


class _SquareEdges(msgspec.Struct):
    height: Size = 224
    width: Size = 224


class _GemmaSquares(msgspec.Struct):
    size: _SquareEdges = msgspec.field(default_factory=_SquareEdges)
    resample: int = 2
    do_resize: bool = True
    do_pan_and_scan: bool | None = None
    pan_and_scan_min_crop_size: Size | None = None
    pan_and_scan_max_num_crops: Size | None = None
    pan_and_scan_min_ratio_to_activate: float | None = None


class _Fitted(msgspec.Struct):
    patch_size: Size = 16
    max_soft_tokens: Size = 280
    pooling_kernel_size: Size = 3
    resample: int = 3
    do_resize: bool = True
    do_normalize: bool = False


class _Named(msgspec.Struct):
    """A token in full."""

    content: str


class _Names(msgspec.Struct):
    boi_token: str | _Named | None = None
    image_token: str | _Named | None = None
    eoi_token: str | _Named | None = None


class SquareWriter(ImageWriter[Gemma3VisionSpec, processors.ImageSquares]):
    """Gemma 3: the whole image and each part of it are media of their own."""

    changes = SquareChanges

    def read_settings(self, folder: Path, max_pixels: int) -> processors.SquareSettings:
        names = image_tokens(folder, "<start_of_image>", "<image_soft_token>", "<end_of_image>")
        self.placeholder, self._vector, self._end = names
        own, edge = read_processor(folder, _GemmaSquares), self.vision.image_size
        if (own.size.height, own.size.width) != (edge, edge) or not own.do_resize:
            raise ModelError(
                f"{folder}: the processor must resize images to the tower's {edge} x {edge} pixels; "
                f"{own.size.height} x {own.size.width} with do_resize {own.do_resize} is not supported"
            )
        pan = PanAndScan(
            own.pan_and_scan_min_crop_size or PanAndScan().least_size,
            own.pan_and_scan_max_num_crops or PanAndScan().most_crops,
            own.pan_and_scan_min_ratio_to_activate or PanAndScan().least_ratio,
        )
        return processors.SquareSettings(edge, own.resample, pan if own.do_pan_and_scan else None, max_pixels)

    @property
    def vector(self) -> str:
        return self._vector

    def text(self, image: processors.ImageSquares) -> str:
        one = f"\n\n{self.placeholder}{self._vector * self.vision.num_tokens}{self._end}\n\n"
        parts = len(image.squares) - 1
        if not parts:
            return one
        crops = " ".join([one] * parts)
        return f"Here is the original image {one} and here are some crops to help you see better {crops}"

    def media(self, image: processors.ImageSquares) -> Iterator[ShownMedia]:
        for square in image.squares:
            digest = blake2b(square, digest_size=32).digest()
            yield ShownMedia(Media("image", digest, self.vision.num_tokens), square)


class FittedWriter(ImageWriter[Gemma4VisionSpec | UnifiedVisionSpec, ColorImage]):
    """Gemma 4, with a tower or without: an image of any size is one medium."""

    changes = FittedChanges

    def read_settings(self, folder: Path, max_pixels: int) -> processors.FittedSettings:
        self._begin, self.placeholder, self._end = image_tokens(folder, "<|image>", "<|image|>", "<image|>")
        own, vision = read_processor(folder, _Fitted), self.vision
        sizes = own.patch_size, own.pooling_kernel_size
        if sizes != (vision.patch_size, vision.merge) or own.do_normalize or not own.do_resize:
            raise ModelError(
                f"{folder}: the processor's patch_size and pooling_kernel_size {sizes} with do_resize {own.do_resize} "
                f"and do_normalize {own.do_normalize} must be the model's {(vision.patch_size, vision.merge)} with "
                "True and False"
            )
        if own.max_soft_tokens not in BUDGETS:
            raise ModelError(
                f"{folder}: max_soft_tokens must be one of {', '.join(map(str, BUDGETS))}, got {own.max_soft_tokens}"
            )
        along = vision.num_positions // (vision.merge if isinstance(vision, Gemma4VisionSpec) else 1)
        return processors.FittedSettings(
            vision.patch_size * vision.merge, own.max_soft_tokens, along, own.resample, max_pixels
        )

    def text(self, image: ColorImage) -> str:
        rows, cols = self._grid(image)
        return f"{self._begin}{self.placeholder * (rows * cols)}{self._end}"

    def media(self, image: ColorImage) -> Iterator[ShownMedia]:
        rows, cols = self._grid(image)
        return in_one(image.colors, rows * cols, rows, cols)

    def _grid(self, image: ColorImage) -> tuple[int, int]:
        unit = self.vision.patch_size * self.vision.merge
        return image.height // unit, image.width // unit


def image_tokens(folder: Path, *usual: str) -> tuple[str, ...]:
    """The tokens before an image, for its vectors, and after it: those named in the tokenizer's settings, or else
    `usual`."""
    file = folder / TOKENIZER_FILE
    found = read_json(file, _names) if file.is_file() else _Names()
    named = (found.boi_token, found.image_token, found.eoi_token)
    texts = (token.content if isinstance(token, _Named) else token for token in named)
    return tuple(text or other for text, other in zip(texts, usual, strict=True))


def _names(raw: Any) -> _Names:
    """Read the names, which may be in a separate table."""
    if not isinstance(raw, dict):
        return _Names()
    tables = (raw.get(name) for name in ("extra_special_tokens", "model_specific_special_tokens"))
    inner = {key: value for table in tables if isinstance(table, dict) for key, value in table.items()}
    return convert(inner | {key: raw[key] for key in _Names.__struct_fields__ if raw.get(key)}, _Names)
