"""Settings: a frozen struct whose values come from a file, the environment and flags; unknown keys are errors.

Every field's description is its help text; flags, environment variables (VLLM_LITE_<FIELD>) and file keys carry the
field's name.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import msgspec

from vllm_lite.errors import ConfigError

ENV_PREFIX = "VLLM_LITE_"
SHORT_FLAGS = {
    "tensor_parallel_size": "-tp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
    "api_server_count": "-asc",
    "enable_expert_parallel": "-ep",
    "speculative_config": "-sc",
}
ALIASES = {
    "kv_offloading_size": "swap_space",
    "cuda_graph_sizes": "cudagraph_capture_sizes",
    "override_pooler_config": "pooler_config",
    "device_memory_utilization": "gpu_memory_utilization",
    "watermark": "kv_watermark",
}
"""Other names of settings, which other engines give them."""
VLLM_VARIABLES = {"VLLM_API_KEY": "api_key"}
"""vLLM's, where the project's own is not set: a server that was closed with it must not be open here."""
VALUE_ALIASES = {"dtype": {"half": "float16", "float": "float32"}}
"""Other names of their values."""
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "array": "a list",
    "object": "a JSON object",
}
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class Section(str):
    """Stands in the annotation of the first field of a group, whose title it is in --help."""

    __slots__ = ()


def about(text: str, **bounds: Any) -> msgspec.Meta:
    """Stands in a field's annotation: its help text, and the bounds of its values."""
    return msgspec.Meta(description=text, **bounds)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of the configs, which add the fields."""

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        file: str | Path | None = None,
    ) -> Self:
        """Layer file < env < flags and check the result. `env` defaults to os.environ. Raises ConfigError."""
        values: dict[str, Any] = {}
        if file is not None:
            values |= _canonical(_read_file(Path(file)))
        values |= _canonical(_read_env(os.environ if env is None else env, cls.__struct_fields__))
        values |= _canonical({name: value for name, value in (flags or {}).items() if value is not None})
        return cls.check(values)

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from plain values; strings such as "32k" or "true" are read as their field wants them."""
        known = set(cls.__struct_fields__)
        values = _canonical(values)
        for name in values:
            if name not in known:
                near = get_close_matches(name, known, 1)
                raise ConfigError(f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        hints = get_type_hints(cls, include_extras=True)
        plain = {name: _plain(name, value, hints[name]) for name, value in values.items()}
        try:
            return msgspec.convert(plain, cls, strict=False)
        except msgspec.ValidationError as error:
            match = re.search(r"`\$\.(\w+)([.\w]*)", str(error))
            name, within = match.groups() if match else ("", "")
            what = _sentence(str(error).split(" - at ")[0], _hint_within(hints.get(name), within))
            raise ConfigError(f"{name}{within}: {what}, got {values[name]!r}" if name in values else what) from error


def add_flags(parser: argparse._ActionsContainer, kind: type[Settings], only: Collection[str] | None = None) -> None:
    """Add one flag per field, or per field in `only`, in groups; an unset flag is None, so that file and environment
    show through."""
    hints = get_type_hints(kind, include_extras=True)
    group = parser
    for field in msgspec.structs.fields(kind):
        if only is not None and field.name not in only:
            continue
        hint = hints[field.name]
        for title in (extra for extra in get_args(hint)[1:] if isinstance(extra, Section)):
            group = parser.add_argument_group(title)
        names = [field.name, *(alias for alias, name in ALIASES.items() if name == field.name)]
        flags = ["--" + name.replace("_", "-") for name in names]
        flags += [SHORT_FLAGS[field.name]] if field.name in SHORT_FLAGS else []
        text = _description(hint) + _default(field.default)
        if bool in _types(hint):
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            more: dict[str, Any] = {"nargs": "+"} if field.name == "served_model_name" else {}
            if tuple in _types(hint):
                more = {"action": "append"}
            if _reader(hint) is not None:
                more = {"action": "extend", "nargs": "+"}
            group.add_argument(*flags, dest=field.name, metavar=_metavar(field.name, hint), help=text, **more)


def _default(value: Any) -> str:
    """How --help shows a default; one that says nothing is left out."""
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return "" if shown in (None, "") else f" [{shown}]"


def _metavar(name: str, hint: Any) -> str:
    """How --help shows a flag's value: all values of a fixed set, N for a whole number, else the name's last part."""
    if Literal in _types(hint):
        return "{" + ",".join(_choices(hint)) + "}"
    return "N" if int in _types(hint) else name.rsplit("_", 1)[-1].upper()


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    named = {ALIASES.get(name, name): value for name, value in values.items()}
    for name, others in VALUE_ALIASES.items():
        if isinstance(value := named.get(name), str):
            named[name] = others.get(value, value)
    return named


def _types(hint: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation: of `Annotated[tuple[int, ...] | None, ...]` they are tuple and NoneType."""
    if get_origin(hint) is Annotated:
        return _types(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _types(part))
    return (get_origin(hint) or hint,)


def _choices(hint: Any) -> tuple[str, ...]:
    """The values that a field of a fixed set may have."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return tuple(
        choice for part in get_args(kind) for choice in (get_args(part) or (part,)) if choice is not type(None)
    )


def _hint_within(hint: Any, within: str) -> Any:
    """The annotation of the field `.name` of a struct whose annotation is `hint`; `hint` itself for ""."""
    for name in within.split(".")[1:]:
        struct = next(kind for kind in _types(hint) if isinstance(kind, type) and issubclass(kind, msgspec.Struct))
        hint = get_type_hints(struct, include_extras=True)[name]
    return hint


def _sentence(what: str, hint: Any) -> str:
    """msgspec's message about a value that should be a `hint`, in the words of all other errors."""
    if what.startswith("Invalid enum value"):
        return f"must be one of {', '.join(_choices(hint))}"
    match = re.fullmatch(r"Expected `(\w+)[^`]*`(?: (<=|>=|<|>) (\S+?))?(?:, got `\w+`)?", what)
    if match is None or match[1] not in _KINDS:
        return what
    return f"must be {_BOUNDS[match[2]]} {match[3].removesuffix('.0')}" if match[2] else f"must be {_KINDS[match[1]]}"


def _description(hint: Any) -> str:
    return next((meta.description for meta in get_args(hint)[1:] if getattr(meta, "description", None)), "")


def _plain(name: str, value: Any, hint: Any) -> Any:
    """Read "32k", "1.5M" as integers, "1,2,4" as several and "none" as unset; other values pass through.

    A setting that is a text and nothing else cannot be unset: there "none" is a word.
    """
    kinds = _types(hint)
    if (read := _reader(hint)) is not None:
        return _read_each(name, value, read)
    if tuple in kinds and value not in (None, [], ()) and not "".join(map(str, value)).strip():
        raise ConfigError(f"{name} is empty; give a value, or leave it out")
    if isinstance(value, list) and (tuple in kinds or name == "served_model_name"):
        value = " ".join(map(str, value))
    if not isinstance(value, str):
        return value
    is_unset = value.lower() in ("none", "null") and kinds != (str,)
    if is_unset or (name == "max_model_len" and value == "auto"):
        return None  # auto: the engine serves what its KV cache holds
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", value)
    if match and str not in kinds and tuple not in kinds:
        return int(float(match.group(1)) * _SUFFIXES[match.group(2)])
    if value.startswith(("{", "[")) and str not in kinds:
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name}: not valid JSON ({error}), got {value!r}") from error
    return value.replace(",", " ").split() if tuple in kinds else value


