"""Decoding of image files to upright RGB pixels. Only a child process runs this (image_process.py): decoding an
untrusted file may take any time and memory, or crash.

The memory is known in advance: Pillow keeps four bytes per pixel, and as many again while an image is rotated or
converted; decoders of WEBP and of progressive JPEG keep copies of their own. Big images are decoded one at a time.
"""

import math
from io import BytesIO
from typing import NamedTuple

from PIL import Image, ImageOps

from vllm_lite.errors import RequestError

SIGNATURES = {
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "WEBP": (b"RIFF",),
}
"""Decoded formats, with the first bytes of their files. Decoders of other formats, some of which had security holes,
are never called."""
ORIENTATION = 0x0112
"""The EXIF tag of a photo's orientation; 1: upright."""
SCAN = b"\xff\xda"
"""Marker of a JPEG scan; followed by two bytes of length and one with the number of colors."""
BIG_PIXELS = 4_000_000
"""Weighted pixels above which only one image is decoded at a time."""
BAND_PIXELS = 100_000
"""Pixels of a band, in which transparency is replaced by white at once."""


class FileHeader(NamedTuple):
    """An image before its pixels are decoded."""

    kind: str
    image: Image.Image
    pixel_bytes: int
    """Bytes per pixel while the image is decoded, rotated and converted."""

    @property
    def num_pixels(self) -> int:
        return math.prod(self.image.size)

    @property
    def counted(self) -> float:
        """Number of pixels weighted by their memory, where four bytes count as one pixel."""
        return self.num_pixels * self.pixel_bytes / 4


def header_of(data: bytes) -> FileHeader:
    """Read the header. Raises RequestError."""
    kind = next((kind for kind, starts in SIGNATURES.items() if data.startswith(starts)), None)
    if kind is None or (kind == "WEBP" and data[8:12] != b"WEBP"):
        raise RequestError(f"an image must be a {', '.join(SIGNATURES)} file; its first bytes are {data[:8].hex()}")
    Image.MAX_IMAGE_PIXELS = None  # our own limits apply
    try:
        image = Image.open(BytesIO(data), formats=(kind,))
        return FileHeader(kind, image, max(_own_bytes(kind, image, data), _decoder_bytes(kind, image, data)))
    except MemoryError:
        raise RequestError(f"decoding the {kind} image takes too much memory") from None
    except Exception:  # a decoder may raise anything for untrusted bytes; its message is not shown
        raise RequestError(f"the {kind} image is damaged or cut off") from None


def _own_bytes(kind: str, image: Image.Image, data: bytes) -> int:
    """Bytes per pixel of the decoded image and of its rotated or converted copy."""
    if _may_be_turned(kind, image, data) or image.info.get("transparency") is not None:
        return 8
    return 4 if image.mode == "RGB" else 5 if image.mode in ("L", "P", "1") else 8


def _decoder_bytes(kind: str, image: Image.Image, data: bytes) -> int:
    """Bytes per pixel in the decoder. JPEG's keeps the coefficients of all pixels, of two bytes each, if they come in
    several scans."""
    if kind == "WEBP":
        return 16
    layers: list[tuple[int, int, int, int]] = getattr(image, "layer", [])
    if kind != "JPEG" or not (image.info.get("progressive") or _has_scans(data, len(layers))):
        return 4
    parts = sum(across * down for _, across, down, _ in layers)
    whole = max(across for _, across, _, _ in layers) * max(down for _, _, down, _ in layers)
    return 4 + math.ceil(2 * parts / whole)


def _has_scans(data: bytes, num_layers: int) -> bool:
    """Whether a scan of a JPEG lacks some of its colors."""
    place = data.find(SCAN)
    while 0 <= place < len(data) - 4:
        if data[place + 4] != num_layers:
            return True
        place = data.find(SCAN, place + 2)
    return False


def _may_be_turned(kind: str, image: Image.Image, data: bytes) -> bool:
    """Whether the image has to be rotated, by its header only, as Pillow would decode a PNG to read data after its
    pixels."""
    if kind == "PNG" and "exif" not in image.info:
        return b"eXIf" in data or b"iTXt" in data
    return bool(image.getexif().get(ORIENTATION, 1) != 1)


def opened(data: bytes, max_pixels: int) -> Image.Image:
    """Decode a file to an upright RGB image. Checks its size before decoding pixels. Raises RequestError."""
    header = header_of(data)
    if header.counted > max_pixels:
        more = header.pixel_bytes > 4
        several = f", of which each counts {header.pixel_bytes / 4:g} times for the memory that it takes" * more
        raise RequestError(f"the image has {header.num_pixels} pixels{several}; at most {max_pixels} are decoded")
    kind, image = header.kind, header.image
    try:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # a copy would take as much memory again
        return _in_rgb(image)
    except MemoryError:
        raise RequestError(f"decoding the {kind} image takes too much memory") from None
    except Exception:  # as above
        raise RequestError(f"the {kind} image is damaged or cut off") from None


def _in_rgb(image: Image.Image) -> Image.Image:
    """Convert the image to RGB, with transparency replaced by white, band by band."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    width, height = image.size
    made, rows = Image.new("RGB", image.size), max(1, BAND_PIXELS // width)
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height))).convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        made.paste(Image.alpha_composite(white, band).convert("RGB"), (0, top))
    return made
