"""Show the engines of a running server: requests, and why they wait; KV blocks; speeds."""

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_lite.tools.top.watched import ServerLook


SPEEDS_S = 3.0
"""Timeout for two states of every engine of a server."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", "--base-url", metavar="URL", help="server, with or without /v1, or unix:PATH [http://localhost:8000]"
    )
    parser.add_argument("--api-key", help="its API key, an admin's [of VLLM_LITE_API_KEY or OPENAI_API_KEY]")
    parser.add_argument("--model", help="of a server of several models, the one whose engines are shown [all]")
    parser.add_argument("--once", action="store_true", help="print the state once, from two half a second apart")
    parser.add_argument("--json", action="store_true", help="print an object for each look, a line each")


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools.chat.remote_server import DEFAULT_URL, Address, key_from_environment

    address = Address.parse(arguments.url or DEFAULT_URL)
    asked = address, arguments.api_key or key_from_environment(), arguments.model
    if arguments.once or arguments.json or not _is_terminal():
        return _print(arguments, asked)
    from vllm_lite.tools.top.terminal import show

    show(*asked)
    return 0


def _print(arguments: argparse.Namespace, asked: Any) -> int:
    """Print states, starting with the first that has speeds."""
    from rich.console import Console

    from vllm_lite.tools.top.screen import screen
    from vllm_lite.tools.top.watched import follow, looks

    is_begun, until_s = False, time.monotonic() + SPEEDS_S
    for look in looks(follow(*asked)):
        is_begun = is_begun or look.has_speeds or time.monotonic() > until_s
        if not is_begun or not look.is_whole:
            continue
        if not arguments.json:
            console = Console(highlight=False)
            console.print(screen(look, console.height, console.width))
            return 0
        print(json.dumps(as_object(look)), flush=True)
        if arguments.once:
            return 0
    return 0


def as_object(look: "ServerLook") -> dict[str, Any]:
    """Engines by number, each with its requests and speeds, and the models of a server with several."""
    engines = {
        number: {
            **engine.head,
            "tokens_per_s": round(engine.rate("generated_tokens"), 1),
            "requests": list(engine.requests.values()),
        }
        for number, engine in look.engines.items()
    }
    several = {"models": look.models, "memory_limit_bytes": look.memory_limit_bytes} if look.models else {}
    return {"time": look.time_s, **several, "engines": engines}


def _is_terminal() -> bool:
    from rich.console import Console

    return Console().is_terminal and not Console().is_dumb_terminal
