"""Images in prompts of the Python API. PromptImages, and with it Pillow, is imported for the first image."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lite.client.media.sources import MAX_IMAGES, Fetch, GivenImage, ImageLimits, file_of, image_of_any, uuid_of
from vllm_lite.client.prompt import SpansPrompt
from vllm_lite.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from vllm_lite.client.media.prompt_images import Pictured, PromptImages

Part = tuple[Mapping[str, Any], str]
"""A content part with an image, and the name of the content."""
KINDS = ("image", "video", "audio")
_FORM = "{'prompt': text, 'multi_modal_data': {'image': [image, ...]}}"


class ProgramImages:
    """Puts images of a Python program into prompts for one model. Thread-safe."""

    def __init__(
        self,
        limits: Mapping[str, int] | None = None,
        domains: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """`limits`: media per prompt, by kind; `domains`: those from which images may be fetched; `changes` of the
        processor's settings: for all prompts, besides those in a prompt itself. Raises ConfigError."""
        if others := [kind for kind in limits or () if kind not in KINDS]:
            raise ConfigError(f"limit_mm_per_prompt: keys must be one of {', '.join(KINDS)}, got {others[0]!r}")
        self._changes = changes
        self._limits = ImageLimits((limits or {}).get("image", MAX_IMAGES))
        self._domains = tuple(domains)
        self._loading = threading.Lock()
        self._loaded: PromptImages | None = None

    def of_chat(
        self,
        text: str,
        parts: Sequence[Part],
        folder: str | Path,
        encode: Callable[..., Any],
        changes: Mapping[str, Any] | None = None,
    ) -> SpansPrompt:
        """Make the prompt of a chat from its rendered text. Raises RequestError or ModelError."""
        fetch = self._fetch()
        images = [image_of_any(*part, fetch) for part in parts]
        return self._shown(self._load(folder).pictured(text, images, encode, changes), text)

    def of_data(self, given: Mapping[str, Any], folder: str | Path, encode: Callable[..., Any]) -> SpansPrompt:
        """Make the prompt of an ImagesPrompt. Raises RequestError or ModelError."""
        text, data = given.get("prompt"), given.get("multi_modal_data")
        known = given.keys() <= {"prompt", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"}
        if not known or not isinstance(text, str) or not isinstance(data, Mapping):
            raise RequestError(f"a prompt with images must be {_FORM}")
        if others := sorted(map(str, data.keys() - {"image"})):
            raise RequestError(f"multi_modal_data has {others}; 'image' is all that it may have")
        several, uuids = _several(data.get("image", ())), _several((given.get("multi_modal_uuids") or {}).get("image"))
        if len(uuids) != len(several) and uuids != [None]:
            raise RequestError(f"multi_modal_uuids has {len(uuids)} for {len(several)} images; give each one, or None")
        images = []
        for place, image in enumerate(several):
            where = f"multi_modal_data['image'][{place}]"
            uuid = uuid_of(uuids[place] if len(uuids) > place else None, where)
            images.append(GivenImage(None if image is None and uuid else file_of(image, where), uuid))
        changes = given.get("mm_processor_kwargs")
        return self._shown(self._load(folder).pictured(text, images, encode, changes), text)

    def close(self) -> None:
        """End the processes that preprocess images."""
        if self._loaded is not None:
            self._loaded.pool.close()

    def _shown(self, pictured: "Pictured", text: str) -> SpansPrompt:
        return {"spans": pictured.spans, "shown_as": text}

    def _fetch(self) -> Fetch | None:
        from vllm_lite.client.media.fetch import Fetcher

        return Fetcher(self._domains) if self._domains else None

    def _load(self, folder: str | Path) -> "PromptImages":
        from vllm_lite.client.media.prompt_images import PromptImages

        with self._loading:
            if self._loaded is None:
                self._loaded = PromptImages.load(folder, self._limits, self._changes)
            if self._loaded is None:
                raise RequestError(f"the model in {folder} does not accept images")
            return self._loaded


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]
