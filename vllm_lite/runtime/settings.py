"""Settings: a frozen struct whose values come from a file, the environment and flags; unknown keys are errors.

Every field's description is its help text; flags, environment variables (VLLM_LITE_<FIELD>) and file keys have the
field's name. All three sources accept the same: aliases, vLLM's settings without effect here, and no_<field> for a
switch.
"""

import argparse
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

import msgspec

from vllm_lite.choices import not_chosen
from vllm_lite.errors import ConfigError
from vllm_lite.runtime import vllm_settings, vllm_variables
from vllm_lite.runtime.settings_sources import read_env, read_file, unread

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
    "model_tag": "model",
}
"""Other engines' names of settings."""
VALUE_ALIASES = {"dtype": {"half": "float16", "float": "float32"}}
"""Other names of values, by setting."""
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
    """Annotation of the first field of a group: the group's title in --help."""

    __slots__ = ()


def about(text: str, **bounds: Any) -> msgspec.Meta:
    """Annotation of a field: its help text, and the bounds of its values."""
    return msgspec.Meta(description=text, **bounds)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of the configs, which add the fields."""

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        file: str | Path | None = None,
        *,
        of_vllm: Iterable[vllm_settings.Given] = (),
        notice: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Merge file < vLLM's variables < env < flags and check the result. `env` defaults to os.environ.

        `of_vllm` are settings of vLLM from the command line, beside those of the other sources. `notice` is called with
        each sentence about a setting without effect. Raises ConfigError.
        """
        env = os.environ if env is None else env
        given = {} if file is None else read_file(Path(file))
        below = cls._sorted_out((name, name.replace("-", "_"), value) for name, value in given.items())
        variables = cls._sorted_out(read_env(env))
        above = cls._sorted_out((name, name, value) for name, value in (flags or {}).items() if value is not None)
        own = {name: value for name, value in variables.values.items() if name not in variables.unknown} | above.values
        taken = vllm_variables.taken(env, below.values | own, frozenset(cls.__struct_fields__))
        values = below.values | {name: value for name, (_, value) in taken.items()} | own
        others = [*below.others, *vllm_variables.given(env), *variables.others, *of_vllm, *above.others]
        if text := vllm_settings.answer(others):
            notice(text)
        for variable in sorted(variables.doors[name] for name in variables.unknown):
            notice(unread(variable, (*cls.__struct_fields__, *ALIASES, *vllm_settings.known())))
        doors = {name: variable for name, (variable, _) in taken.items()} | variables.doors
        try:
            return cls.check(values)
        except ConfigError as error:
            name = re.match(r"\w*", str(error))[0]  # type: ignore[index]
            if name in doors and name not in above.values:
                raise ConfigError(f"{error} ({doors[name]})") from error
            raise

    @classmethod
    def _sorted_out(cls, given: Iterable[tuple[str, str, Any]]) -> "_Layer":
        """Sort the settings of one source, each given as (spelling, name, value). Raises ConfigError."""
        layer, hints = _Layer({}, {}, [], set()), _hints(cls)
        for door, written, given_value in given:
            name, value = ALIASES.get(written, written), given_value
            positive = ALIASES.get(name.removeprefix("no_"), name.removeprefix("no_"))
            if name not in hints and bool in _types(hints.get(positive)):
                name, value = positive, not vllm_settings.as_switch(door, value)
            if name not in hints:
                if of_vllm := vllm_settings.find(door, name, value):
                    layer.others.extend(of_vllm)
                    continue
                layer.unknown.add(name)
            if name in layer.values:
                raise ConfigError(f"{layer.doors[name]} and {door} are one setting; give one of them")
            layer.values[name], layer.doors[name] = value, door
        return layer

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from plain values; strings such as "32k" or "true" are converted to the field's type."""
        known = set(cls.__struct_fields__)
        values = _canonical(values)
        for name in values:
            if name not in known:
                near = get_close_matches(name, known, 1)
                raise ConfigError(f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        hints = _hints(cls)
        plain = {name: _plain(name, value, hints[name]) for name, value in values.items()}
        try:
            return msgspec.convert(plain, cls, strict=False)
        except msgspec.ValidationError as error:
            match = re.search(r"`\$\.(\w+)([.\w]*)", str(error))
            name, within = match.groups() if match else ("", "")
            chosen = not_chosen(error, cls)
            what = _sentence(str(error).split(" - at ")[0]) if chosen is None else chosen.wanted
            given = f", got {values[name]!r}" if name in values and ", got " not in what else ""
            raise ConfigError(f"{name}{within}: {what}{given}" if name in values else what) from error

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        defaults = type(self)()
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value != getattr(defaults, name)}


