"""Measure this machine, or a server. Benchmarks of other single parts are run by `python benchmarks`."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_lite.config import DEMO_MODEL, EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.tools.cli import add_command, bench_serve

Figures = dict[str, Any]


class Bench(NamedTuple):
    """One benchmark. The docstring of `run` is its --help text."""

    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_benches(parser, BENCHES)


def add_benches(parser: argparse.ArgumentParser, benches: Mapping[str, Bench]) -> None:
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, bench in benches.items():
        command = add_command(parsers, name, bench.help, bench.run)
        command.description = bench.run.__doc__
        bench.add_flags(command)


# ---- shared by several


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig given as flags, without the model."""
    values = {name: getattr(arguments, name) for name in EngineConfig.__struct_fields__ if name != "model"}
    return {name: value for name, value in values.items() if value is not None}


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def report(line: str) -> None:
    print(line, file=sys.stderr)


def add_result_flags(parser: argparse.ArgumentParser, content: str) -> None:
    parser.add_argument("--output-json", metavar="FILE", help=f"write {content}")
    add_json_flag(parser)


def show(
    arguments: argparse.Namespace, figures: Figures, table: Callable[[Figures], str], saved: Figures | None = None
) -> int:
    """Write `saved` to the file of --output-json, if given, and print the figures. Raises ConfigError if the file
    cannot be written."""
    if saved is not None and arguments.output_json is not None:
        try:
            Path(arguments.output_json).write_text(json.dumps(saved, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--output-json {arguments.output_json} cannot be written: {error}") from error
    print(json.dumps(figures) if arguments.json else table(figures))
    return 0


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")


# ---- each of them


def _latency_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens [32]")
    parser.add_argument("--output-len", type=int, default=128, help="generated tokens [128]")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts that run together [8]")
    parser.add_argument("--n", type=int, default=1, help="samples of each prompt [1]")
    parser.add_argument("--use-beam-search", action="store_true", help="n beams instead of n samples")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="warm-up batches, not measured [10]")
    parser.add_argument("--num-iters", type=int, default=30, help="batches [30]")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_result_flags(parser, "avg_latency, latencies and percentiles")
    add_config_flags(parser, EngineConfig)


def _latency(arguments: argparse.Namespace) -> int:
    """Measure the time of one batch, from its prompts to its last tokens."""
    from vllm_lite.tools.bench import latency

    check_positive(arguments, "input_len", "output_len", "batch_size", "n", "num_iters")
    figures = latency.run(
        DEMO_MODEL if arguments.model is None else arguments.model,
        (arguments.batch_size, arguments.input_len, arguments.output_len),
        (max(arguments.num_iters_warmup, 0), arguments.num_iters),
        engine_settings(arguments),
        sampling={"n": arguments.n, "use_beam_search": arguments.use_beam_search},
        show_progress=not arguments.disable_tqdm,
    )
    return show(arguments, figures, latency.table, figures)


def _throughput_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=32, help="[32]")
    parser.add_argument("--input-len", "--random-input-len", type=int, default=64, help="prompt tokens [64]")
    parser.add_argument("--output-len", "--random-output-len", type=int, default=32, help="generated tokens [32]")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are shown [3]")
    parser.add_argument("--compare", action="store_true", help="also measure transformers' generate, alternating")
    parser.add_argument("--lora", type=int, default=0, help="also measure N random adapters, alternating [0]")
    add_result_flags(parser, "the figures of all at once as vLLM names them")
    add_config_flags(parser, EngineConfig)


def _throughput(arguments: argparse.Namespace) -> int:
    """Measure many concurrent requests, and one at a time. --model is a folder, demo, random-100m or random-500m."""
    from vllm_lite.tools.bench import throughput

    if min(arguments.num_prompts, arguments.input_len, arguments.output_len, arguments.repeats) < 1:
        raise ConfigError("--num-prompts, --input-len, --output-len and --repeats must be at least 1")
    figures = throughput.run(
        DEMO_MODEL if arguments.model is None else arguments.model,
        (arguments.num_prompts, arguments.input_len, arguments.output_len),
        engine_settings(arguments),
        compare=arguments.compare,
        num_adapters=arguments.lora,
        repeats=arguments.repeats,
    )
    return show(arguments, figures, throughput.table, throughput.as_vllm(figures))


def _engine(arguments: argparse.Namespace) -> int:
    """Measure scheduler, messages and processes, without a model."""
    from vllm_lite.tools.bench import engine

    return show(arguments, engine.run(report), engine.table)


BENCHES = {
    "serve": Bench(
        "a server over HTTP, ours or another: throughput and latencies under load",
        bench_serve.add_flags,
        bench_serve.run,
    ),
    "latency": Bench("one batch, from its prompts to its last tokens", _latency_flags, _latency),
    "throughput": Bench("many concurrent requests, and one at a time", _throughput_flags, _throughput),
    "engine": Bench("scheduler, messages and processes, without a model", add_json_flag, _engine),
}
