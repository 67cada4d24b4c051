"""Preprocessing of images, pixel by pixel as the processors of the model families do it. Only child processes run this
(image_process.py).

patches  images of any size, resized to whole patches by settings that know the size
tiles    the whole image and, if it is larger than one tile, its tiles
grids    the whole image and a grid of squares, or one square from the middle
squares  the whole image as a square and, with pan and scan, parts of a long one
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
from PIL import Image

from vllm_lite.checkpoint.layer_specs.anyres import Resolution, best_resolution, within
from vllm_lite.client.media.decoding import opened
from vllm_lite.client.media.sources import MAX_PIXELS
from vllm_lite.errors import RequestError

MAX_RATIO = 200
"""Maximum ratio of an image's longer edge to its shorter."""
MAX_EDGE = 4096
"""Maximum edge of a resized image in pixels."""
MOST_RESIZED = 8_000_000
"""Maximum pixels of a resized image whose middle square is used."""
BUDGETS = (70, 140, 280, 560, 1120)
"""Allowed maximum numbers of tokens of an image in Gemma 4."""


class ColorImage(msgspec.Struct, frozen=True, tag=True):
    """An image as one medium. `height` and `width` are in pixels; `colors`: uint8 [height, width, 3], or the squares of
    a grid one after another: uint8 [num_squares, edge, edge, 3], the whole image first."""

    height: int
    width: int
    colors: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.colors)


# ---- patches


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
    """Qwen2-VL to Qwen3.5: edges become multiples of `unit`, and the image has `least` to `most` pixels then."""

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


class RowSettings(msgspec.Struct, frozen=True, tag=True):
    """Pixtral and Mistral 3: images are shrunk to `height` x `width`, of nearly their ratio; then edges grow to
    multiples of `unit`."""

    unit: int
    height: int
    width: int
    resample: int = 3
    max_pixels: int = MAX_PIXELS

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Size in whole units. Raises RequestError if no pixel would be left of an edge."""
        ratio = max(height / self.height, width / self.width)
        if ratio > 1:
            inner = math.floor(height / ratio), math.floor(width / ratio)
            if min(inner) < 1:
                raise RequestError(
                    f"the image has {width} x {height} pixels; shrunk to at most {self.width} x {self.height} one "
                    "edge would have none"
                )
            height, width = inner
        return -(-height // self.unit) * self.unit, -(-width // self.unit) * self.unit


class FittedSettings(msgspec.Struct, frozen=True, tag=True):
    """Gemma 4: `unit` x `unit` pixels become a token; an image keeps its ratio and has at most `most_tokens`, and
    `most_along` along an edge."""

    unit: int
    most_tokens: int
    most_along: int
    resample: int = 3
    max_pixels: int = MAX_PIXELS

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Largest size in whole units, rounded down, with the image's ratio. A narrow image has one unit across, and is
        as long as the ratio and the budget allow."""
        unit, most = self.unit, self.most_tokens
        factor = math.sqrt(most * unit**2 / (height * width))
        rows, cols = math.floor(factor * height / unit), math.floor(factor * width / unit)
        if not rows:
            rows, cols = 1, min(width // height, most)
        elif not cols:
            rows, cols = min(height // width, most), 1
        if max(rows, cols) > self.most_along:
            raise RequestError(
                f"the image has {width} x {height} pixels, which makes {cols} x {rows} tokens; the model has positions "
                f"for {self.most_along} along an edge"
            )
        return rows * unit, cols * unit


def resized(data: bytes, settings: SizingSettings) -> ColorImage:
    """Preprocess an image. Raises RequestError if it is not an image, or too large or too narrow."""
    image = opened(data, settings.max_pixels)
    height, width = settings.size(image.height, image.width)
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), Image.Resampling(settings.resample))
    return ColorImage(height, width, image.tobytes())


# ---- tiles


class TileSettings(msgspec.Struct, frozen=True, tag=True):
    """Idefics 3 and SmolVLM: images are resized to `longest_edge`, and then cut into tiles if it `splits`."""

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
    return ImageTiles(rows, cols, [*(_tiles(image, rows, cols, tile)), whole])


def _tiles(image: Image.Image, rows: int, cols: int, tile: int) -> Iterator[bytes]:
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


# ---- grids


class GridSettings(msgspec.Struct, frozen=True, tag=True):
    """LLaVA-OneVision, LLaVA-NeXT: edges of squares in pixels, and the resolutions of grids. Without any, as LLaVA's by
    CLIP, there is one square, of the middle."""

    edge: int
    pinpoints: tuple[Resolution, ...]
    resample: int = 3
    max_pixels: int = MAX_PIXELS


def grid_of(data: bytes, settings: GridSettings) -> ColorImage:
    """Preprocess an image. Raises RequestError if it is not an image, or too large or too narrow."""
    image, edge, resample = opened(data, settings.max_pixels), settings.edge, Image.Resampling(settings.resample)
    if not settings.pinpoints:
        return ColorImage(image.height, image.width, _middle(image, settings).tobytes())
    best = best_resolution(image.height, image.width, settings.pinpoints)
    height, width = within(image.height, image.width, best)
    grid = Image.new("RGB", best[::-1])
    grid.paste(image.resize((width, height), resample), ((best[1] - width) // 2, (best[0] - height) // 2))
    places = [(left, top) for top in range(0, best[0], edge) for left in range(0, best[1], edge)]
    whole = image.resize((edge, edge), resample)
    squares = [whole, *(grid.crop((left, top, left + edge, top + edge)) for left, top in places)]
    return ColorImage(image.height, image.width, b"".join(square.tobytes() for square in squares))


def _middle(image: Image.Image, settings: GridSettings) -> Image.Image:
    """Resize an image's shorter edge to that of a square, and return the square in the middle. Raises RequestError if
    the resized image would have too many pixels."""
    edge = settings.edge
    longer = int(edge * max(image.size) / min(image.size))
    if longer * edge > MOST_RESIZED:
        raise RequestError(
            f"the image has {image.width} x {image.height} pixels; one edge may be {MOST_RESIZED // edge**2} times the "
            "other"
        )
    width, height = (edge, longer) if image.width <= image.height else (longer, edge)
    left, top = (width - edge) // 2, (height - edge) // 2
    resized = image.resize((width, height), Image.Resampling(settings.resample))
    return resized.crop((left, top, left + edge, top + edge))


# ---- squares


class PanAndScan(msgspec.Struct, frozen=True):
    """An image with one edge `least_ratio` times the other or more is also cut along it into up to `most_crops` parts,
    none of whose edges has less than `least_size` pixels."""

    least_size: int = 256
    most_crops: int = 4
    least_ratio: float = 1.2


class SquareSettings(msgspec.Struct, frozen=True, tag=True):
    """Gemma 3: images are resized to squares of `edge` x `edge` pixels, whatever their ratio."""

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


# ---- any of these

ProcessorSettings = TileSettings | PatchSettings | RowSettings | GridSettings | SquareSettings | FittedSettings
Preprocessed = ImageTiles | ColorImage | ImageSquares
_MAKERS: dict[type, Callable[[bytes, Any], Preprocessed]] = {
    TileSettings: tiles_of,
    PatchSettings: resized,
    RowSettings: resized,
    GridSettings: grid_of,
    SquareSettings: squares_of,
    FittedSettings: resized,
}


def preprocessed(data: bytes, settings: ProcessorSettings) -> Preprocessed:
    """Preprocess an image. Raises RequestError if it is not an image, or has a size that is not supported."""
    return _MAKERS[type(settings)](data, settings)
