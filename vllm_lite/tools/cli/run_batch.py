"""Answer a file of requests, in OpenAI's batch format: by --model on a server of its own, or by the server at --url.
Started again with the same files it goes on where it stopped. Exit status: 0 if every request was answered, 1 if some
failed or are still open, 2 if it could not start, 130 after Ctrl-C."""

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError, RemoteError
from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.server.config import ServeConfig
from vllm_lite.tools.chat import batch_file
from vllm_lite.tools.cli.server_flags import add_server_flags, server
from vllm_lite.tools.cli.vllm_flags import say

if TYPE_CHECKING:
    from vllm_lite.tools.chat.batch import BatchRun
    from vllm_lite.tools.chat.remote_server import RemoteServer

MAX_COMPLAINTS = 20
DEFAULTS = (
    *("generation_config", "override_generation_config", "chat_template", "default_chat_template_kwargs"),
    *("tool_call_parser", "reasoning_parser"),
)
"""The settings of its own server, beside an engine's, that change answers."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", metavar="FILE", required=True, help="lines of {custom_id, url, body}")
    parser.add_argument("-o", "--output-file", metavar="FILE", required=True, help="lines of answers are appended here")
    parser.add_argument("--max-concurrency", type=_positive, default=64, metavar="N", help="requests at once [64]")
    parser.add_argument("--request-timeout", type=float, default=3600.0, metavar="S", help="for one answer [3600]")
    parser.add_argument("--retry-failed", action="store_true", help="ask what has failed in earlier runs again")
    add_server_flags(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings of its own server")
    add_config_flags(parser, EngineConfig)
    add_config_flags(parser, ServeConfig, DEFAULTS)


def run(arguments: argparse.Namespace) -> int:
    batch_file.check_path(arguments.input_file, "--input-file")
    batch_file.check_path(arguments.output_file, "--output-file")
    if arguments.model is None and arguments.url is None:
        raise ConfigError("say who answers: --model MODEL for a server of its own, or --url of one that is running")
    if arguments.model is not None and arguments.url is not None:
        raise ConfigError("give either --model, for a server of its own, or --url of one that is running")
    if os.path.exists(arguments.output_file) and os.path.samefile(arguments.input_file, arguments.output_file):
        raise ConfigError("--input-file and --output-file are the same file; answers need one of their own")
    num_lines = batch_file.count_lines(arguments.input_file)
    with batch_file.BatchResults(arguments.output_file, retry_failed=arguments.retry_failed) as results:
        began_s = time.monotonic()
        has_work = any(
            isinstance(entry, batch_file.BatchRequest) and entry.custom_id not in results.done
            for entry in batch_file.read(arguments.input_file)
        )
        own = arguments.model is not None and has_work  # a server without work is not started
        with server(arguments, (lambda: _config(arguments)) if own else None) as remote:
            return _run(arguments, remote, results, num_lines, began_s)


def _config(arguments: argparse.Namespace) -> ServeConfig:
    flags = {name: getattr(arguments, name) for name in (*EngineConfig.__struct_fields__, *DEFAULTS)}
    return ServeConfig.load(flags, file=arguments.config, notice=say)


def _run(
    arguments: argparse.Namespace,
    remote: "RemoteServer",
    results: batch_file.BatchResults,
    num_lines: int,
    began_s: float,
) -> int:
    from vllm_lite.tools.chat.batch import BatchRun, Server

    http_settings = (remote.address, remote.api_key, arguments.request_timeout, remote.why)
    with _progress(num_lines) as show:
        batch = BatchRun(results, show, _complaints())

        async def work() -> None:
            async with Server(*http_settings) as http:
                entries = batch_file.read(arguments.input_file)
                await batch.run(entries, http, arguments.max_concurrency, arguments.model_name)

        problem = None
        try:
            asyncio.run(work())
        except RemoteError as error:
            problem = str(error)
        except KeyboardInterrupt:
            problem = "interrupted"
    print(_summary(batch, results, num_lines, time.monotonic() - began_s), file=sys.stderr)
    if problem is not None:
        print(f"vllm-lite: {problem}; run the same command again to go on", file=sys.stderr)
        return 130 if problem == "interrupted" else 1
    return int(results.num_failed > 0 or batch.num_bad > 0)


def _complaints() -> Any:
    """Make a function that reports the first bad lines."""
    counts = itertools.count(1)

    def complain(entry: batch_file.Bad) -> None:
        count = next(counts)
        if count <= MAX_COMPLAINTS:
            print(f"line {entry.line}: {entry.message}", file=sys.stderr)
        elif count == MAX_COMPLAINTS + 1:
            print("further bad lines are counted, not shown", file=sys.stderr)

    return complain


def _summary(batch: "BatchRun", results: batch_file.BatchResults, num_lines: int, elapsed_s: float) -> str:
    open_ = num_lines - batch.num_lines
    others = {
        "failed": batch.num_failed,
        "bad lines": batch.num_bad,
        "from earlier runs": batch.num_before,
        "open": open_,
    }
    parts = [f"{batch.num_answered} answered", *(f"{count} {what}" for what, count in others.items() if count > 0)]
    tokens = f"{batch.num_prompt_tokens} prompt and {batch.num_output_tokens} output tokens"
    rate = f"{batch.num_output_tokens / max(elapsed_s, 1e-9):.0f} tokens/s"
    failed = f"; {results.num_failed} failures are in the file" if results.num_failed else ""
    return f"{', '.join(parts)} in {elapsed_s:.1f} s: {tokens}, {rate}{failed}"


@contextmanager
def _progress(num_lines: int) -> Iterator[Any]:
    """On a terminal, show a progress bar."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=num_lines)

        def show(batch: "BatchRun") -> None:
            bad = batch.num_failed + batch.num_bad
            text = f"{batch.num_output_tokens} tokens" + (f", {bad} failed" if bad else "")
            progress.update(task, completed=batch.num_lines, description=text)

        yield show


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)
