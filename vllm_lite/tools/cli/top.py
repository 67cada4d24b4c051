"""Show what the engines of a running server do: requests, and why they wait; KV blocks; speeds."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_lite.tools.top.watched import ServerLook


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", "--base-url", metavar="URL", help="server, with or without /v1, or unix:PATH [http://localhost:8000]"
    )
    parser.add_argument("--api-key", help="its API key, an admin's [of VLLM_LITE_API_KEY or OPENAI_API_KEY]")
    parser.add_argument("--once", action="store_true", help="two looks, half a second apart, printed once")
    parser.add_argument("--json", action="store_true", help="print an object for each look, a line each")


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools.chat.remote_server import DEFAULT_URL, Address, key_from_environment
    from vllm_lite.tools.top.watched import follow

    address = Address.parse(arguments.url or DEFAULT_URL)
    looks = follow(address, arguments.api_key or key_from_environment())
    next(looks)  # speeds are between two
    if arguments.json:
        for watched in looks:
            print(json.dumps(as_object(watched)), flush=True)
            if arguments.once:
                return 0
    if arguments.once or not sys.stdout.isatty():
        _print_once(next(looks))
    else:
        _show(looks)
    return 0


def as_object(watched: "ServerLook") -> dict[str, Any]:
    """The engines by their numbers, each with its requests and its speeds."""
    return {
        number: {
            **engine.head,
            "tokens_per_s": round(engine.rate("generated_tokens"), 1),
            "requests": list(engine.requests.values()),
        }
        for number, engine in watched.engines.items()
    }


def _print_once(watched: "ServerLook") -> None:
    from rich.console import Console

    from vllm_lite.tools.top.screen import screen

    console = Console(highlight=False)
    console.print(screen(watched, console.height, console.width))


def _show(looks: "Iterator[ServerLook]") -> None:
    """Draw each look over the one before, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from vllm_lite.tools.top.screen import screen

    console = Console(highlight=False)
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        for watched in looks:
            live.update(screen(watched, console.height, console.width), refresh=True)
