"""What several benches share."""

import argparse
import json
from collections.abc import Callable
from typing import Any

ENGINE_FLAGS = ("quantization", "kv_cache_dtype", "attention_backend", "cpu_threads", "device")
"""Fields of EngineConfig that can be given to what measures an engine."""


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="auto")
    for flag in ENGINE_FLAGS:
        parser.add_argument(f"--{flag.replace('_', '-')}", help=argparse.SUPPRESS)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig."""
    values = {name: getattr(arguments, name) for name in ("dtype", *ENGINE_FLAGS)}
    settings = {name: value for name, value in values.items() if value is not None}
    if "cpu_threads" in settings:
        settings["cpu_threads"] = int(settings["cpu_threads"])
    return settings


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def show(arguments: argparse.Namespace, figures: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> int:
    print(json.dumps(figures) if arguments.json else table(figures))
    return 0
