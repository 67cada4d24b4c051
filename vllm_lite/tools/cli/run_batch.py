"""Answer a file of requests, in OpenAI's batch format or as a table: with --model on a private server, or with the
server at --url. Started again with the same files, it continues where it stopped. Exit status: 0 if every request was
answered, 1 if some failed or are still open, 2 if it could not start, 130 after Ctrl-C."""

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError, EngineError, RemoteError
from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.server.config import ServeConfig
from vllm_lite.tools.batch.batch_input import open_source
from vllm_lite.tools.batch.batch_results import BatchResults, Paths
from vllm_lite.tools.batch.batch_source import BatchSource, Survey, check_local, entries_of, is_parquet
from vllm_lite.tools.batch.fingerprint import fingerprint
from vllm_lite.tools.batch.journal import BatchHeader
from vllm_lite.tools.batch.prefix_order import in_prefix_order
from vllm_lite.tools.batch.row_mapper import make_mapper
from vllm_lite.tools.batch.rows import Bad, Entry
from vllm_lite.tools.chat.remote_server import Address
from vllm_lite.tools.cli.server_flags import add_server_flags, server
from vllm_lite.tools.cli.vllm_flags import say

if TYPE_CHECKING:
    from vllm_lite.tools.batch.batch_run import BatchRun
    from vllm_lite.tools.chat.remote_server import RemoteServer

MAX_COMPLAINTS = 20
DEFAULTS = (
    *("generation_config", "override_generation_config", "chat_template", "default_chat_template_kwargs"),
    *("tool_call_parser", "reasoning_parser"),
)
"""The settings of a private server, beside the engine's, that change answers."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-i", "--input-file", metavar="FILE", required=True, help="lines of JSON, FILE.parquet, or datasets:ID")
    add("-o", "--output-file", metavar="FILE", required=True, help="answers: lines of JSON as they come, or .parquet")
    add("--max-concurrency", type=_positive, default=64, metavar="N", help="requests at once [64]")
    add("--request-timeout", type=float, default=3600.0, metavar="S", help="for one answer [3600]")
    add(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="continue an earlier run; --no-resume: replace it",
    )
    add("--retry-failed", action="store_true", help="repeat rows that failed in earlier runs")
    add(
        "--prefix-window",
        type=_natural,
        default=4096,
        metavar="N",
        help="rows sorted by prefix at once; 0: none [4096]",
    )
    add("--report", metavar="FILE", help="write rows, tokens, hits, time and failures to it, as JSON")
    add("--endpoint", metavar="URL", help="of a table's rows [/v1/chat/completions for messages, /v1/completions]")
    add("--prompt-column", metavar="NAME", help="of a table [messages or prompt]")
    add("--id-column", metavar="NAME", help="of a table [custom_id, or row-N]")
    add("--body", metavar="JSON", help='fields of all requests of a table, like {"max_tokens": 64}')
    add_server_flags(parser)
    add("--config", metavar="FILE", help="YAML or TOML file with settings of its own server")
    add_config_flags(parser, EngineConfig)
    add_config_flags(parser, ServeConfig, DEFAULTS)


class _Batch(NamedTuple):
    """One run of the command: the rows, the results, and the flags."""

    source: BatchSource
    survey: Survey
    results: BatchResults
    arguments: argparse.Namespace
    config: ServeConfig | None
    """The private server's config; None with --url."""

    @property
    def is_done(self) -> bool:
        return self.results.totals.num_rows >= self.survey.num_rows

    def entries(self) -> Iterator[Entry]:
        """The open rows, in the order of sending."""
        left = (entry for entry in entries_of(self.source, self.survey) if entry.line not in self.results.done)
        return in_prefix_order(left, self.arguments.prefix_window)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    mapper = make_mapper(arguments.endpoint, arguments.prompt_column, arguments.id_column, arguments.body)
    if is_parquet(arguments.output_file):
        from vllm_lite.tools.batch.parquet_file import load_pyarrow

        load_pyarrow()  # report missing libraries now, not after the last answer
    source = open_source(arguments.input_file, mapper)
    survey = source.survey()
    config = None if arguments.model is None else _config(arguments)
    header = BatchHeader(survey.digest, fingerprint(config, DEFAULTS, arguments.model_name, mapper))
    resume, retry_failed = arguments.resume, arguments.retry_failed
    with BatchResults(arguments.output_file, header, resume=resume, retry_failed=retry_failed) as results:
        return _run(_Batch(source, survey, results, arguments, config))


