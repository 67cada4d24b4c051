"""Images as squares of one size, pixel by pixel as Gemma 3's processor makes them: the whole image, and with pan and
scan also parts of a long one. Only a child process runs this, as tiles.py.
"""

import math
from collections.abc import Iterator

import msgspec
from PIL import Image

from vllm_lite.client.media.decoding import opened
from vllm_lite.client.media.sources import MAX_PIXELS


class PanAndScan(msgspec.Struct, frozen=True):
    """An image with one edge `least_ratio` times the other or more is also cut along it into up to `most_crops` parts,
    none of whose edges has less than `least_size` pixels."""

    least_size: int = 256
    most_crops: int = 4
    least_ratio: float = 1.2


class SquareSettings(msgspec.Struct, frozen=True, tag=True):
    """Images are resized to squares of `edge` x `edge` pixels, whatever their ratio."""

    edge: int
    resample: int = 2
    pan: PanAndScan | None = None
    max_pixels: int = MAX_PIXELS


class ImageSquares(msgspec.Struct, frozen=True, tag=True):
    """The whole image and then its parts: uint8 [edge, edge, 3] each."""

    squares: list[bytes]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.squares))


def squares_of(data: bytes, settings: SquareSettings) -> ImageSquares:
    """Preprocess an image. Raises RequestError if it is not an image, or too large."""
    image = opened(data, settings.max_pixels)
    size, resample = (settings.edge, settings.edge), Image.Resampling(settings.resample)
    views = [image] if settings.pan is None else [image, *_crops(image, settings.pan)]
    return ImageSquares([view.resize(size, resample).tobytes() for view in views])


def _crops(image: Image.Image, pan: PanAndScan) -> Iterator[Image.Image]:
    width, height = image.size
    longer, shorter = max(width, height), min(width, height)
    if longer / shorter < pan.least_ratio:
        return
    count = min(longer // pan.least_size, math.floor(longer / shorter + 0.5))
    count = min(pan.most_crops, max(2, count))
    along = math.ceil(longer / count)
    if min(along, shorter) < pan.least_size:
        return
    for start in range(0, longer, along):
        end = min(start + along, longer)
        yield image.crop((start, 0, end, height) if width >= height else (0, start, width, end))
