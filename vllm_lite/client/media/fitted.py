"""Images that keep their ratio and become as large as a budget of tokens allows, pixel by pixel as Gemma 4's processor
makes them. Only a child process runs this, as tiles.py.
"""

import math

import msgspec
from PIL import Image

from vllm_lite.client.media.decoding import opened
from vllm_lite.client.media.patches import ImagePatches
from vllm_lite.client.media.sources import MAX_PIXELS
from vllm_lite.errors import RequestError

BUDGETS = (70, 140, 280, 560, 1120)
"""Allowed maximum numbers of tokens of an image in Gemma 4."""


class FittedSettings(msgspec.Struct, frozen=True, tag=True):
    """`unit` x `unit` pixels become a token; an image has at most `most_tokens`, and `most_along` along an edge."""

    unit: int
    most_tokens: int
    most_along: int
    resample: int = 3
    max_pixels: int = MAX_PIXELS


def fitted_of(data: bytes, settings: FittedSettings) -> ImagePatches:
    """Preprocess an image. Raises RequestError if it is not an image, or too large or too narrow."""
    image = opened(data, settings.max_pixels)
    height, width = fitting(image.height, image.width, settings)
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), Image.Resampling(settings.resample))
    return ImagePatches(height, width, image.tobytes())


def fitting(height: int, width: int, settings: FittedSettings) -> tuple[int, int]:
    """Largest size in whole units, rounded down, with the image's ratio. A narrow image has one unit across, and is as
    long as the ratio and the budget allow."""
    unit, most = settings.unit, settings.most_tokens
    factor = math.sqrt(most * unit**2 / (height * width))
    rows, cols = math.floor(factor * height / unit), math.floor(factor * width / unit)
    if not rows:
        rows, cols = 1, min(width // height, most)
    elif not cols:
        rows, cols = min(height // width, most), 1
    if max(rows, cols) > settings.most_along:
        raise RequestError(
            f"the image has {width} x {height} pixels, which makes {cols} x {rows} tokens; the model has positions for "
            f"{settings.most_along} along an edge"
        )
    return rows * unit, cols * unit
