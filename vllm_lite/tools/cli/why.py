"""Explain what happened to a request, or which part of a prompt a running server has cached, and why."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vllm_lite.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", metavar="REQUEST", nargs="?", help="the request's id")
    parser.add_argument("file", metavar="FILE", nargs="?", help="a trace of --record; FILE.2, ... are read as well")
    parser.add_argument(
        "--prompt",
        metavar="FILE",
        help="instead of a request: a text, or the JSON body of a chat or completion; - reads standard input",
    )
    parser.add_argument(
        "--url", "--base-url", metavar="URL", help="server, with or without /v1, or unix:PATH [http://localhost:8000]"
    )
    parser.add_argument("--api-key", help="its API key, an admin's [of VLLM_LITE_API_KEY or OPENAI_API_KEY]")
    parser.add_argument("--model", help="model or adapter of the prompt [the server's first]")
    parser.add_argument("--cache-salt", help="cache_salt of the prompt [none]")
    parser.add_argument("--json", action="store_true", help="print the whole answer about a prompt")


def run(arguments: argparse.Namespace) -> int:
    if arguments.prompt is not None:
        if arguments.request is not None:
            raise ConfigError("--prompt asks a server about a prompt; give it without REQUEST and FILE")
        return _explain_prompt(arguments)
    if arguments.file is None:
        raise ConfigError("give the id of a request and the file of --record, or --prompt FILE")
    from vllm_lite.trace.reader import TraceReader
    from vllm_lite.trace.segments import segment_paths
    from vllm_lite.trace.story import story

    print("\n".join(story(arguments.request, *map(TraceReader, segment_paths(arguments.file)))))
    return 0


def _explain_prompt(arguments: argparse.Namespace) -> int:
    import httpx

    from vllm_lite.tools.chat.remote_server import (
        DEFAULT_URL,
        Address,
        check,
        key_from_environment,
        lost,
        open_client,
    )

    body = body_of(_read(arguments.prompt))
    for name, value in (("model", arguments.model), ("cache_salt", arguments.cache_salt)):
        if value is not None:
            body[name] = value
    address = Address.parse(arguments.url or DEFAULT_URL)
    with open_client(address, arguments.api_key or key_from_environment()) as client:
        try:
            answer = client.post(f"{address.base}/debug/prefix", json=body)
        except httpx.HTTPError as error:
            raise lost(address, error, None) from error
    check(address, answer.status_code, answer.content)
    found = answer.json()
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(lines(found)))
    return 0


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompt {name}: {error}") from error


def body_of(text: str) -> dict[str, Any]:
    """The body to send: `text` itself if it is a JSON object with messages or a prompt, else with it as the prompt."""
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else None
    except ValueError:
        found = None
    if isinstance(found, dict) and ("messages" in found or "prompt" in found):
        return {**found, "stream": False} if "stream_options" not in found else found
    return {"prompt": text}


def lines(found: dict[str, Any]) -> list[str]:
    """An answer for people: the sentence, runs of blocks, and both prompts around their first difference."""
    said = [found["why"]]
    for run in found["blocks"]:
        (first, end), (start, stop) = run["blocks"], run["tokens"]
        state = "hit" if run["hit"] else "miss"
        tier = "" if run["tier"] is None else f", {run['tier']}"
        said.append(f"  blocks {first:,} to {end - 1:,} (tokens {start:,} to {stop - 1:,}): {state}{tier}")
    if (difference := found["difference"]) is not None:
        sides = ("here", "there")
        said += [f"  {side + ':':6} {_shown(difference['before'], difference[side])}" for side in sides]
    return said


def _shown(before: str | None, side: dict[str, Any] | None) -> str:
    if side is None:
        return f"{before or '':} [end]"
    if side["text"] is None:
        return f"token {side['id']}"
    return repr(f"{before}>>>{side['text']}<<<{side['after']}")
