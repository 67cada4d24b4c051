"""Images in the text of a prompt: the text that a processor writes for each, and the places of its tiles."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vllm_lite.checkpoint.layer_specs.vision import PREPROCESSOR_FILE, VisionSpec, read_vision
from vllm_lite.checkpoint.typed_json import convert, read_json
from vllm_lite.client.media.image_pool import ImagePool
from vllm_lite.client.media.sources import MAX_IMAGES, ImageLimits
from vllm_lite.client.media.tiles import ImageTiles, TileSettings
from vllm_lite.client.spans import ShownMedia, Span, Text
from vllm_lite.errors import ModelError, RequestError
from vllm_lite.protocol.spans import Media

PROCESSOR_FILE = "processor_config.json"
IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
Encode = Callable[[str], list[int]]
"""The token ids of a prompt's text."""


class _Edge(msgspec.Struct):
    longest_edge: int


class _Processor(msgspec.Struct):
    size: _Edge = msgspec.field(default_factory=lambda: _Edge(4 * 364))
    max_image_size: _Edge = msgspec.field(default_factory=lambda: _Edge(364))
    resample: int = 1
    do_image_splitting: bool = True
    do_resize: bool = True


class Pictured(NamedTuple):
    """A prompt with images: its token ids, placeholders included, and the same as spans."""

    token_ids: list[int]
    spans: list[Span]


class PromptImages:
    """Puts images into the prompts of one model."""

    def __init__(self, vision: VisionSpec, settings: TileSettings, max_images: int = MAX_IMAGES) -> None:
        self.vision = vision
        self._max_images = max_images
        self.pool = ImagePool(settings)

    @classmethod
    def load(cls, folder: str | Path, limits: ImageLimits | None = None) -> "PromptImages | None":
        """For the model in `folder`; None if it sees no images here. Raises ModelError for a processor that does what
        is not done here."""
        path = Path(folder)
        if not (path / "config.json").is_file():
            return None
        raw = read_json(path / "config.json", lambda found: found if isinstance(found, dict) else {})
        names = raw.get("architectures")
        vision = read_vision(str(names[0]), raw, path) if isinstance(names, list) and names else None
        limits = limits or ImageLimits()
        return None if vision is None else cls(vision, _settings(path, vision, limits.pixels), limits.images)

    def pictured(self, text: str, files: Sequence[bytes], encode: Encode) -> Pictured:
        """Make the prompt of `text`, which has a placeholder for each of the images in `files`. Raises RequestError."""
        pieces = text.split(IMAGE)
        if len(files) > self._max_images:
            raise RequestError(f"a prompt may have at most {self._max_images} images, got {len(files)}")
        if len(pieces) - 1 != len(files):
            raise RequestError(
                f"the prompt has {len(pieces) - 1} placeholders {IMAGE!r} for {len(files)} images; the chat template "
                "writes one for each image, and no text may contain it"
            )
        cut = [self.pool.tiles(file) for file in files]
        written = [part for piece, image in zip(pieces, cut, strict=False) for part in (piece, self._written(image))]
        token_ids = encode("".join([*written, pieces[-1]]))
        return Pictured(token_ids, self._placed(token_ids, [tile for image in cut for tile in image.tiles]))

    def _written(self, image: ImageTiles) -> str:
        """The text for one image: its tiles row by row, then the whole of it."""
        vectors = IMAGE * self.vision.num_tokens
        rows = (
            "".join(f"{AROUND}<row_{row}_col_{col}>{vectors}" for col in range(1, image.cols + 1)) + "\n"
            for row in range(1, image.rows + 1)
        )
        return "".join(rows) + "\n" * (image.rows > 0) + f"{AROUND}{WHOLE}{vectors}{AROUND}"

    def _placed(self, token_ids: list[int], tiles: Sequence[bytes]) -> list[Span]:
        """Each run of placeholder tokens becomes the next tile."""
        spans, num_tokens, placeholder = list[Span](), self.vision.num_tokens, self.vision.token_id
        start = 0
        for tile in tiles:
            try:
                place = token_ids.index(placeholder, start)
            except ValueError:
                place = len(token_ids)
            if token_ids[place : place + num_tokens] != [placeholder] * num_tokens:
                raise RequestError(
                    f"the tokenizer does not write {IMAGE!r} as token {placeholder}, as config.json says"
                )
            spans += [Text(token_ids[start:place]), ShownMedia(medium(tile, num_tokens), tile)]
            start = place + num_tokens
        return [*spans, Text(token_ids[start:])]


def medium(tile: bytes, num_tokens: int) -> Media:
    return Media("image", blake2b(tile, digest_size=32).digest(), num_tokens)


def _settings(folder: Path, vision: VisionSpec, max_pixels: int) -> TileSettings:
    """The settings of the processor, by one of the files in which they may stand."""
    own = _Processor()
    if (file := folder / PREPROCESSOR_FILE).is_file():
        own = read_json(file, _read)
    elif (file := folder / PROCESSOR_FILE).is_file():
        own = read_json(file, lambda raw: _read(raw.get("image_processor") or {}))
    if own.max_image_size.longest_edge != vision.image_size or not own.do_resize:
        raise ModelError(
            f"{folder}: images are resized to tiles of image_size {vision.image_size}; max_image_size "
            f"{own.max_image_size.longest_edge} with do_resize {own.do_resize} is not supported"
        )
    return TileSettings(vision.image_size, own.size.longest_edge, own.resample, own.do_image_splitting, max_pixels)


def _read(raw: Any) -> _Processor:
    return convert(raw, _Processor)
