"""Changes of a processor's settings by a request or an operator: vLLM's `mm_processor_kwargs`.

Only sizes that the model's processor knows are accepted, none of them above the largest image that is decoded.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from vllm_lite.client.media import processors
from vllm_lite.client.media.processors import BUDGETS, MAX_EDGE, PanAndScan, ProcessorSettings
from vllm_lite.errors import RequestError

Pixels = Annotated[int, Meta(ge=1, le=2**31 - 1)]
S = TypeVar("S", bound=ProcessorSettings)


class SizeChanges(msgspec.Struct, Generic[S], frozen=True, forbid_unknown_fields=True):
    """Changes of sizes in the settings of one processor, under transformers' names."""

    @property
    def pixels(self) -> int:
        """Maximum pixels to which an image would be resized."""
        return 0

    def of(self, settings: S) -> S:
        """Return the settings with these changes. Raises RequestError for impossible sizes."""
        return settings


class NoChanges(SizeChanges[S], frozen=True):
    """Changes for processors with fixed sizes: none."""


class _Longest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    longest_edge: Pixels


class TileChanges(SizeChanges[processors.TileSettings], frozen=True):
    """Changes for the processor of Idefics 3 and SmolVLM."""

    size: _Longest | None = None
    do_image_splitting: bool | None = None

    def of(self, settings: processors.TileSettings) -> processors.TileSettings:
        longest = settings.longest_edge if self.size is None else self.size.longest_edge
        if longest > MAX_EDGE:
            raise RequestError(f"mm_processor_kwargs: size.longest_edge is at most {MAX_EDGE}, got {longest}")
        splits = settings.splits if self.do_image_splitting is None else self.do_image_splitting
        return msgspec.structs.replace(settings, longest_edge=longest, splits=splits)


class _Edges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of pixels, whatever their names."""

    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class PatchChanges(SizeChanges[processors.PatchSettings], frozen=True):
    """Changes for Qwen's processors."""

    size: _Edges = _Edges()
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None

    @property
    def pixels(self) -> int:
        return max(
            self.size.longest_edge or 0, self.max_pixels or 0, self.size.shortest_edge or 0, self.min_pixels or 0
        )

    def of(self, settings: processors.PatchSettings) -> processors.PatchSettings:
        least = self.min_pixels or self.size.shortest_edge or settings.least
        most = self.max_pixels or self.size.longest_edge or settings.most
        if not least <= most or most < settings.unit**2:
            raise RequestError(
                f"mm_processor_kwargs: min_pixels {least} and max_pixels {most} must ascend, and one token takes "
                f"{settings.unit**2} pixels"
            )
        return msgspec.structs.replace(settings, least=least, most=most)


class _Sides(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    longest_edge: Pixels | None = None
    height: Pixels | None = None
    width: Pixels | None = None


class RowChanges(SizeChanges[processors.RowSettings], frozen=True):
    """Changes for Pixtral's processor."""

    size: _Sides = _Sides()

    @property
    def pixels(self) -> int:
        return (self.size.height or 0) * (self.size.width or 0) or (self.size.longest_edge or 0) ** 2

    def of(self, settings: processors.RowSettings) -> processors.RowSettings:
        own = self.size
        if own.longest_edge:
            return msgspec.structs.replace(settings, height=own.longest_edge, width=own.longest_edge)
        return msgspec.structs.replace(
            settings, height=own.height or settings.height, width=own.width or settings.width
        )


class SquareChanges(SizeChanges[processors.SquareSettings], frozen=True):
    """Changes for Gemma 3's processor."""

    do_pan_and_scan: bool | None = None
    pan_and_scan_min_crop_size: Pixels | None = None
    pan_and_scan_max_num_crops: Annotated[int, Meta(ge=1, le=16)] | None = None
    pan_and_scan_min_ratio_to_activate: Annotated[float, Meta(gt=0)] | None = None

    def of(self, settings: processors.SquareSettings) -> processors.SquareSettings:
        pans = settings.pan is not None if self.do_pan_and_scan is None else self.do_pan_and_scan
        if not pans:
            return msgspec.structs.replace(settings, pan=None)
        usual = settings.pan or PanAndScan()
        pan = PanAndScan(
            self.pan_and_scan_min_crop_size or usual.least_size,
            self.pan_and_scan_max_num_crops or usual.most_crops,
            self.pan_and_scan_min_ratio_to_activate or usual.least_ratio,
        )
        return msgspec.structs.replace(settings, pan=pan)


class FittedChanges(SizeChanges[processors.FittedSettings], frozen=True):
    """Changes for Gemma 4's processor."""

    max_soft_tokens: int | None = None

    def of(self, settings: processors.FittedSettings) -> processors.FittedSettings:
        most = settings.most_tokens if self.max_soft_tokens is None else self.max_soft_tokens
        if most not in BUDGETS:
            raise RequestError(
                f"mm_processor_kwargs: max_soft_tokens must be one of {', '.join(map(str, BUDGETS))}, got {most}"
            )
        return msgspec.structs.replace(settings, most_tokens=most)


def changed(settings: S, kind: type[SizeChanges[S]], given: Mapping[str, Any]) -> S:
    """Apply given changes, if they are some that a processor knows. Raises RequestError."""
    known = kind.__struct_fields__
    if unknown := sorted(str(name) for name in given if name not in known):
        takes = f"takes {', '.join(known)}" if known else "takes none: its sizes are the model's"
        raise RequestError(f"mm_processor_kwargs has {', '.join(unknown)[:200]}; the processor of this model {takes}")
    try:
        changes = msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"mm_processor_kwargs: {str(error)[:200]}") from None
    if changes.pixels > settings.max_pixels:
        most = settings.max_pixels
        raise RequestError(f"mm_processor_kwargs asks for {changes.pixels} pixels; at most {most} are taken")
    return changes.of(settings)
