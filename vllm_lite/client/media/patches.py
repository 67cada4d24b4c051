"""Images of any size in whole patches, resized pixel by pixel as the models' processors do it, by settings that know
the size: those of Qwen2-VL to Qwen3.5 are here, others in fitted.py and rows.py.

Only a child process runs this, as tiles.py.
"""

import math
from typing import Protocol

import msgspec
from PIL import Image

from vllm_lite.client.media.decoding import opened
from vllm_lite.client.media.sources import MAX_PIXELS
from vllm_lite.errors import RequestError

MAX_RATIO = 200
"""Maximum ratio of an image's longer edge to its shorter."""


class SizingSettings(Protocol):
    """Settings that give an image a size of its own."""

    @property
    def resample(self) -> int: ...
    @property
    def max_pixels(self) -> int: ...
    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width to which an image is resized. Raises RequestError if it is too narrow."""
        ...


class PatchSettings(msgspec.Struct, frozen=True, tag=True):
    """Edges become multiples of `unit`, and the image has `least` to `most` pixels then."""

    unit: int
    least: int
    most: int
    resample: int = 3
    max_pixels: int = MAX_PIXELS

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Nearest size that the settings allow, with nearly the same ratio."""
        if max(height, width) / min(height, width) > MAX_RATIO:
            raise RequestError(f"the image has {width} x {height} pixels; one edge may be {MAX_RATIO} times the other")
        unit = self.unit
        rows, cols = round(height / unit) * unit, round(width / unit) * unit
        if rows * cols > self.most:
            shrink = math.sqrt(height * width / self.most)
            return tuple(max(unit, math.floor(edge / shrink / unit) * unit) for edge in (height, width))  # type: ignore[return-value]
        if rows * cols < self.least:
            grow = math.sqrt(self.least / (height * width))
            return tuple(math.ceil(edge * grow / unit) * unit for edge in (height, width))  # type: ignore[return-value]
        return rows, cols


class ImagePatches(msgspec.Struct, frozen=True, tag=True):
    """`colors`: uint8 [height, width, 3]."""

    height: int
    width: int
    colors: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.colors)


def resized(data: bytes, settings: SizingSettings) -> ImagePatches:
    """Preprocess an image. Raises RequestError if it is not an image, or too large or too narrow."""
    image = opened(data, settings.max_pixels)
    height, width = settings.size(image.height, image.width)
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), Image.Resampling(settings.resample))
    return ImagePatches(height, width, image.tobytes())
