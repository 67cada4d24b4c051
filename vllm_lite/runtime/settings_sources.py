"""Sources of settings: YAML and TOML files, and the environment. Values are neither converted nor checked."""

import re
import tomllib
from collections.abc import Collection, Hashable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vllm_lite.errors import ConfigError

ENV_PREFIX = "VLLM_LITE_"
OTHER_VARIABLES = frozenset({"VLLM_LITE_ISA", "VLLM_LITE_CACHE", "VLLM_LITE_KEYS", "VLLM_LITE_MOMENTS"})
"""Variables that are read but are not settings."""
_OF_A_SERVICE = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
_LINK = re.compile(r"(tcp|udp|sctp)://.*")


def read_file(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML or TOML file; a key with dots is a key of an object. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = _yaml(text)
        else:
            raise ConfigError(f"a config file ends in .yaml, .yml or .toml, got {str(path)!r}")
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # the decoders' errors are ValueErrors
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {str(path)!r} must hold settings as `name: value`")
    return _nested(path, values)


def _yaml(text: str) -> Any:
    """Parse YAML and refuse duplicate keys, of which one value would be lost. Raises ValueError."""
    import yaml  # not needed without a file

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            """Override where keys are collected; keys from a merge (`<<`) may be overridden."""
            lines: dict[Any, int] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    line = key.start_mark.line + 1
                    if key.value in lines:
                        raise ValueError(f"{key.value!r} is given twice, in lines {lines[key.value]} and {line}")
                    lines[key.value] = line
            return dict(super().construct_mapping(node, deep))

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a safe loader
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or error.context
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{problem}{place}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _nested(path: Path, values: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for whole, value in values.items():
        name, *keys = str(whole).split(".")
        if not keys:
            found[name] = value
            continue
        inner = found.setdefault(name, {})
        for key in keys[:-1]:
            inner = inner.setdefault(key.replace("-", "_"), {}) if isinstance(inner, dict) else inner
        if not isinstance(inner, dict) or keys[-1] in inner:
            raise ConfigError(f"config file {str(path)!r}: {whole!r} and {name!r} are one setting; give one of them")
        inner[keys[-1].replace("-", "_")] = value
    return found


def read_env(env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(variable, name of the setting, text) of each variable for this package."""
    for variable in sorted(env):
        is_ours = variable.startswith(ENV_PREFIX) and variable not in OTHER_VARIABLES
        if is_ours and not is_of_service(variable, env[variable]):
            yield variable, variable[len(ENV_PREFIX) :].lower(), env[variable]


def is_of_service(variable: str, text: str) -> bool:
    """Whether Kubernetes set the variable: for a service vllm-lite it sets VLLM_LITE_PORT=tcp://10.0.0.1:80."""
    return bool(_OF_A_SERVICE.fullmatch(variable) or (variable.endswith("_PORT") and _LINK.fullmatch(text)))


def unread(variable: str, names: Collection[str]) -> str:
    """Return the message about a variable that is not a setting."""
    near = get_close_matches(variable.removeprefix(ENV_PREFIX).lower(), names, 1)
    return f"{variable} is not read" + (f"; did you mean {ENV_PREFIX}{near[0].upper()}?" if near else "")
