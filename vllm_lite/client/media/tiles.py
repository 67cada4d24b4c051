"""ImageTiles of an image, pixel by pixel as the processors of Idefics 3 and SmolVLM make them. Pillow alone is needed.

Only a child process runs this (image_process.py): decoding a stranger's file may take any time and memory, or crash.
"""

import math
from collections.abc import Iterator
from io import BytesIO

import msgspec
from PIL import Image, ImageOps

from vllm_lite.client.media.sources import MAX_PIXELS
from vllm_lite.errors import RequestError

MAX_EDGE = 4096
"""No edge of a resized image is longer."""
SIGNATURES = {
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "WEBP": (b"RIFF",),
}
"""Formats that are decoded, and how their files begin. Decoders of others, of which some had holes, are never asked."""


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


def tiles_of(data: bytes, settings: TileSettings) -> ImageTiles:
    """Raises RequestError for what is no image, or too large a one."""
    return cut(opened(data, settings.max_pixels), settings)


def opened(data: bytes, max_pixels: int) -> Image.Image:
    """The image in a file, in RGB and upright. Its size is looked at before its pixels are decoded."""
    kind = next((kind for kind, starts in SIGNATURES.items() if data.startswith(starts)), None)
    if kind is None or (kind == "WEBP" and data[8:12] != b"WEBP"):
        raise RequestError(f"an image must be a {', '.join(SIGNATURES)} file; its first bytes are {data[:8].hex()}")
    Image.MAX_IMAGE_PIXELS = None  # which would be judged by others' rules
    try:
        image = Image.open(BytesIO(data), formats=(kind,))
        if (num_pixels := math.prod(image.size)) <= max_pixels:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)  # a copy would take as much memory again
            return _in_rgb(image)
    except MemoryError:
        raise RequestError(f"decoding the {kind} image takes too much memory") from None
    except Exception:  # whatever a decoder makes of a stranger's bytes; what it says of them is not shown
        raise RequestError(f"the {kind} image is damaged or cut off") from None
    raise RequestError(f"the image has {num_pixels} pixels; at most {max_pixels} are decoded")


def _in_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB; where it is transparent it becomes white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


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
    """The size whose longer edge is `longest`; the other is even. None is longer than MAX_EDGE."""
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
    """The next larger size of whole tiles: along the longer edge first, then the other by the ratio of both."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return width, height
