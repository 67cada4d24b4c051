"""What several benches share."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.settings import add_flags as add_config_flags


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `serve` that are about the engine."""
    add_config_flags(parser, EngineConfig)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that were given, but the model."""
    values = {name: getattr(arguments, name) for name in EngineConfig.__struct_fields__ if name != "model"}
    return {name: value for name, value in values.items() if value is not None}


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def show(arguments: argparse.Namespace, figures: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> int:
    print(json.dumps(figures) if arguments.json else table(figures))
    return 0


def save_json(path: str, figures: dict[str, Any]) -> None:
    """Raises ConfigError if it cannot be written."""
    try:
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--output-json {path} cannot be written: {error}") from error
