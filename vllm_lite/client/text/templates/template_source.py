"""Finds the source of a chat template: in the checkpoint's folder, in a file, or in a flag.

A checkpoint has one template, or several with names. `default` is the usual one; chats with tools use `tool_use` if
there is one. Files take precedence over tokenizer_config.json, as in transformers:

chat_template.jinja                 default
additional_chat_templates/*.jinja   the others, by their file names
chat_template.json                  {"chat_template": default}, as older processors wrote it
tokenizer_config.json               "chat_template": the default, or a list of {"name": ..., "template": ...}
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vllm_lite.client.text.tokenizer_formats import conversion
from vllm_lite.errors import ModelError
from vllm_lite.runtime import log
from vllm_lite.runtime.untrusted_files import read_bounded

TEMPLATE_FILE = "chat_template.jinja"
OLD_TEMPLATE_FILE = "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"
CONFIG_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
DEFAULT, TOOL_USE = "default", "tool_use"
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_TEMPLATES = 64
"""Maximum number of a checkpoint's templates that are read."""

_TOOLS = re.compile(r"\btools\b")

logger = log.get(__name__)


class TemplateSource(msgspec.Struct, frozen=True):
    """A template's Jinja text, the special tokens that it may name, and what errors call it.

    `for_tools` is the text of another template that chats with tools get; None means the same.
    """

    source: str
    special_tokens: dict[str, str] = {}
    name: str = "template"
    for_tools: str | None = None

    @property
    def texts(self) -> str:
        """Both texts, for a search for literals."""
        return self.source + (self.for_tools or "")

    @property
    def takes_tools(self) -> bool:
        """Whether the template for chats with tools uses the variable `tools`; otherwise the model would not see
        any."""
        return _TOOLS.search(self.source if self.for_tools is None else self.for_tools) is not None

    @classmethod
    def load(cls, folder: str | Path, template: str | Path | None = None) -> "TemplateSource | None":
        """Find the template of the checkpoint in `folder`, or take `template`: the name of one of the checkpoint's,
        Jinja, or a file with it. The special tokens are the checkpoint's; those that only its converted tokenizer
        names count as well. None if there is no template. Raises ModelError."""
        tokens: dict[str, str] = {}
        named: dict[str, _Named] = {}
        for place in (*conversion.made(folder), Path(folder)):
            config = read_json(place / CONFIG_FILE)
            tokens |= _special_tokens(place, config)
            named |= _named(place, config)
        if template is None:
            return _checked(_chosen(Path(folder), named, tokens))
        if str(template) in named:
            text, name = named[str(template)]
            return _checked(cls(text, tokens, name))
        if isinstance(template, str) and any(mark in template for mark in ("{{", "{%")):
            return _checked(cls(template, tokens))
        try:
            return _checked(cls(_text(Path(template)), tokens, str(template)))
        except ModelError as error:
            names = f", nor the name of one of the model's, which are {', '.join(named)}" if named else ""
            raise ModelError(f"{error}: it is not a file with a chat template{names}") from error


def special_tokens(folder: str | Path) -> dict[str, str]:
    """Read the texts of the special tokens of the checkpoint in `folder` by their names, such as eos_token. Raises
    ModelError."""
    tokens: dict[str, str] = {}
    for place in (*conversion.made(folder), Path(folder)):
        tokens |= _special_tokens(place, read_json(place / CONFIG_FILE))
    return tokens


class _Named(NamedTuple):
    """A template's Jinja text, and what errors call it."""

    text: str
    name: str


def _chosen(folder: Path, named: Mapping[str, _Named], tokens: dict[str, str]) -> TemplateSource | None:
    """The templates that are used if the user names none."""
    if not named:
        return None
    if DEFAULT not in named and len(named) > 1:
        logger.warning(
            "%s has several chat templates and none is the default; name one with --chat-template: %s",
            folder,
            ", ".join(named),
        )
        return None
    usual = named.get(DEFAULT) or next(iter(named.values()))
    for_tools = named.get(TOOL_USE, usual)
    return TemplateSource(usual.text, tokens, usual.name, None if for_tools is usual else for_tools.text)


def _checked(found: TemplateSource | None) -> TemplateSource | None:
    for text in () if found is None else (found.source, found.for_tools or ""):
        if len(text) > MAX_TEMPLATE_BYTES and found is not None:
            size, most = len(text), MAX_TEMPLATE_BYTES
            raise ModelError(f"{found.name}: the chat template has {size} characters; at most {most} are read")
    return found


# ---- the files


def _named(folder: Path, config: Mapping[str, Any]) -> dict[str, _Named]:
    """The templates of a folder by name; a file takes precedence over the config."""
    path = folder / CONFIG_FILE
    named = {name: _Named(text, str(path)) for name, text in _entries(config.get("chat_template"))}
    old = folder / OLD_TEMPLATE_FILE
    named |= {name: _Named(text, str(old)) for name, text in _entries(read_json(old).get("chat_template"))}
    for path in islice(sorted((folder / MORE_TEMPLATES).glob("*.jinja")), MAX_TEMPLATES):
        named[path.stem] = _Named(_text(path), str(path))
    if (folder / TEMPLATE_FILE).is_file():
        named[DEFAULT] = _Named(_text(folder / TEMPLATE_FILE), str(folder / TEMPLATE_FILE))
    return named


def _entries(given: Any) -> Iterator[tuple[str, str]]:
    """Name and text of each template in a config, which has a text, a list of objects, or an object."""
    items: Iterable[tuple[Any, Any]] = [(DEFAULT, given)]
    if isinstance(given, dict):
        items = given.items()
    elif isinstance(given, list):
        items = [(item.get("name"), item.get("template")) for item in given if isinstance(item, dict)]
    for name, text in islice(items, MAX_TEMPLATES):
        if isinstance(name, str) and isinstance(text, str):
            yield name, text


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer's config: texts, or objects with a text. A special_tokens_map.json takes
    precedence, unless the config is of the newer kind, which lists all added tokens."""
    tokens = _texts(config)
    return tokens if "added_tokens_decoder" in config else tokens | _texts(read_json(folder / TOKENS_FILE))


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} for a file that does not exist."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _text(path: Path) -> str:
    return _read(path).decode(errors="replace")


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
