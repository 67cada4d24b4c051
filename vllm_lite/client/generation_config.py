"""Sampling defaults: the recommendations of a checkpoint's generation_config.json, and the user's overrides.

Names and file format are those of transformers' GenerationConfig. A GGUF file's metadata replace a missing file.
`do_sample` is ignored, as in vLLM: many files have false, or nothing, beside a recommended temperature. A request
without a temperature samples.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from vllm_lite.checkpoint.gguf.files import gguf_files
from vllm_lite.checkpoint.gguf.header import read_metadata
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.runtime import log
from vllm_lite.runtime.untrusted_files import read_bounded

FILE = "generation_config.json"
AUTO, NONE = "auto", "vllm"
"""Sources that are not paths: the checkpoint's own file, and no file."""
MAX_FILE_BYTES = 1024 * 1024
GGUF_KEY = "general.sampling."
GGUF_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Entry -> its name in a GGUF file."""

logger = log.get(__name__)


class GenerationOverrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The supported entries of a generation_config.json. None removes the file's value."""

    repetition_penalty: float | UnsetType | None = UNSET
    temperature: float | UnsetType | None = UNSET
    top_k: int | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET
    min_p: float | UnsetType | None = UNSET
    max_new_tokens: int | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        _params(self.given())

    def given(self) -> dict[str, Any]:
        """The entries that are set, None included."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET}


class GenerationDefaults(NamedTuple):
    """Sampling defaults of requests.

    `params` are fields of SamplingParams. `max_tokens` limits every request; None: no limit. A checkpoint's own
    max_new_tokens is a recommendation, one that the user sets is a limit. `because` names the sources.
    """

    params: dict[str, Any]
    max_tokens: int | None
    because: str

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:g}" for name, value in self.params.items()) or "none"
        limit = "" if self.max_tokens is None else f"; no request gets more than {self.max_tokens} tokens"
        return f"{shown} ({self.because}){limit}"


def check_source(source: str) -> None:
    """Raise ValueError unless `source` is "auto", "vllm", a file or a folder with one."""
    if source not in (AUTO, NONE) and not _file(source).is_file():
        raise ValueError(
            f"generation_config must be one of {AUTO}, {NONE}, or a folder with a {FILE}, got {source!r}, where there "
            "is none"
        )


def read_overrides(given: Any) -> GenerationOverrides | None:
    """Convert a Python caller's dict or None. Raises ConfigError."""
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"override_generation_config must be a dict, got {given!r}")
    try:
        return msgspec.convert(given, GenerationOverrides | None)
    except msgspec.ValidationError as error:
        raise ConfigError(f"override_generation_config: {error}, got {given!r}") from error


def generation_defaults(
    folder: str | Path, source: str = AUTO, overrides: GenerationOverrides | None = None
) -> GenerationDefaults:
    """Read the defaults for the checkpoint in `folder`: of `source`, changed by `overrides`. Raises ModelError."""
    path = None if source == NONE else Path(folder) / FILE if source == AUTO else _file(source)
    given = {} if path is None else _read(path)
    if source == AUTO and not given and (files := gguf_files(Path(folder))):
        path, given = files[0], _of_gguf(files[0])
    try:
        params = _params(given)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path}: {error}; correct it, or ignore it with generation_config 'vllm'") from error
    above = {} if overrides is None else overrides.given()
    params = _params({**given, **above})
    is_limit = "max_new_tokens" in above or source not in (AUTO, NONE)
    parts = [str(path)] if given else []
    parts += ["override_generation_config"] if above else []
    found = GenerationDefaults(params, params.get("max_tokens") if is_limit else None, " and ".join(parts) or "vllm")
    if params:
        logger.info("sampling defaults: %s; generation_config 'vllm' ignores the model's", found)
    _warn_of_greedy(given, params)
    return found


def _warn_of_greedy(given: dict[str, Any], params: dict[str, Any]) -> None:
    if given.get("do_sample") is False and params.get("temperature", 1.0):
        logger.warning(
            "%s says do_sample false, which is not followed: requests without a temperature are sampled; "
            "--override-generation-config '{\"temperature\": 0}' makes them greedy",
            FILE,
        )


def _file(source: str) -> Path:
    path = Path(source)
    return path / FILE if path.is_dir() else path


def _read(path: Path) -> dict[str, Any]:
    """Read a file's supported entries, and do_sample; {} if there is no file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        given = msgspec.json.decode(read_bounded(path, MAX_FILE_BYTES), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}; correct it, or ignore it with generation_config 'vllm'") from error
    followed = (*GenerationOverrides.__struct_fields__, "do_sample")
    return {name: given[name] for name in followed if given.get(name) is not None}


def _of_gguf(file: Path) -> dict[str, Any]:
    """Read a GGUF file's supported entries, under the names of a generation_config.json. Raises ModelError."""
    values = read_metadata(file)
    found = {name: values.get(f"{GGUF_KEY}{key}") for name, key in GGUF_KEYS.items()}
    # a file has float32, whose 0.95 is 0.949999988
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None
    }


def _params(given: dict[str, Any]) -> dict[str, Any]:
    """Convert entries to fields of SamplingParams, which checks them: raises ValueError or TypeError."""
    from vllm_lite.protocol.params import SamplingParams  # takes 20 ms, and a command that only reads settings has none

    names = {name: name for name in GenerationOverrides.__struct_fields__} | {"max_new_tokens": "max_tokens"}
    params = {names[name]: value for name, value in given.items() if name in names and value is not None}
    try:
        SamplingParams(**params)
    except (ValueError, TypeError) as error:
        raise type(error)(str(error).replace("max_tokens", "max_new_tokens")) from error
    return params
