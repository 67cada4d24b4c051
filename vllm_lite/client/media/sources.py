"""Sources of images: a data: URL, a web URL if allowed, or in Python also a file, bytes or a Pillow image."""

import base64
import binascii
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from vllm_lite.errors import RequestError

MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_IMAGES = 64
"""Maximum images of one prompt."""
MAX_PIXELS = 25_000_000
"""Maximum weighted pixels of an image by its header: enough for photos of 24 million pixels, or of 12 million to be
rotated, which takes twice the memory. All decoders of a server together then take less than 200 MB."""


class ImageLimits(NamedTuple):
    """Limits that an operator may set: images of one prompt, and pixels of one image before it is resized."""

    images: int = MAX_IMAGES
    pixels: int = MAX_PIXELS


MAX_UUID_CHARS = 256


class GivenImage(NamedTuple):
    """An image of a prompt: its file, and the user's name `uuid` for it, valid for one `owner`. Without a file it is an
    image sent before under this name."""

    data: bytes | None
    uuid: str = ""
    owner: str = ""


Fetch = Callable[[str, str], bytes]
"""Fetches the file at a web URL; the second argument names the content in errors."""


def file_of_url(url: Any, where: str, fetch: Fetch | None = None) -> bytes:
    """Read the file in a data: URL, or at a web URL if fetching is allowed. Raises RequestError."""
    if not isinstance(url, str):
        raise RequestError(f"{where} has an image without a URL; it must be a data: URL")
    if fetch is not None and is_of_web(url):
        return fetch(url, where)
    head, comma, body = url[:128].partition(",")
    if not head.lower().startswith("data:image/") or not comma or not head.lower().endswith(";base64"):
        shown = url[:32].split(",")[0]
        raise RequestError(f"{where} has an image at {shown!r}; it must be data:image/...;base64, followed by the file")
    del body
    return _decoded(url[len(head) + 1 :], where)


def is_of_web(url: Any) -> bool:
    return isinstance(url, str) and url[:8].lower().startswith(("http://", "https://"))


def url_of_part(part: Mapping[str, Any]) -> Any:
    """URL of the image of a content part; None if the part contains the image itself, or none."""
    source, given = part.get("source"), part.get("image_url")
    if isinstance(source, Mapping):
        return None if source.get("type") == "base64" else source.get("url")
    return given.get("url") if isinstance(given, Mapping) else given


def _decoded(text: str, where: str) -> bytes:
    if len(text) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise RequestError(f"{where} has an image of more than {MAX_FILE_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{where} has an image that is not valid base64") from None


def uuid_of(given: Any, where: str) -> str:
    """A user's name for an image; "" for none. Raises RequestError."""
    if given is None or given == "":
        return ""
    if not isinstance(given, str) or len(given) > MAX_UUID_CHARS:
        raise RequestError(f"{where} has a uuid that is not a text of at most {MAX_UUID_CHARS} characters")
    return given


def image_of_part(part: Mapping[str, Any], where: str, fetch: Fetch | None = None, owner: str = "") -> GivenImage:
    """Read the image of a content part over HTTP, or an earlier one by its uuid alone. Raises RequestError."""
    uuid = uuid_of(part.get("uuid"), where)
    if uuid and part.get("source") is None and url_of_part(part) in (None, ""):
        return GivenImage(None, uuid, owner)
    return GivenImage(file_of_part(part, where, fetch), uuid, owner)


def file_of_part(part: Mapping[str, Any], where: str, fetch: Fetch | None = None) -> bytes:
    """Read the file of a content part over HTTP: `image_url`, also as an object with a `url`, or a `source` with base64
    `data`. Raises RequestError."""
    source = part.get("source")
    if isinstance(source, Mapping) and source.get("type") == "base64" and isinstance(source.get("data"), str):
        return _decoded(source["data"], where)
    return file_of_url(url_of_part(part), where, fetch)


def image_of_any(part: Mapping[str, Any], where: str, fetch: Fetch | None = None) -> GivenImage:
    """Read the image of a content part in Python: the same as over HTTP, or with the image itself in the field `image`
    or `image_pil`. Raises RequestError."""
    given = next((part[name] for name in ("image", "image_pil") if part.get(name) is not None), None)
    if given is None:
        return image_of_part(part, where, fetch)
    return GivenImage(file_of(given, where), uuid_of(part.get("uuid"), where))


def file_of(image: Any, where: str) -> bytes:
    """Read an image given in Python: bytes, a path, a data: URL, or a Pillow image, which is converted to PNG without
    loss. Raises RequestError."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, str) and image[:5].lower() == "data:":
        return file_of_url(image, where)
    if isinstance(image, (str, Path)):
        try:
            if Path(image).stat().st_size > MAX_FILE_BYTES:
                raise RequestError(f"{where}: {image} has more than {MAX_FILE_BYTES} bytes")
            return Path(image).read_bytes()
        except OSError as error:
            raise RequestError(f"{where}: {image} cannot be read: {error.strerror}") from error
    if hasattr(image, "save") and hasattr(image, "getbands"):
        made = BytesIO()
        keeps = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
        (image if keeps else image.convert("RGB")).save(made, "PNG", compress_level=1)
        return made.getvalue()
    raise RequestError(f"{where} has an image of type {type(image).__name__}; give bytes, a path or a Pillow image")
