"""Images in squares, the whole and a grid, pixel by pixel as the processors of LLaVA-OneVision and LLaVA-NeXT make
them, or one square from the middle of an image, as CLIP's does for LLaVA. Only a child process runs this, as tiles.py.
"""

import msgspec
from PIL import Image

from vllm_lite.checkpoint.layer_specs.anyres import Resolution, best_resolution, within
from vllm_lite.client.media.decoding import opened
from vllm_lite.client.media.sources import MAX_PIXELS
from vllm_lite.errors import RequestError

MOST_RESIZED = 8_000_000
"""Maximum pixels of a resized image whose middle square is used."""


class GridSettings(msgspec.Struct, frozen=True, tag=True):
    """Edges of squares in pixels, and the resolutions of grids. Without any there is one square, of the middle."""

    edge: int
    pinpoints: tuple[Resolution, ...]
    resample: int = 3
    max_pixels: int = MAX_PIXELS


class ImageGrid(msgspec.Struct, frozen=True, tag=True):
    """`height` and `width` are the image's own; `colors`: uint8 [num_squares, edge, edge, 3], the whole first."""

    height: int
    width: int
    colors: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.colors)


def grid_of(data: bytes, settings: GridSettings) -> ImageGrid:
    """Preprocess an image. Raises RequestError if it is not an image, or too large or too narrow."""
    image, edge, resample = opened(data, settings.max_pixels), settings.edge, Image.Resampling(settings.resample)
    if not settings.pinpoints:
        return ImageGrid(image.height, image.width, _middle(image, settings).tobytes())
    best = best_resolution(image.height, image.width, settings.pinpoints)
    height, width = within(image.height, image.width, best)
    grid = Image.new("RGB", best[::-1])
    grid.paste(image.resize((width, height), resample), ((best[1] - width) // 2, (best[0] - height) // 2))
    places = [(left, top) for top in range(0, best[0], edge) for left in range(0, best[1], edge)]
    whole = image.resize((edge, edge), resample)
    squares = [whole, *(grid.crop((left, top, left + edge, top + edge)) for left, top in places)]
    return ImageGrid(image.height, image.width, b"".join(square.tobytes() for square in squares))


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
