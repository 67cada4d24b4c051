"""Images in the prompts of programs in Python. PromptImages, and Pillow with it, is loaded for the first image."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lite.client.media.sources import MAX_IMAGES, Fetch, ImageLimits, file_of, file_of_any
from vllm_lite.client.prompt import SpansPrompt
from vllm_lite.errors import RequestError

if TYPE_CHECKING:
    from vllm_lite.client.media.prompt_images import PromptImages

Part = tuple[Mapping[str, Any], str]
"""A part of a content with an image, and the name of the content."""
_FORM = "{'prompt': text, 'multi_modal_data': {'image': [image, ...]}}"


class ProgramImages:
    """Puts images of a program into prompts for one model. Safe in any thread."""

    def __init__(self, limits: Mapping[str, int] | None = None, domains: Sequence[str] = ()) -> None:
        """`limits` are by the kind of media, for a prompt; `domains` those from which images may be fetched."""
        self._limits = ImageLimits((limits or {}).get("image", MAX_IMAGES))
        self._domains = tuple(domains)
        self._loading = threading.Lock()
        self._loaded: PromptImages | None = None

    def of_chat(self, text: str, parts: Sequence[Part], folder: str | Path, encode: Callable[..., Any]) -> SpansPrompt:
        """The prompt of a chat with the text that its template has made. Raises RequestError or ModelError."""
        fetch = self._fetch()
        return self._put(text, [file_of_any(*part, fetch) for part in parts], folder, encode)

    def of_data(self, given: Mapping[str, Any], folder: str | Path, encode: Callable[..., Any]) -> SpansPrompt:
        """The prompt of an ImagesPrompt. Raises RequestError or ModelError."""
        text, data = given.get("prompt"), given.get("multi_modal_data")
        known = given.keys() <= {"prompt", "multi_modal_data"}
        if not known or not isinstance(text, str) or not isinstance(data, Mapping):
            raise RequestError(f"a prompt with images must be {_FORM}")
        if others := sorted(map(str, data.keys() - {"image"})):
            raise RequestError(f"multi_modal_data has {others}; 'image' is all that it may have")
        images = data.get("image", ())
        several = images if isinstance(images, (list, tuple)) else [images]
        files = [file_of(image, f"multi_modal_data['image'][{place}]") for place, image in enumerate(several)]
        return self._put(text, files, folder, encode)

    def close(self) -> None:
        """End the processes that cut images."""
        if self._loaded is not None:
            self._loaded.pool.close()

    def _put(self, text: str, files: Sequence[bytes], folder: str | Path, encode: Callable[..., Any]) -> SpansPrompt:
        return {"spans": self._load(folder).pictured(text, files, encode).spans, "shown_as": text}

    def _fetch(self) -> Fetch | None:
        from vllm_lite.client.media.fetch import Fetcher

        return Fetcher(self._domains) if self._domains else None

    def _load(self, folder: str | Path) -> "PromptImages":
        from vllm_lite.client.media.prompt_images import PromptImages

        with self._loading:
            if self._loaded is None:
                self._loaded = PromptImages.load(folder, self._limits)
            if self._loaded is None:
                raise RequestError(f"the model in {folder} takes no images")
            return self._loaded
