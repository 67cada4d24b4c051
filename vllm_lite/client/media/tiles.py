"""ImageTiles of an image, pixel by pixel as the processors of Idefics 3 and SmolVLM make them. Pillow alone is needed.

Only a child process runs this (image_process.py).
"""

import math
from collections.abc import Iterator

import msgspec
from PIL import Image

from vllm_lite.client.media.decoding import opened
from vllm_lite.client.media.sources import MAX_PIXELS

MAX_EDGE = 4096
"""Maximum edge of a resized image in pixels."""


class TileSettings(msgspec.Struct, frozen=True, tag=True):
    """Sizes by which a model's processor cuts images: resized to `longest_edge`, and then into tiles if it `splits`."""

    tile: int
    longest_edge: int
    resample: int = 1
    splits: bool = True
    max_pixels: int = MAX_PIXELS


class ImageTiles(msgspec.Struct, frozen=True, tag=True):
    """The tiles of an image, each of `tile` x `tile` pixels of three colors; the last is the whole image. `rows` and
    `cols` count the others, and are 0 if there are none."""

    rows: int
    cols: int
    tiles: list[bytes]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.tiles))


def tiles_of(data: bytes, settings: TileSettings) -> ImageTiles:
    """Preprocess an image. Raises RequestError if it is not an image, or too large."""
    return cut(opened(data, settings.max_pixels), settings)


def cut(image: Image.Image, settings: TileSettings) -> ImageTiles:
    """Resize an RGB image, and cut it into tiles if it is larger than one."""
    tile, resample = settings.tile, Image.Resampling(settings.resample)
    image = image.resize(_within(*image.size, settings.longest_edge), resample)
    if settings.splits:
        image = image.resize(_in_tiles(*image.size, tile), resample)
    width, height = image.size
    whole = image.resize((tile, tile), resample).tobytes()
    if not settings.splits or (width <= tile and height <= tile):
        return ImageTiles(0, 0, [whole])
    rows, cols = max(1, height // tile), max(1, width // tile)
    return ImageTiles(rows, cols, [*(_crops(image, rows, cols, tile)), whole])


def _crops(image: Image.Image, rows: int, cols: int, tile: int) -> Iterator[bytes]:
    for row in range(rows):
        for col in range(cols):
            yield image.crop((col * tile, row * tile, (col + 1) * tile, (row + 1) * tile)).tobytes()


def _within(width: int, height: int, longest: int) -> tuple[int, int]:
    """Size with the longer edge `longest` and an even shorter edge, limited to MAX_EDGE."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        width, height = MAX_EDGE, int(MAX_EDGE / ratio)
    elif height > width and height > MAX_EDGE:
        width, height = int(MAX_EDGE * ratio), MAX_EDGE
    return max(width, 1), max(height, 1)


def _in_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Next larger size of whole tiles: along the longer edge first, then the other by the ratio of both."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return width, height
