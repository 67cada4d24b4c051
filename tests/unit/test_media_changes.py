"""Changes of a processor's settings: what is taken, and what is refused in one sentence."""

from typing import Any

import msgspec
import pytest

from vllm_lite.client.media.changes import NoChanges, PatchChanges, RowChanges, TileChanges, changed
from vllm_lite.client.media.processors import GridSettings, PatchSettings, ProcessorSettings, RowSettings, TileSettings
from vllm_lite.errors import RequestError

TILES, PATCHES, ROWS = TileSettings(32, 64), PatchSettings(16, 256, 4096), RowSettings(16, 64, 64)
SQUARES = GridSettings(32, ((32, 32),))
MOST = 100_000


def limited(settings: ProcessorSettings) -> Any:
    return msgspec.structs.replace(settings, max_pixels=MOST)


@pytest.mark.parametrize(
    ("settings", "kind", "given", "expected"),
    [
        (TILES, TileChanges, {}, TILES),
        (TILES, TileChanges, {"size": {"longest_edge": 96}}, TileSettings(32, 96)),
        (TILES, TileChanges, {"do_image_splitting": False}, TileSettings(32, 64, splits=False)),
        (PATCHES, PatchChanges, {}, PATCHES),
        (PATCHES, PatchChanges, {"max_pixels": 1024}, PatchSettings(16, 256, 1024)),
        (PATCHES, PatchChanges, {"min_pixels": 512, "max_pixels": 512}, PatchSettings(16, 512, 512)),
        (PATCHES, PatchChanges, {"size": {"shortest_edge": 300, "longest_edge": 900}}, PatchSettings(16, 300, 900)),
        (ROWS, RowChanges, {"size": {"longest_edge": 128}}, RowSettings(16, 128, 128)),
        (ROWS, RowChanges, {"size": {"height": 32, "width": 80}}, RowSettings(16, 32, 80)),
        (SQUARES, NoChanges, {}, SQUARES),
    ],
)
def test_sizes_that_a_processor_knows(
    settings: ProcessorSettings, kind: type[Any], given: dict[str, Any], expected: ProcessorSettings
) -> None:
    assert changed(limited(settings), kind, given) == limited(expected)


@pytest.mark.parametrize(
    ("settings", "kind", "given", "problem"),
    [
        (TILES, TileChanges, {"size": {"longest_edge": 5000}}, "size.longest_edge is at most 4096, got 5000"),
        (TILES, TileChanges, {"max_pixels": 5}, "has max_pixels; the processor of this model takes size, do_image"),
        (TILES, TileChanges, {"size": {"height": 5}}, r"mm_processor_kwargs: Object contains unknown field `height`"),
        (PATCHES, PatchChanges, {"max_pixels": MOST + 1}, f"asks for {MOST + 1} pixels; at most {MOST} are taken"),
        (PATCHES, PatchChanges, {"min_pixels": MOST + 1}, "asks for"),
        (PATCHES, PatchChanges, {"size": {"longest_edge": MOST + 1}}, "asks for"),
        (PATCHES, PatchChanges, {"min_pixels": 5000}, "min_pixels 5000 and max_pixels 4096 must ascend"),
        (PATCHES, PatchChanges, {"min_pixels": 9, "max_pixels": 255}, "one token takes 256 pixels"),
        (PATCHES, PatchChanges, {"max_pixels": 0}, "mm_processor_kwargs: Expected `int` >= 1"),
        (PATCHES, PatchChanges, {"max_pixels": True}, "Expected `int"),
        (PATCHES, PatchChanges, {"max_pixels": 2**40}, "Expected `int"),
        (ROWS, RowChanges, {"size": {"longest_edge": 400}}, "asks for 160000 pixels"),
        (ROWS, RowChanges, {"size": {"height": 400, "width": 251}}, "asks for 100400 pixels"),
        (SQUARES, NoChanges, {"size": {}}, "has size; the processor of this model takes none"),
    ],
)
def test_others_are_refused(settings: ProcessorSettings, kind: type[Any], given: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        changed(limited(settings), kind, given)
