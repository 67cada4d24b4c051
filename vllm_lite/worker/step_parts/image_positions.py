"""Positions of tokens in prompts with images, for models that count them along time, height and width (M-RoPE).

All tokens of an image share one position in time; along height and width, positions grow by row and column. Text after
it continues after the largest position. So an image takes as many positions as its longer side has tokens, and later
tokens have smaller positions than places. Source: Qwen2-VL (Wang et al. 2024), transformers' `get_rope_index`.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import on_axes
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import Fork, Handle, NewRequest
from vllm_lite.worker.batch.part import StepPart
from vllm_lite.worker.batch.rows import SequenceState
from vllm_lite.worker.batch.step_inputs import Int64s, StepInputs


class _Image(NamedTuple):
    """The tokens [start, end) of an image in `cols` columns; `nearer`: places minus positions that it adds after it."""

    start: int
    end: int
    cols: int
    nearer: int


class ImagePositions(StepPart):
    """Sets M-RoPE positions. `merge` x `merge` patches of a medium's grid make one token."""

    def __init__(self, merge: int) -> None:
        self._merge = merge
        self._images: dict[Handle, list[_Image]] = {}

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:
        if not isinstance(entry, NewRequest):
            images = self._images.get(entry.parent, [])
        else:
            images = [self.image(medium) for medium in entry.media]
        if images:
            self._images[sequence.handle] = images

    def add(self, row: int, sequence: SequenceState, tokens: NDArray[Any]) -> None:  # noqa: ARG002
        """Set the row's `nearer`, from which drafts, which all follow the images, get their positions."""
        self.rows.nearer[row] = sum(image.nearer for image in self._images.get(sequence.handle, ()))

    def close(self, sequence: SequenceState) -> None:
        self._images.pop(sequence.handle, None)

    def image(self, medium: Media) -> _Image:
        rows, cols = (side // self._merge for side in medium.grid[1:])
        return _Image(medium.start, medium.end, cols, medium.num_tokens - max(rows, cols))

    def build(self, inputs: StepInputs) -> None:
        if not self._images:
            return
        positions = None
        for index, handle in enumerate(inputs.handles):
            if (images := self._images.get(handle)) is None:
                continue
            if positions is None:
                positions = inputs.positions.copy()
            first, last = inputs.query_start_loc[index : index + 2]
            positions[first:last] = counted(positions[first:last], images)
        if positions is not None:
            inputs.positions, inputs.counts_otherwise = positions, True

    def check_integrity(self) -> None:
        unknown = self._images.keys() - self.rows.sequences.keys()
        if unknown:
            raise RuntimeError(f"images of handles {sorted(unknown)}, which no sequence has")


def counted(places: Int64s, images: list[_Image]) -> Int64s:
    """Positions along all axes of the tokens at these places of one sequence."""
    starts, ends, cols, nearer = (np.array(each, np.int64) for each in zip(*images, strict=True))
    before = np.searchsorted(ends, places, "right")  # images that end at or before each place
    positions = places - np.append(0, nearer.cumsum())[before]
    own = np.minimum(before, len(images) - 1)
    inner: NDArray[np.int64] = np.where((starts[own] <= places) & (places < ends[own]), places - starts[own], 0)
    down, across = np.divmod(inner, cols[own])
    return on_axes(positions - inner, down, across)
