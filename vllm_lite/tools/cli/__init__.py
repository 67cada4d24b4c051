"""The command line. Each command is the module of its name and is imported when it is called.

`server_flags.py` has flags shared by the commands that use a server; `bench.py` has all benchmarks, and
`bench_serve.py` the flags of the largest.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

from vllm_lite import __version__
from vllm_lite.errors import VllmLiteError
from vllm_lite.runtime.machine import has_folder
from vllm_lite.tools.cli import nested_flags

COMMANDS = {
    "serve": "engine, workers and an OpenAI-compatible HTTP server",
    "ray-serve": "the same from a Ray cluster, with replicas of the engine",
    "chat": "chat with a model in the terminal",
    "complete": "continue a text",
    "run-batch": "answer a file of requests, in OpenAI's batch format",
    "bench": "measure this machine, or a server",
    "ps": "list the engines and servers of this user",
    "top": "a live view of a server's engines: requests, KV blocks, speeds",
    "kill": "end engines and servers",
    "pull": "fetch a model from the hub",
    "list": "list the models in the hub's cache",
    "show": "show a model of the hub's cache, and whether it fits",
    "rm": "remove models from the hub's cache",
    "plan": "the memory of a model, the requests that fit beside it, and the flags for that",
    "quantize": "write a quantized checkpoint of a dense one",
    "doctor": "check the installation and this machine, with advice",
    "cache": "list or remove the KV in a --kv-cache-dir",
    "keys": "create keys for engine and clients over TCP",
    "replay": "repeat the scheduler's decisions of a trace, and compare",
    "simulate": "simulate other settings or another load, from a recording",
    "why": "explain what happened to a request",
}
"""Each command is a module of this package with `add_flags(parser)` and `run(arguments) -> exit status`."""


MAX_FLAGS_IN_USAGE = 12
ENGINE, ENGINE_EARLY = "vllm_lite.engine.process", "vllm_lite.engine.process_early"
ENDS_AT_ONCE = frozenset({"-h", "--help", "--print-config"})
"""Flags with which `serve` starts no engine."""
CLOSED_PIPE = 141
"""The exit status, by the shell's convention, of a process whose reader has gone: 128 + SIGPIPE."""
INTERRUPTED = 130
"""The same after Ctrl-C: 128 + SIGINT."""


class _Formatter(argparse.HelpFormatter):
    """Help texts whose `usage` line has only required flags if there are many."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        flags = [action for action in actions if action.option_strings and not action.required]
        if len(flags) > MAX_FLAGS_IN_USAGE:
            actions = [action for action in actions if action not in flags]
            actions.append(argparse.Action([], "flags", nargs="*", metavar="flag"))
            groups = ()
        super().add_usage(usage, actions, groups, prefix)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kinds: dict[Any, str] = {int: "N", float: "X"}
        return kinds.get(action.type) or action.dest.rsplit("_", 1)[-1].upper()


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all other errors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **settings})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Also accept single keys of JSON settings."""
        words = sys.argv[1:] if args is None else args
        try:
            words = nested_flags.joined(words, self._option_string_actions)
        except ValueError as error:
            self.error(str(error))
        return super().parse_known_args(words, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Override argparse's writing, which ignores errors: --help and --version."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Override argparse's check of `choices`, for its message."""
        choices = [str(choice) for choice in action.choices or ()]
        if choices and str(value) not in choices:
            near = get_close_matches(str(value), choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise argparse.ArgumentError(action, f"must be one of {', '.join(choices)}, got {value!r}{hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `vllm-lite` and `python -m vllm_lite`. Returns the exit status; errors are one line on stderr."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # before the command runs
        return INTERRUPTED


def _main(words: Sequence[str]) -> int:
    if words[:1] != ["serve"] or not ENDS_AT_ONCE.isdisjoint(words):
        return _parse_and_run(words)
    gc.disable()  # until the server is up (server/processes/http_server.py): what a start makes is there to stay
    # Imported here because it takes longer than everything that a command without processes needs.
    from vllm_lite.runtime import supervise

    try:
        supervise.spawn_early(ENGINE, ENGINE_EARLY)  # the engine's and worker's imports take as long as the code below
        return _parse_and_run(words)
    finally:
        gc.enable()
        supervise.end_early()


def _parse_and_run(words: Sequence[str]) -> int:
    if None in (sys.stdin, sys.stdout, sys.stderr):  # closed
        # Imported here because it takes longer than everything that a command without processes needs.
        supervise = import_module("vllm_lite.runtime.supervise")
        supervise.open_standard_files()
    for stream in (sys.stdin, sys.stdout):  # bytes that are not UTF-8, and letters that the locale does not have
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    parser = _parser(words)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    return run_command(parser, words)


def _parser(words: Sequence[str]) -> Parser:
    """The parser of `words`: it knows all commands, and the flags of the one that is called."""
    parser = Parser(prog="vllm-lite", description="An LLM inference engine.")
    parser.add_argument("--version", action="version", version=__version__)
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = add_command(parsers, name, text)
        if name in words[:1]:
            module = import_module(f"{__name__}.{name.replace('-', '_')}")
            command.description = module.__doc__
            command.set_defaults(run=getattr(module, "run", None))
            module.add_flags(command)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line and run nothing. Raises SystemExit for a wrong one."""
    return _parse(_parser(words), words)


def run_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command of `words`. Returns its exit status; an error of the package is one line on stderr."""
    try:
        return _flushed(parser, words)
    except VllmLiteError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None and not has_folder():
            print(f"{parser.prog}: the current folder is there no longer; change to another one", file=sys.stderr)
            return 2
        if isinstance(error, BrokenPipeError):
            status = CLOSED_PIPE
        elif error.filename is None and (problem := _problem_of_output()) is not None:
            print(f"{parser.prog}: standard output cannot be written: {problem}", file=sys.stderr)
            status = 1
        else:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return status


def _flushed(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Parse and run, and write all output."""
    try:
        arguments = _parse(parser, words)
        status = int(arguments.run(arguments))
    except SystemExit:  # --help, --version
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return status


def _problem_of_output() -> str | None:
    """Why standard output refuses what is written to it; None if it takes a line."""
    try:
        print(flush=True)
    except OSError as error:
        return error.strerror
    return None


def add_command(
    parsers: "argparse._SubParsersAction[Any]",
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int] | None = None,
) -> argparse.ArgumentParser:
    """Add a command without flags; `text` is its line in the list of commands."""
    command: argparse.ArgumentParser = parsers.add_parser(name, help=text, allow_abbrev=False)
    command.set_defaults(run=run, parser=command)
    return command


def with_dashes(word: str) -> str:
    """A flag with dashes: as in vLLM, its name may be written with underscores (--max_model_len=4k)."""
    name, is_given, value = word.partition("=")
    return f"{name.replace('_', '-')}{is_given}{value}" if name.startswith("--") else word


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse `words`. The error for an unknown flag suggests the nearest known one."""
    arguments, unknown = parser.parse_known_args([with_dashes(word) for word in words])
    if unknown:
        parser = getattr(arguments, "parser", parser)
        flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001
        near = get_close_matches(unknown[0].split("=")[0], flags, 1, cutoff=0.7)
        parser.error(f"unknown argument {unknown[0]!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return arguments
