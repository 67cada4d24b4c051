"""Measure this machine, or a server."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vllm_lite.config import DEMO_MODEL, EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.tools.cli import add_command, bench_serve

Figures = dict[str, Any]


class Bench(NamedTuple):
    """One measurement. The docstring of `run` is what its --help says."""

    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, bench in BENCHES.items():
        command = add_command(parsers, name, bench.help, bench.run)
        command.description = bench.run.__doc__
        bench.add_flags(command)


# ---- what several of them share


def _engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that were given, without the model."""
    values = {name: getattr(arguments, name) for name in EngineConfig.__struct_fields__ if name != "model"}
    return {name: value for name, value in values.items() if value is not None}


def _add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _report(line: str) -> None:
    print(line, file=sys.stderr)


def _add_result_flags(parser: argparse.ArgumentParser, content: str) -> None:
    parser.add_argument("--output-json", metavar="FILE", help=f"write {content}")
    _add_json_flag(parser)


def _show(
    arguments: argparse.Namespace, figures: Figures, table: Callable[[Figures], str], saved: Figures | None = None
) -> int:
    """Write `saved` into the file of --output-json, if that is given, and print the figures. Raises ConfigError if the
    file cannot be written."""
    if saved is not None and arguments.output_json is not None:
        try:
            Path(arguments.output_json).write_text(json.dumps(saved, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--output-json {arguments.output_json} cannot be written: {error}") from error
    print(json.dumps(figures) if arguments.json else table(figures))
    return 0


def _check_positive(arguments: argparse.Namespace, *names: str) -> None:
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
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="batches before those that are measured [10]")
    parser.add_argument("--num-iters", type=int, default=30, help="batches [30]")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    _add_result_flags(parser, "avg_latency, latencies and percentiles")
    add_config_flags(parser, EngineConfig)


def _latency(arguments: argparse.Namespace) -> int:
    """Measure how long one batch takes, from its prompts to its last tokens."""
    from vllm_lite.tools.bench import latency

    _check_positive(arguments, "input_len", "output_len", "batch_size", "n", "num_iters")
    figures = latency.run(
        arguments.model or DEMO_MODEL,
        (arguments.batch_size, arguments.input_len, arguments.output_len),
        (max(arguments.num_iters_warmup, 0), arguments.num_iters),
        _engine_settings(arguments),
        sampling={"n": arguments.n, "use_beam_search": arguments.use_beam_search},
        show_progress=not arguments.disable_tqdm,
    )
    return _show(arguments, figures, latency.table, figures)


def _startup_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("serve_words", nargs="*", metavar="-- MODEL FLAGS", help="what to serve [the bundled model]")
    parser.add_argument("--num-iters", type=int, default=3, help="starts, of which the median is shown [3]")
    parser.add_argument("--llm", action="store_true", help="a script that makes LLM(MODEL, ...), not a server")
    parser.add_argument(
        "--idle-s",
        type=float,
        default=0.0,
        help="wait before each start; a virtual machine may give free memory back to its host by then [0]",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    _add_result_flags(parser, "what --json prints")


def _startup(arguments: argparse.Namespace) -> int:
    """Measure how long `vllm-lite serve`, or a script with LLM(), takes from the command to its first token, and where
    the time goes. What stands behind `--` goes to it: bench startup --num-iters 5 -- MODEL --dtype bfloat16"""
    from vllm_lite.tools.bench import startup

    _check_positive(arguments, "num_iters")
    if arguments.idle_s < 0:
        raise ConfigError(f"--idle-s must be at least 0, got {arguments.idle_s:g}")
    words = arguments.serve_words
    if arguments.llm:
        command, measure = ["LLM", *words], partial(startup.llm_start, _llm_settings(words))
    else:
        command, measure = ["vllm-lite", "serve", *words], partial(startup.serve_start, words)
    progress = not arguments.disable_tqdm
    figures = startup.run(command, measure, arguments.num_iters, idle_s=arguments.idle_s, show_progress=progress)
    return _show(arguments, figures, startup.table, figures)


def _llm_settings(words: Sequence[str]) -> dict[str, Any]:
    """Keywords of LLM that are the same as these words of a command line."""
    usage = "vllm-lite bench startup --llm -- [MODEL] [FLAGS of the engine]"
    parser = argparse.ArgumentParser(usage=usage, add_help=False)
    parser.add_argument("folder", metavar="MODEL", nargs="?", default=DEMO_MODEL)
    add_config_flags(parser, EngineConfig)
    arguments = parser.parse_args(words)
    return {"model": arguments.model or arguments.folder, **_engine_settings(arguments)}


def _engine(arguments: argparse.Namespace) -> int:
    """Measure scheduler, messages and processes, without a model."""
    from vllm_lite.tools.bench import engine

    return _show(arguments, engine.run(_report), engine.table)


def _kernels_flags(parser: argparse.ArgumentParser) -> None:
    parts = "attention,linear,experts,fused,masks,ranks"
    parser.add_argument("--parts", default=parts, help=f"[{parts}]")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, one after the other [1,2]")
    parser.add_argument("--shapes", help="of linear layers: outputs x inputs, such as 6144x1024,1024x3072")
    parser.add_argument("--rows", help="of linear layers: such as 1,32,256")
    parser.add_argument("--dtypes", help="of linear layers and --cases: some of bfloat16,float32,float16")
    parser.add_argument(
        "--forms", help="of linear layers: dense,int8,int4_g128,... as the names in the table, torch,onednn"
    )
    parser.add_argument("--isas", help="of linear layers: instruction sets in turn, such as amx,avx512_bf16")
    parser.add_argument(
        "--cases",
        help="of attention: sequences x new tokens @ context : heads / KV heads x head size, such as "
        "32x1@1024:24/8x64,1x512@2048:32/8x128",
    )
    _add_json_flag(parser)


def _kernels(arguments: argparse.Namespace) -> int:
    """Measure the native CPU kernels against memory's speed and torch."""
    from vllm_lite.tools.bench import kernels, kernels_attention, kernels_linear

    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(kernels.PARTS):
        raise ConfigError(f"parts must be some of {', '.join(kernels.PARTS)}, got {', '.join(sorted(unknown))}")
    if not all(number.isdecimal() and int(number) > 0 for number in arguments.threads.split(",")):
        raise ConfigError(f"threads must be numbers like 1,2, got {arguments.threads!r}")
    threads = [int(number) for number in arguments.threads.split(",")]
    try:
        names = ("shapes", "rows", "dtypes", "forms", "isas")
        products = kernels_linear.choose({name: value for name in names if (value := getattr(arguments, name))})
        cases = [kernels_attention.chosen(text) for text in arguments.cases.split(",")] if arguments.cases else []
        figures = kernels.run(parts, threads, _report, products, cases)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return _show(arguments, figures, kernels.table)


def _step_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1, help="sequences that decode together [1]")
    parser.add_argument("--context", type=int, default=192, help="tokens of each, in the middle of its decoding [192]")
    parser.add_argument("--steps", type=int, default=128, help="tokens that each generates, twice [128]")
    add_config_flags(parser, EngineConfig)
    _add_json_flag(parser)


def _step(arguments: argparse.Namespace) -> int:
    """Measure where the time of one decode step goes, in all processes."""
    from vllm_lite.tools.bench import step

    lengths = arguments.streams, arguments.context, arguments.steps
    return _show(arguments, step.run(arguments.model or DEMO_MODEL, *lengths, _engine_settings(arguments)), step.table)


def _throughput_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=32, help="[32]")
    parser.add_argument("--input-len", "--random-input-len", type=int, default=64, help="prompt tokens [64]")
    parser.add_argument("--output-len", "--random-output-len", type=int, default=32, help="generated tokens [32]")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, whose medians are shown [3]")
    parser.add_argument("--compare", action="store_true", help="measure transformers' generate in turns with it")
    parser.add_argument("--lora", type=int, default=0, help="measure so many random adapters in turns with it [0]")
    _add_result_flags(parser, "the figures of all at once as vLLM names them")
    add_config_flags(parser, EngineConfig)


