"""Images of any size in whole patches, pixel by pixel as the processors of Qwen2-VL to Qwen3.5 make them.

Only a child process runs this, as tiles.py.
"""

import math

import msgspec
from PIL import Image

from vllm_lite.client.media.decoding import opened
from vllm_lite.client.media.sources import MAX_PIXELS
from vllm_lite.errors import RequestError

MAX_RATIO = 200
"""Maximum ratio of an image's longer edge to its shorter."""


class PatchSettings(msgspec.Struct, frozen=True, tag=True):
    """Edges become multiples of `unit`, and the image has `least` to `most` pixels then."""

    unit: int
    least: int
    most: int
    resample: int = 3
    max_pixels: int = MAX_PIXELS


class ImagePatches(msgspec.Struct, frozen=True, tag=True):
    """`colors`: uint8 [height, width, 3]."""

    height: int
    width: int
    colors: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.colors)


def patches_of(data: bytes, settings: PatchSettings) -> ImagePatches:
    """Preprocess an image. Raises RequestError if it is not an image, or too large or too narrow."""
    image = opened(data, settings.max_pixels)
    height, width = fitting(image.height, image.width, settings)
    resized = image.resize((width, height), Image.Resampling(settings.resample))
    return ImagePatches(height, width, resized.tobytes())


def fitting(height: int, width: int, settings: PatchSettings) -> tuple[int, int]:
    """Nearest size that the settings allow, with nearly the same ratio."""
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise RequestError(f"the image has {width} x {height} pixels; one edge may be {MAX_RATIO} times the other")
    unit = settings.unit
    rows, cols = round(height / unit) * unit, round(width / unit) * unit
    if rows * cols > settings.most:
        shrink = math.sqrt(height * width / settings.most)
        return tuple(max(unit, math.floor(edge / shrink / unit) * unit) for edge in (height, width))  # type: ignore[return-value]
    if rows * cols < settings.least:
        grow = math.sqrt(settings.least / (height * width))
        return tuple(math.ceil(edge * grow / unit) * unit for edge in (height, width))  # type: ignore[return-value]
    return rows, cols
