"""The command line: one module for each command, imported when it is called."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

from vllm_lite import __version__
from vllm_lite.errors import VllmLiteError

COMMANDS = {
    "serve": "engine, workers and an OpenAI-compatible HTTP server",
    "chat": "talk with a model in the terminal",
    "complete": "continue a text",
    "run-batch": "answer a file of requests, in OpenAI's batch format",
    "bench": "measure this machine, or a server",
    "ps": "the engines and servers of this user",
    "kill": "end some of them",
    "plan": "what a model takes, what fits beside it, and the flags for that",
    "doctor": "what is installed, what works, and what to do about the rest",
    "keys": "make the keys that engine and clients know each other by over tcp",
    "replay": "decide again what a trace says was decided",
    "why": "tell what happened to one request, and why",
}
"""Each is a module of this package with `add_flags(parser)` and `run(arguments) -> exit status`."""


class Parser(argparse.ArgumentParser):
    """One line for an error, as for every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `vllm-lite` and `python -m vllm_lite`. Returns the exit status; errors are one line on stderr."""
    words = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="vllm-lite", description="An LLM inference engine.")
    parser.add_argument("--version", action="version", version=__version__)
    add_commands(parser, __name__, COMMANDS, words[:1])
    arguments = _parse(parser, words)
    try:
        return int(arguments.run(arguments))
    except VllmLiteError as error:
        print(f"vllm-lite: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def add_commands(
    parser: argparse.ArgumentParser, package: str, commands: Mapping[str, str], wanted: Sequence[str]
) -> None:
    """Let `parser` know `commands`, modules of `package`. Only those that are `wanted` are imported and get flags."""
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in commands.items():
        command = parsers.add_parser(name, help=text, allow_abbrev=False)
        if name in wanted:
            module = import_module(f"{package}.{name.replace('-', '_')}")
            command.description = module.__doc__
            command.set_defaults(run=getattr(module, "run", None), parser=command)
            module.add_flags(command)


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """What is not known is said with the nearest flag that is."""
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        parser = getattr(arguments, "parser", parser)
        flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001
        near = get_close_matches(unknown[0].split("=")[0], flags, 1)
        parser.error(f"unknown argument {unknown[0]!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return arguments
