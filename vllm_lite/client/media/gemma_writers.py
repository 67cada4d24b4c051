"""Gemma's ways to write an image into a prompt. The file for the tokenizer names the tokens around it and that of its
vectors."""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from vllm_lite.checkpoint.layer_specs.gemma_vision import Gemma3VisionSpec, Gemma4VisionSpec, UnifiedVisionSpec
from vllm_lite.checkpoint.layer_specs.vision import read_processor
from vllm_lite.checkpoint.typed_json import Size, convert, read_json
from vllm_lite.client.media.changes import FittedChanges, SquareChanges
from vllm_lite.client.media.fitted import BUDGETS, FittedSettings
from vllm_lite.client.media.patches import ImagePatches
from vllm_lite.client.media.squares import ImageSquares, PanAndScan, SquareSettings
from vllm_lite.client.media.writers import ImageWriter, in_one
from vllm_lite.client.spans import ShownMedia
from vllm_lite.errors import ModelError
from vllm_lite.protocol.spans import Media

TOKENIZER_FILE = "tokenizer_config.json"


class _Edges(msgspec.Struct):
    height: Size = 224
    width: Size = 224


class _Squares(msgspec.Struct):
    size: _Edges = msgspec.field(default_factory=_Edges)
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


class SquareWriter(ImageWriter[Gemma3VisionSpec, ImageSquares]):
    """Gemma 3: the whole image and each part of it are media of their own."""

    changes = SquareChanges

    def read_settings(self, folder: Path, max_pixels: int) -> SquareSettings:
        names = image_tokens(folder, "<start_of_image>", "<image_soft_token>", "<end_of_image>")
        self.placeholder, self._vector, self._end = names
        own, edge = read_processor(folder, _Squares), self.vision.image_size
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
        return SquareSettings(edge, own.resample, pan if own.do_pan_and_scan else None, max_pixels)

    @property
    def vector(self) -> str:
        return self._vector

    def text(self, image: ImageSquares) -> str:
        one = f"\n\n{self.placeholder}{self._vector * self.vision.num_tokens}{self._end}\n\n"
        parts = len(image.squares) - 1
        if not parts:
            return one
        crops = " ".join([one] * parts)
        return f"Here is the original image {one} and here are some crops to help you see better {crops}"

    def media(self, image: ImageSquares) -> Iterator[ShownMedia]:
        for square in image.squares:
            digest = blake2b(square, digest_size=32).digest()
            yield ShownMedia(Media("image", digest, self.vision.num_tokens), square)


class FittedWriter(ImageWriter[Gemma4VisionSpec | UnifiedVisionSpec, ImagePatches]):
    """Gemma 4, with a tower or without: an image of any size is one medium."""

    changes = FittedChanges

    def read_settings(self, folder: Path, max_pixels: int) -> FittedSettings:
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
        return FittedSettings(vision.patch_size * vision.merge, own.max_soft_tokens, along, own.resample, max_pixels)

    def text(self, image: ImagePatches) -> str:
        rows, cols = self._grid(image)
        return f"{self._begin}{self.placeholder * (rows * cols)}{self._end}"

    def media(self, image: ImagePatches) -> Iterator[ShownMedia]:
        rows, cols = self._grid(image)
        return in_one(image.colors, rows * cols, rows, cols)

    def _grid(self, image: ImagePatches) -> tuple[int, int]:
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
