"""Images that keep their ratio and become as large as a budget of tokens allows, pixel by pixel as Gemma 4's processor
makes them. Only a child process runs this, as tiles.py.
"""

import math

import msgspec

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
