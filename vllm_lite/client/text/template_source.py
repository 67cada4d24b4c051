"""Where a chat template lies: in the checkpoint's folder, in a file, or in what the user wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_lite.errors import ModelError

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024


class TemplateSource(msgspec.Struct, frozen=True):
    """A template's Jinja text, the special tokens that it may name, and what errors call it."""

    source: str
    special_tokens: dict[str, str] = {}
    name: str = "template"

    @classmethod
    def load(cls, folder: str | Path, template: str | Path | None = None) -> "TemplateSource | None":
        """The template of the checkpoint in `folder`, or `template`, Jinja or a file with it, with that checkpoint's
        special tokens; None if there is none. Raises ModelError."""
        folder = Path(folder)
        config = _read_json(folder / CONFIG_FILE)
        tokens = _special_tokens(_read_json(folder / TOKENS_FILE)) | _special_tokens(config)
        if isinstance(template, str) and any(mark in template for mark in ("{{", "{%")):
            return _checked(cls(template, tokens))
        path = folder / TEMPLATE_FILE if template is None else Path(template)
        if template is not None or path.is_file():
            return _checked(cls(_read(path).decode(errors="replace"), tokens, str(path)))
        source = _default(config.get("chat_template"))
        return None if source is None else _checked(cls(source, tokens, str(folder / CONFIG_FILE)))


def _checked(found: TemplateSource) -> TemplateSource:
    if len(found.source) > MAX_TEMPLATE_BYTES:
        size, most = len(found.source), MAX_TEMPLATE_BYTES
        raise ModelError(f"{found.name}: the chat template has {size} characters; at most {most} are read")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} for a file that does not exist."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return data


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Those entries of a tokenizer's config that are tokens: texts, or objects that hold one."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str):
                found[name] = token
    return found


def _default(template: Any) -> str | None:
    """A config has one template, or several with names."""
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
