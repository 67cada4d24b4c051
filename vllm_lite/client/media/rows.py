"""Images in whole patches, no edge longer than one size, pixel by pixel as the processors of Pixtral and Mistral 3 make
them. Only a child process runs this, as tiles.py.
"""

import math

import msgspec

from vllm_lite.client.media.sources import MAX_PIXELS
from vllm_lite.errors import RequestError


class RowSettings(msgspec.Struct, frozen=True, tag=True):
    """Images are shrunk to `height` x `width`, of nearly their ratio; then edges grow to multiples of `unit`."""

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