def _reader(hint: Any) -> Callable[[str], Any] | None:
    """The `from_text` of the structs that a field has several of, where they are more than words."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    element = next(iter(get_args(kind)), None) if get_origin(kind) is tuple else None
    return getattr(element, "from_text", None)


def _read_each(name: str, value: Any, read: Callable[[str], Any]) -> Any:
    """The values of such a field: texts, each of which `read` takes, or what a file has in their place."""
    if isinstance(value, str):
        stripped = value.strip()
        if stripped.startswith("["):
            try:
                return msgspec.json.decode(stripped)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{name}: not valid JSON ({error}), got {value!r}") from error
        value = [stripped] if stripped.startswith("{") else stripped.split()
    if not isinstance(value, list | tuple):
        return value
    try:
        return [
            msgspec.to_builtins(read(item)) if isinstance(item, str) else msgspec.to_builtins(item) for item in value
        ]
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _read_env(env: Mapping[str, str], fields: Sequence[str]) -> dict[str, Any]:
    names = (*fields, *ALIASES)
    others = {name: env[variable] for variable, name in VLLM_VARIABLES.items() if name in fields and variable in env}
    return others | {name: env[ENV_PREFIX + name.upper()] for name in names if ENV_PREFIX + name.upper() in env}


def _read_file(path: Path) -> dict[str, Any]:
    """A flat YAML or TOML file; keys may be written with - or _."""
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = msgspec.yaml.decode(text)
        else:
            raise ConfigError(f"a config file ends in .yaml, .yml or .toml, got {str(path)!r}")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {str(path)!r} must hold settings as `name: value`")
    return {str(name).replace("-", "_"): value for name, value in values.items()}
