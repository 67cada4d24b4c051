"""Catalog: the models that can be requested, and their names. A faulty entry is kept with an error; others are served.

A file of models has the router's settings, `defaults` for all models, and in `models`, for each name, settings of
`serve` and of OWN:

    models_memory: 20GiB
    defaults: {kv_cache_dir: /var/cache/kv}
    models:
      chat: {model: org/chat, aliases: [gpt-4o-mini], pin: true, max_model_len: 32k}
      embed: {model: /models/minilm, idle_s: 600}
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from vllm_lite.checkpoint.gguf.files import first_files
from vllm_lite.checkpoint.hub import is_hub_id
from vllm_lite.checkpoint.hub_cache import cached_models
from vllm_lite.config import DEMO_MODEL
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.settings_sources import read_file
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.generation import LATEST
from vllm_lite.server.router.config import OWN as OWN_OF_ROUTER

HUB = "hub"
MAX_MODELS = 1000
MAX_NAME_CHARS = 200
OWN = ("aliases", "pin", "idle_s")
"""Settings of an entry that `serve` does not have."""
_OF_ROUTER = frozenset(
    {
        *("model", "served_model_name", "address"),
        *("host", "port", "uds", "root_path", "header_timeout_s", "write_timeout_s"),
        *("api_key", "api_key_file", "admin_api_key", "admin_api_key_file"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
        *("public_metrics", "public_docs", "disable_fastapi_docs"),
        *("allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    }
)
"""Settings of `serve` that apply to the router: models do not inherit them from the command line."""
_NOT_IN_ENTRIES = _OF_ROUTER - {"model", "api_key", "api_key_file"}
_NAME = re.compile(r"[\w][\w./:@+-]*")


@dataclass
class Entry:
    """A model of the catalog. `config` is None if `trouble` says why it cannot be served."""

    name: str
    config: ServeConfig | None
    aliases: tuple[str, ...] = ()
    pin: bool = False
    idle_s: float | None = None
    trouble: str | None = None
    is_from_hub: bool = False
    """Whether the model is in the hub's cache and in the catalog by its hub id, so that deleting it may remove its
    files."""
    is_added: bool = False
    """Whether the entry was added at run time, as a copy."""
    adapters: tuple[str, ...] = ()
    """Names of loaded adapters by which the model is requested."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases


class EntrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an entry in addition to those of `serve`."""

    aliases: tuple[str, ...] = ()
    pin: bool = False
    idle_s: float | None = None


@dataclass
class Catalog:
    """Entries by name, in the order of lists; every alias belongs to one entry."""

    entries: dict[str, Entry] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    """Base settings of every model."""

    def add(self, entry: Entry) -> None:
        """Add an entry. Raises ConfigError for a name that is taken or malformed."""
        for name in entry.names:
            if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
                raise ConfigError(f"{name!r} is not a name of a model: letters, digits and . _ - / : @ + make one")
            if (other := self.find(name)) is not None:
                raise ConfigError(f"the name {name!r} is that of the model {other.name!r} already")
        if len(self.entries) >= MAX_MODELS:
            raise ConfigError(f"at most {MAX_MODELS} models are served")
        self.entries[entry.name] = entry

    def find(self, name: str) -> Entry | None:
        """Find the entry by name, alias or adapter, with or without Ollama's default tag."""
        for wanted in dict.fromkeys((name, name.removesuffix(LATEST))):
            named = self.entries.get(wanted)
            if named is not None and named.trouble is None:
                return named
            for entry in self.entries.values():
                if entry.trouble is None and wanted in (*entry.aliases, *entry.adapters):
                    return entry
            if named is not None:
                return named
        return None

    def entry(self, name: str, values: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Entry:
        """Make the entry of a model from its settings, which override the base settings. An error becomes its
        `trouble`."""
        try:
            settings = msgspec.convert(dict(own or {}), EntrySettings, strict=False)
        except msgspec.ValidationError as error:
            return Entry(name, None, trouble=f"{name}: {str(error).replace('`$.', '`')}")
        try:
            config = self._config(name, values, settings.aliases)
        except ConfigError as error:
            return Entry(name, None, settings.aliases, trouble=f"{name}: {error}")
        adapters = tuple(module.name for module in config.lora_modules)
        return Entry(name, config, settings.aliases, settings.pin, settings.idle_s, adapters=adapters)

    def _config(self, name: str, values: Mapping[str, Any], aliases: tuple[str, ...]) -> ServeConfig:
        """Make and check the config of one model. Raises ConfigError."""
        given = {key.replace("-", "_"): value for key, value in values.items()}
        if wrong := sorted(given.keys() & _NOT_IN_ENTRIES):
            raise ConfigError(f"{wrong[0]} is a setting of the router, not of one model; give it to `serve`")
        merged = {**self.base, **given, "served_model_name": served_names(name, *aliases)}
        config = ServeConfig.load(merged, env={})
        if not (Path(config.model).exists() or is_hub_id(config.model) or config.model == DEMO_MODEL):
            raise ConfigError(f"model {config.model!r} is neither a folder or file here nor a hub id like org/model")
        return config


def served_names(*names: str) -> str:
    """Names that a model's own server accepts: like `find`, also with Ollama's default tag."""
    return " ".join((*names, *(name + LATEST for name in names if ":" not in name)))


def base_settings(front: ServeConfig) -> dict[str, Any]:
    """Settings of the command line that all models inherit."""
    fields = {*ServeConfig.__struct_fields__} - {*_OF_ROUTER}
    given = {name: value for name, value in front.changed().items() if name in fields}
    plain: dict[str, Any] = msgspec.to_builtins(given)
    return plain


def read_catalog(source: str, front: ServeConfig) -> tuple[Catalog, dict[str, Any]]:
    """Read the models of a file, a folder or the hub's cache. Returns them, and the router's settings in the file.
    Raises ConfigError if there are none, or if the whole file is invalid."""
    catalog, path = Catalog(base=base_settings(front)), Path(source)
    of_router: dict[str, Any] = {}
    entries: Iterable[Entry]
    if source == HUB:
        entries = _of_hub(catalog)
    elif path.is_dir():
        entries = _of_folder(catalog, path)
    elif path.is_file():
        of_router, entries = _of_file(catalog, path)
    else:
        raise ConfigError(f"models {source!r} is neither a file nor a folder; give one, or `{HUB}` for the hub's cache")
    for entry in entries:
        try:
            catalog.add(entry)
        except ConfigError as error:
            if entry.name not in catalog.entries:
                catalog.entries[entry.name] = Entry(entry.name, None, trouble=str(error))
    if not catalog.entries and source != HUB:
        raise ConfigError(f"models {source!r} holds no model: folders with a config.json, or GGUF files")
    return catalog, of_router


def _of_hub(catalog: Catalog) -> Iterator[Entry]:
    for model in cached_models():
        if model.is_whole:
            yield hub_entry(catalog, model.name)


def hub_entry(catalog: Catalog, name: str) -> Entry:
    """The entry of a model whose name is its hub id."""
    entry = catalog.entry(name, {"model": name})
    entry.is_from_hub = True
    return entry


def _of_folder(catalog: Catalog, folder: Path) -> Iterator[Entry]:
    """Yield an entry for each GGUF file and each folder with a config.json or GGUF files, up to two levels deep."""
    for name in first_files([file.name for file in folder.iterdir() if file.is_file()]):
        yield catalog.entry(re.sub(r"-\d{5}-of-\d{5}$", "", name[: -len(".gguf")]), {"model": str(folder / name)})
    for inner in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if _is_model(inner):
            yield catalog.entry(inner.name, {"model": str(inner)})
            continue
        for deeper in sorted(path for path in inner.iterdir() if path.is_dir() and _is_model(path)):
            yield catalog.entry(f"{inner.name}/{deeper.name}", {"model": str(deeper)})


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def _of_file(catalog: Catalog, path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """Read a file of models: the router's settings, and the entries. Raises ConfigError."""
    values = {key.replace("-", "_"): value for key, value in read_file(path).items()}
    models, defaults = values.pop("models", None), values.pop("defaults", None) or {}
    if not isinstance(models, dict) or not isinstance(defaults, dict):
        raise ConfigError(f"{path}: `models` must be a table of models by their names, and `defaults` one of settings")
    if unknown := sorted(values.keys() - set(OWN_OF_ROUTER)):
        raise ConfigError(f"{path}: unknown setting {unknown[0]!r}; settings of all models belong under `defaults`")
    catalog.base |= {key.replace("-", "_"): value for key, value in defaults.items()}
    return values, [_of_table(catalog, str(name), settings) for name, settings in models.items()]


def _of_table(catalog: Catalog, name: str, settings: Any) -> Entry:
    if isinstance(settings, str):
        settings = {"model": settings}
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), str):
        return Entry(name, None, trouble=f"{name}: has no `model`: a folder, a GGUF file or a hub id")
    own = {key.replace("-", "_"): value for key, value in settings.items() if key.replace("-", "_") in OWN}
    values = {key: value for key, value in settings.items() if key.replace("-", "_") not in OWN}
    return catalog.entry(name, values, own)
