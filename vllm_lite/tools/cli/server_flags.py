"""Flags of the commands that use a server: which server, and the sampling params."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_lite.errors import ConfigError

if TYPE_CHECKING:
    from vllm_lite.server.config import ServeConfig
    from vllm_lite.tools.chat.remote_server import RemoteServer

SAMPLING = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "seed": int}


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", "--base-url", metavar="URL", help="server, with or without /v1, or unix:PATH [http://localhost:8000]"
    )
    parser.add_argument("--api-key", help="its API key [of VLLM_LITE_API_KEY or OPENAI_API_KEY]")
    parser.add_argument("--model-name", metavar="NAME", help="model to ask for [the server's first]")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for sampling, and for a private server."""
    for name, kind in SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be repeated")
    parser.add_argument(
        "--structured-outputs", type=_object, metavar="JSON", help="""form of an answer: '{"choice": ["yes", "no"]}'"""
    )
    parser.add_argument("--config", metavar="FILE", help="settings of a server of its own, as for serve")


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling params given as flags. Raises ConfigError for a number that JSON cannot hold."""
    values = {name: getattr(arguments, name) for name in (*SAMPLING, "stop", "structured_outputs")}
    for name, value in values.items():
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} must be a finite number, got {value}")
    return {name: value for name, value in values.items() if value is not None}


def mild_defaults(arguments: argparse.Namespace, remote: "RemoteServer") -> str:
    """Set lower-temperature defaults on `remote` if neither the model nor the user sets sampling params. Returns the
    sentence that says so, or ""."""
    if {"temperature", "top_p", "top_k"} & sampling(arguments).keys():
        return ""
    taken = remote.take_mild_defaults()
    shown = ", ".join(f"{name} {value:g}" for name, value in taken.items())
    return f"the model does not say how to sample it: {shown}" if taken else ""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"it must be JSON, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"it must be a JSON object, got {text!r}")
    return value


@contextmanager
def server(arguments: argparse.Namespace, load: Callable[[], "ServeConfig"] | None) -> Iterator["RemoteServer"]:
    """The running server or, with `load`, a private one that ends with the block. Raises VllmLiteError."""
    from vllm_lite.tools.chat.remote_server import DEFAULT_URL, RemoteServer, key_from_environment

    if load is None:
        key = arguments.api_key or key_from_environment()
        with RemoteServer(arguments.url or DEFAULT_URL, key, arguments.model_name) as remote:
            yield remote
        return
    if arguments.url is not None:
        raise ConfigError("give either a model, for a server of its own, or --url of one that is running")
    from vllm_lite.tools.chat.private_server import PrivateServer

    config = load()
    with ExitStack() as stack:
        with _starting(config.model) as show:
            own = stack.enter_context(PrivateServer(config, show))
        yield stack.enter_context(RemoteServer(own.url, None, arguments.model_name, own.reason))


def private_config(arguments: argparse.Namespace) -> Callable[[], "ServeConfig"] | None:
    """A function that loads the config of a private server; None without MODEL."""
    if arguments.folder is None:
        if arguments.config is not None:
            raise ConfigError("--config is for a private server; give a model as well")
        return None

    from vllm_lite.server.config import ServeConfig
    from vllm_lite.tools.cli.vllm_flags import say

    return lambda: ServeConfig.load({"model": arguments.folder}, file=arguments.config, notice=say)


@contextmanager
def _starting(model: str) -> Iterator[Callable[[float], None]]:
    """On a terminal, show a line with the elapsed seconds."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    name = os.path.basename(model.rstrip("/"))
    shown = ""

    def show(elapsed_s: float) -> None:
        nonlocal shown
        before, shown = shown, f"\rstarting {name}: {elapsed_s:.1f} s"
        if shown != before:
            print(shown, end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
