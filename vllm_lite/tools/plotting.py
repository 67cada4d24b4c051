"""Figures of --plot: checks, and writing."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_lite.errors import ConfigError

BLUE, ORANGE, VIOLET, GREEN, DARK = "#3b6ea8", "#d9822b", "#9a4fd0", "#3a9a5c", "#222222"
DOTS_PER_INCH = 110


def check(path: str) -> None:
    """Raise ConfigError, before any measurement, unless a figure can be written to `path`."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it, or vllm-lite[plot]")
    if not path.endswith(".png"):
        raise ConfigError(f"--plot writes a PNG; its file must end in .png, got {path!r}")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error


def save(figure: Any, path: str) -> None:
    """Write a figure. Raises ConfigError if the file cannot be written."""
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
