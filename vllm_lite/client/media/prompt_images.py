"""Images in the text of a prompt: each placeholder is replaced by the family's text for it, with its media."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_lite.checkpoint.layer_specs.anyres import AnyresSpec
from vllm_lite.checkpoint.layer_specs.gemma_vision import Gemma3VisionSpec, Gemma4VisionSpec, UnifiedVisionSpec
from vllm_lite.checkpoint.layer_specs.pixtral import PixtralVisionSpec
from vllm_lite.checkpoint.layer_specs.qwen_vision import Qwen2VisionSpec, Qwen3VisionSpec
from vllm_lite.checkpoint.layer_specs.vision import SiglipSpec, VisionSpec, read_vision
from vllm_lite.checkpoint.typed_json import read_json
from vllm_lite.client.media.image_pool import ImagePool
from vllm_lite.client.media.sources import MAX_IMAGES, GivenImage, ImageLimits
from vllm_lite.client.media.writers import (
    FittedWriter,
    GridWriter,
    ImageWriter,
    PatchWriter,
    RowWriter,
    SquareWriter,
    TileWriter,
)
from vllm_lite.client.spans import ShownMedia, Span, Text
from vllm_lite.errors import ConfigError, RequestError

WRITERS: dict[type[VisionSpec], type[ImageWriter[Any, Any]]] = {
    AnyresSpec: GridWriter,
    Gemma3VisionSpec: SquareWriter,
    Gemma4VisionSpec: FittedWriter,
    PixtralVisionSpec: RowWriter,
    Qwen2VisionSpec: PatchWriter,
    Qwen3VisionSpec: PatchWriter,
    SiglipSpec: TileWriter,
    UnifiedVisionSpec: FittedWriter,
}
Encode = Callable[[str], list[int]]
"""Tokenizes a prompt's text."""


class Pictured(NamedTuple):
    """A prompt with images: its token ids, placeholders included, and the same as spans."""

    token_ids: list[int]
    spans: list[Span]


class PromptImages:
    """Puts images into the prompts of one model."""

    def __init__(self, writer: ImageWriter[Any, Any], max_images: int = MAX_IMAGES) -> None:
        self._writer = writer
        self._max_images = max_images
        self.pool = ImagePool(writer.settings)

    @classmethod
    def load(
        cls, folder: str | Path, limits: ImageLimits | None = None, changes: Mapping[str, Any] | None = None
    ) -> "PromptImages | None":
        """Load it for the model in `folder`; None if it does not accept images here. `changes` of the processor's
        settings: see `mm_processor_kwargs`. Raises ModelError for an unsupported processor, and ConfigError for
        unsupported changes."""
        path = Path(folder)
        if not (path / "config.json").is_file():
            return None
        raw = read_json(path / "config.json", lambda found: found if isinstance(found, dict) else {})
        names = raw.get("architectures")
        vision = read_vision(str(names[0]), raw, path) if isinstance(names, list) and names else None
        limits = limits or ImageLimits()
        if vision is None:
            return None
        writer = WRITERS[type(vision)](vision, path, limits.pixels)
        try:
            writer.settings = writer.changed(changes or {})
        except RequestError as error:
            raise ConfigError(str(error)) from error
        return cls(writer, limits.images)

    def pictured(
        self, text: str, images: Sequence[GivenImage], encode: Encode, changes: Mapping[str, Any] | None = None
    ) -> Pictured:
        """Make the prompt of `text`, which has a placeholder for each of the images; `changes` of the processor's
        settings are the request's `mm_processor_kwargs`. Raises RequestError."""
        writer, placeholder = self._writer, self._writer.placeholder
        pieces = text.split(placeholder)
        if len(images) > self._max_images:
            raise RequestError(f"a prompt may have at most {self._max_images} images, got {len(images)}")
        if len(pieces) - 1 != len(images):
            raise RequestError(
                f"the prompt has {len(pieces) - 1} placeholders {placeholder!r} for {len(images)} images; the chat "
                "template writes one for each image, and no text may contain it"
            )
        if writer.vector != placeholder and writer.vector in text:
            raise RequestError(f"no text of a prompt with images may contain {writer.vector!r}")
        settings = writer.changed(changes) if changes else None
        made = [self.pool.made(image, settings) for image in images]
        written = [part for piece, image in zip(pieces, made, strict=False) for part in (piece, writer.text(image))]
        token_ids = encode("".join([*written, pieces[-1]]))
        return Pictured(token_ids, self._placed(token_ids, [each for image in made for each in writer.media(image)]))

    def _placed(self, token_ids: list[int], media: Sequence[ShownMedia]) -> list[Span]:
        """Assign placeholders to media in order."""
        spans, placeholder, start = list[Span](), self._writer.vision.token_id, 0
        for shown in media:
            num_tokens = shown.media.num_tokens
            try:
                place = token_ids.index(placeholder, start)
            except ValueError:
                place = len(token_ids)
            own = token_ids[place : place + num_tokens]
            if [token == placeholder for token in own] != self._writer.pattern(shown.media):
                raise RequestError(
                    f"the tokenizer does not write {self._writer.vector!r} as token {placeholder}, as config.json says"
                )
            spans += [Text(token_ids[start:place]), shown._replace(token_ids=own)]
            start = place + num_tokens
        return [*spans, Text(token_ids[start:])]