class _Layer(NamedTuple):
    """Settings of one source: values by name, the spelling of each, settings of vLLM that do not exist here, and
    unknown names."""

    values: dict[str, Any]
    doors: dict[str, str]
    others: list[vllm_settings.Given]
    unknown: set[str]


@cache
def _hints(kind: type[Settings]) -> dict[str, Any]:
    """The annotation of each field."""
    return get_type_hints(kind, include_extras=True)


def add_flags(parser: argparse._ActionsContainer, kind: type[Settings], only: Collection[str] | None = None) -> None:
    """Add one flag per field, or per field in `only`, in groups. A flag that is not given is None, so that the file's
    or environment's value applies."""
    hints = _hints(kind)
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
        if bool in _types(hint) and field.name.startswith("disable_"):  # --help does not show that this may be negated
            group.add_argument(*flags, action="store_true", default=None, help=text)
            hidden: dict[str, Any] = {"dest": field.name, "default": None, "help": argparse.SUPPRESS}
            group.add_argument(f"--no-{flags[0][2:]}", action="store_false", **hidden)
        elif bool in _types(hint):
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            more: dict[str, Any] = {"nargs": "+"} if field.name == "served_model_name" else {}
            if tuple in _types(hint):
                more = {"action": "append"}
            if _reader(hint) is not None:
                more = {"action": "extend", "nargs": "+"}
            group.add_argument(*flags, dest=field.name, metavar=_metavar(field.name, hint), help=text, **more)


def flag_of(name: str, value: Any) -> str:
    """The flag that gives a field this value, quoted for a shell."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    plain = msgspec.to_builtins(value)
    items = plain if isinstance(plain, tuple) else (plain,)
    texts = [msgspec.json.encode(item).decode() if isinstance(item, dict) else str(item) for item in items]
    if not any(isinstance(item, dict) for item in items):
        texts = [",".join(texts)]
    return " ".join([f"--{flag}", *map(shlex.quote, texts)])


def _default(value: Any) -> str:
    """A default as shown by --help; "" if it is empty."""
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return "" if shown in (None, "") else f" [{shown}]"


def _metavar(name: str, hint: Any) -> str:
    """Placeholder of a flag's value in --help: all values of a fixed set, N for an integer, else the name's last
    part."""
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
    """The alternatives of an annotation: tuple and NoneType for `Annotated[tuple[int, ...] | None, ...]`."""
    if get_origin(hint) is Annotated:
        return _types(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _types(part))
    return (get_origin(hint) or hint,)


def _choices(hint: Any) -> tuple[str, ...]:
    """The values of a Literal field."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return tuple(
        choice for part in get_args(kind) for choice in (get_args(part) or (part,)) if choice is not type(None)
    )


def _sentence(what: str) -> str:
    """msgspec's message about a value of another type, in the wording of the other errors."""
    match = re.fullmatch(r"Expected `(\w+)[^`]*`(?: (<=|>=|<|>) (\S+?))?(?:, got `\w+`)?", what)
    if match is None or match[1] not in _KINDS:
        return what
    return f"must be {_BOUNDS[match[2]]} {match[3].removesuffix('.0')}" if match[2] else f"must be {_KINDS[match[1]]}"


def _description(hint: Any) -> str:
    return next((meta.description for meta in get_args(hint)[1:] if getattr(meta, "description", None)), "")


def _plain(name: str, value: Any, hint: Any) -> Any:
    """Convert "32k" and "1.5M" to integers, "1,2,4" to several values and "none" to None; other values are unchanged.
    For a field that is always a text, "none" is a text."""
    kinds = _types(hint)
    if (read := _reader(hint)) is not None:
        return _read_each(name, value, read)
    has_texts = tuple in kinds or name in ("model", "served_model_name")
    texts = value if isinstance(value, list | tuple) else [value] if isinstance(value, str) else []
    if has_texts and texts and not "".join(map(str, texts)).strip():
        raise ConfigError(f"{name} is empty; give a value, or leave it out")
    if isinstance(value, list) and (tuple in kinds or name == "served_model_name"):
        value = " ".join(map(str, value))
    if not isinstance(value, str):
        return value
    if any("\ud800" <= letter <= "\udfff" for letter in value):  # bytes of the command line or the environment
        raise ConfigError(f"{name} must be valid UTF-8, got {value[:100]!r}")
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
    """The `from_text` of the element type, for fields that are tuples of structs; else None."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    element = next(iter(get_args(kind)), None) if get_origin(kind) is tuple else None
    return getattr(element, "from_text", None)


def _read_each(name: str, value: Any, read: Callable[[str], Any]) -> Any:
    """The values of such a field: texts, each parsed by `read`, or the values from a file."""
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
