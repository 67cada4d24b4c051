"""Families' ways to write an image into a prompt: the placeholder of their templates, the text that stands for it, and
the media among its tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from vllm_lite.checkpoint.layer_specs.vision import PREPROCESSOR_FILE, QwenVisionSpec, SiglipSpec, VisionSpec
from vllm_lite.checkpoint.typed_json import Size, convert, read_json
from vllm_lite.client.media.patches import ImagePatches, PatchSettings
from vllm_lite.client.media.tiles import ImageTiles, TileSettings
from vllm_lite.client.spans import ShownMedia
from vllm_lite.errors import ModelError
from vllm_lite.protocol.spans import Media

PROCESSOR_FILE = "processor_config.json"
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"

V = TypeVar("V", bound=VisionSpec)
I = TypeVar("I")  # noqa: E741


class ImageWriter(ABC, Generic[V, I]):
    """For one model; `I` is what the child processes make of an image."""

    placeholder: str
    settings: TileSettings | PatchSettings

    def __init__(self, vision: V, folder: Path, max_pixels: int) -> None:
        """Raises ModelError for a processor that does what is not done here."""
        self.vision = vision
        self.settings = self.read_settings(folder, max_pixels)

    @abstractmethod
    def read_settings(self, folder: Path, max_pixels: int) -> TileSettings | PatchSettings:
        """The settings of the model's processor."""

    @abstractmethod
    def text(self, image: I) -> str:
        """The text that stands for an image, with a placeholder for each of its vectors."""

    @abstractmethod
    def media(self, image: I) -> Iterator[ShownMedia]:
        """The media of an image, in the order of their placeholders."""


class TileWriter(ImageWriter[SiglipSpec, ImageTiles]):
    """Idefics 3 and SmolVLM: tiles row by row, then the whole image, each a medium."""

    placeholder = "<image>"

    def read_settings(self, folder: Path, max_pixels: int) -> TileSettings:
        own, size = _processor(folder, _Tiles), self.vision.image_size
        if own.max_image_size.longest_edge != size or not own.do_resize:
            raise ModelError(
                f"{folder}: images are resized to tiles of image_size {size}; max_image_size "
                f"{own.max_image_size.longest_edge} with do_resize {own.do_resize} is not supported"
            )
        return TileSettings(size, own.size.longest_edge, own.resample, own.do_image_splitting, max_pixels)

    def text(self, image: ImageTiles) -> str:
        vectors = self.placeholder * self.vision.num_tokens
        rows = (
            "".join(f"{AROUND}<row_{row}_col_{col}>{vectors}" for col in range(1, image.cols + 1)) + "\n"
            for row in range(1, image.rows + 1)
        )
        return "".join(rows) + "\n" * (image.rows > 0) + f"{AROUND}{WHOLE}{vectors}{AROUND}"

    def media(self, image: ImageTiles) -> Iterator[ShownMedia]:
        for tile in image.tiles:
            yield ShownMedia(Media("image", blake2b(tile, digest_size=32).digest(), self.vision.num_tokens), tile)


class PatchWriter(ImageWriter[QwenVisionSpec, ImagePatches]):
    """Qwen3.5: an image of any size is one medium."""

    placeholder = "<|image_pad|>"

    def read_settings(self, folder: Path, max_pixels: int) -> PatchSettings:
        own, vision = _processor(folder, _Patches), self.vision
        sizes = own.patch_size, own.merge_size, own.temporal_patch_size
        if sizes != (vision.patch_size, vision.merge, vision.frames) or not own.do_resize:
            raise ModelError(
                f"{folder}: the processor's patch_size, merge_size and temporal_patch_size {sizes} with do_resize "
                f"{own.do_resize} must be the tower's {(vision.patch_size, vision.merge, vision.frames)}"
            )
        least, most = own.min_pixels or own.size.shortest_edge, own.max_pixels or own.size.longest_edge
        return PatchSettings(vision.patch_size * vision.merge, least, most, own.resample, max_pixels)

    def text(self, image: ImagePatches) -> str:
        return self.placeholder * self._num_tokens(image)

    def media(self, image: ImagePatches) -> Iterator[ShownMedia]:
        grid = 1, image.height // self.vision.patch_size, image.width // self.vision.patch_size
        digest = blake2b(image.colors, digest_size=32, key=repr(grid).encode()).digest()
        yield ShownMedia(Media("image", digest, self._num_tokens(image), grid=grid), image.colors)

    def _num_tokens(self, image: ImagePatches) -> int:
        return image.height * image.width // (self.vision.patch_size * self.vision.merge) ** 2


def writer_for(vision: VisionSpec, folder: Path, max_pixels: int) -> ImageWriter[Any, Any]:
    """The writer of a model with this tower. Raises ModelError."""
    if isinstance(vision, SiglipSpec):
        return TileWriter(vision, folder, max_pixels)
    if isinstance(vision, QwenVisionSpec):
        return PatchWriter(vision, folder, max_pixels)
    raise TypeError(f"no prompts are written for {type(vision).__name__}")


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


P = TypeVar("P", _Tiles, _Patches)


def _processor(folder: Path, kind: type[P]) -> P:
    """The settings of the processor, by one of the files in which they may stand."""
    if (file := folder / PREPROCESSOR_FILE).is_file():
        return read_json(file, lambda raw: convert(raw, kind))
    if (file := folder / PROCESSOR_FILE).is_file():
        return read_json(file, lambda raw: convert(raw.get("image_processor") or {}, kind))
    return kind()
