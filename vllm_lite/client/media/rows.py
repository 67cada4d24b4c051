"""Images in whole patches, no edge longer than one size, pixel by pixel as the processors of Pixtral and Mistral 3 make
them. Only a child process runs this, as tiles.py.
"""

import math

import msgspec
from PIL import Image

from vllm_lite.client.media.decoding import opened
from vllm_lite.client.media.patches import ImagePatches
from vllm_lite.client.media.sources import MAX_PIXELS
from vllm_lite.errors import RequestError


class RowSettings(msgspec.Struct, frozen=True, tag=True):
    """Images are shrunk to `height` x `width`, of nearly their ratio; then edges grow to multiples of `unit`."""

    unit: int
    height: int
    width: int
    resample: int = 3
    max_pixels: int = MAX_PIXELS


def rows_of(data: bytes, settings: RowSettings) -> ImagePatches:
    """Preprocess an image. Raises RequestError if it is not an image, or too large or too narrow."""
    image = opened(data, settings.max_pixels)
    height, width = shrunk(image.height, image.width, settings)
    resized = image.resize((width, height), Image.Resampling(settings.resample))
    return ImagePatches(height, width, resized.tobytes())


def shrunk(height: int, width: int, settings: RowSettings) -> tuple[int, int]:
    """Size in whole units. Raises RequestError if no pixel would be left of an edge."""
    ratio = max(height / settings.height, width / settings.width)
    if ratio > 1:
        inner = math.floor(height / ratio), math.floor(width / ratio)
        if min(inner) < 1:
            raise RequestError(
                f"the image has {width} x {height} pixels; shrunk to at most {settings.width} x {settings.height} one "
                "edge would have none"
            )
        height, width = inner
    return -(-height // settings.unit) * settings.unit, -(-width // settings.unit) * settings.unit