def _check(arguments: argparse.Namespace) -> None:
    check_local(arguments.output_file, "--output-file")
    if arguments.model is None and arguments.url is None:
        raise ConfigError("say who answers: --model MODEL for a server of its own, or --url of one that is running")
    if arguments.model is not None and arguments.url is not None:
        raise ConfigError("give either --model, for a server of its own, or --url of one that is running")
    if arguments.url is not None:
        Address.parse(arguments.url)
    for path in Paths.of(arguments.output_file):
        if path.exists() and os.path.exists(arguments.input_file) and path.samefile(arguments.input_file):
            raise ConfigError("--input-file and --output-file are the same file; answers need one of their own")
    taken = {os.path.abspath(path) for path in (arguments.input_file, *Paths.of(arguments.output_file))}
    if arguments.report is not None and os.path.abspath(arguments.report) in taken:
        raise ConfigError(f"--report {arguments.report} is a file of the batch; a report needs one of its own")


def _config(arguments: argparse.Namespace) -> ServeConfig:
    flags = {name: getattr(arguments, name) for name in (*EngineConfig.__struct_fields__, *DEFAULTS)}
    return ServeConfig.load(flags, file=arguments.config, notice=say)


def _run(batch: _Batch) -> int:
    from vllm_lite.tools.batch.batch_report import progress, report, summary, write_report
    from vllm_lite.tools.batch.batch_run import BatchRun

    began_s = time.monotonic()
    arguments, results, num_rows = batch.arguments, batch.results, batch.survey.num_rows
    problem = None
    with progress(num_rows) as show:
        made = BatchRun(results, show, _complaints())
        try:
            _answer(batch, made)
            if batch.is_done:
                results.finish()
        except (RemoteError, EngineError, ConfigError) as error:
            problem = str(error)
        except KeyboardInterrupt:
            problem = "interrupted"
    elapsed_s = time.monotonic() - began_s
    print(summary(made, results.totals, num_rows, elapsed_s), file=sys.stderr)
    if arguments.report is not None:
        write_report(arguments.report, report(made, results.totals, num_rows, elapsed_s))
    if problem is not None:
        print(f"vllm-lite: {problem}; run the same command again to continue", file=sys.stderr)
        return 130 if problem == "interrupted" else 1
    return int(results.totals.num_failed + results.totals.num_bad > 0)


def _answer(batch: _Batch, made: "BatchRun") -> None:
    """Answer the open rows. A private server that dies is restarted, as long as each answers some rows."""
    arguments, config = batch.arguments, batch.config
    while not batch.is_done:  # start no server without work
        before = made.num_done
        with server(arguments, None if config is None else lambda: config) as remote:
            try:
                _send(batch, made, remote)
            except RemoteError as error:
                if config is None or remote.why() is None or made.num_done == before:
                    raise
                print(f"{error}; another server takes over", file=sys.stderr)
                continue
        return


def _send(batch: _Batch, made: "BatchRun", remote: "RemoteServer") -> None:
    from vllm_lite.tools.batch.batch_run import Server

    arguments = batch.arguments

    async def work() -> None:
        async with Server(remote.address, remote.api_key, arguments.request_timeout, remote.why) as http:
            await made.run(batch.entries(), http, arguments.max_concurrency, arguments.model_name)

    asyncio.run(work())


def _complaints() -> Any:
    """Make a function that reports the first MAX_COMPLAINTS bad lines."""
    counts = itertools.count(1)

    def complain(entry: Bad) -> None:
        count = next(counts)
        if count <= MAX_COMPLAINTS:
            print(f"line {entry.line}: {entry.message}", file=sys.stderr)
        elif count == MAX_COMPLAINTS + 1:
            print("further bad lines are counted, not shown", file=sys.stderr)

    return complain


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)