def _throughput(arguments: argparse.Namespace) -> int:
    """Measure many requests at once against one at a time. --model is a folder, demo, random-100m or random-500m."""
    from vllm_lite.tools.bench import throughput

    if min(arguments.num_prompts, arguments.input_len, arguments.output_len, arguments.repeats) < 1:
        raise ConfigError("--num-prompts, --input-len, --output-len and --repeats must be at least 1")
    figures = throughput.run(
        arguments.model or DEMO_MODEL,
        (arguments.num_prompts, arguments.input_len, arguments.output_len),
        _engine_settings(arguments),
        compare=arguments.compare,
        num_adapters=arguments.lora,
        repeats=arguments.repeats,
    )
    return _show(arguments, figures, throughput.table, throughput.as_vllm(figures))


BENCHES = {
    "serve": Bench(
        "a server over HTTP, ours or another: throughput and latencies under load",
        bench_serve.add_flags,
        bench_serve.run,
    ),
    "latency": Bench("one batch, from its prompts to its last tokens", _latency_flags, _latency),
    "startup": Bench("from the command `serve` to its first token, and where the time goes", _startup_flags, _startup),
    "engine": Bench("scheduler, messages and processes, without a model", _add_json_flag, _engine),
    "kernels": Bench("the native CPU kernels against memory's speed and torch", _kernels_flags, _kernels),
    "step": Bench("where the time of one decode step goes, in all processes", _step_flags, _step),
    "throughput": Bench("many requests at once against one at a time", _throughput_flags, _throughput),
}
