"""The commands of `python benchmarks`: each measures one part of the engine, through the product's own code."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_lite.config import DEMO_MODEL, EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.tools.cli import Parser, run_command
from vllm_lite.tools.cli.bench import (
    Bench,
    add_benches,
    add_json_flag,
    add_result_flags,
    check_positive,
    engine_settings,
    report,
    show,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of BENCHES. Returns the exit status."""
    parser = Parser(prog="benchmarks", description="Measure one part of the engine on this machine.")
    add_benches(parser, BENCHES)
    return run_command(parser, sys.argv[1:] if argv is None else argv)


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
    add_result_flags(parser, "what --json prints")


def _startup(arguments: argparse.Namespace) -> int:
    """Measure how long `vllm-lite serve`, or a script with LLM(), takes from the command to its first token, and which
    parts take how much of it. Words after `--` are passed to it: benchmarks startup --num-iters 5 -- MODEL --dtype
    bfloat16"""
    from micro import startup

    check_positive(arguments, "num_iters")
    if arguments.idle_s < 0:
        raise ConfigError(f"--idle-s must be at least 0, got {arguments.idle_s:g}")
    words = arguments.serve_words
    if arguments.llm:
        command, measure = ["LLM", *words], partial(startup.llm_start, _llm_settings(words))
    else:
        command, measure = ["vllm-lite", "serve", *words], partial(startup.serve_start, words)
    progress = not arguments.disable_tqdm
    figures = startup.run(command, measure, arguments.num_iters, idle_s=arguments.idle_s, show_progress=progress)
    return show(arguments, figures, startup.table, figures)


def _llm_settings(words: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of LLM with the meaning of these words of a command line."""
    usage = "benchmarks startup --llm -- [MODEL] [FLAGS of the engine]"
    parser = argparse.ArgumentParser(usage=usage, add_help=False)
    parser.add_argument("folder", metavar="MODEL", nargs="?", default=DEMO_MODEL)
    add_config_flags(parser, EngineConfig)
    arguments = parser.parse_args(words)
    return {"model": arguments.model or arguments.folder, **engine_settings(arguments)}


def _kernels_flags(parser: argparse.ArgumentParser) -> None:
    parts = "attention,linear,experts,fused,masks,ranks"
    parser.add_argument("--parts", default=parts, help=f"[{parts}]")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, one after the other [1,2]")
    parser.add_argument("--shapes", help="of linear layers: outputs x inputs, such as 6144x1024,1024x3072")
    parser.add_argument("--rows", help="of linear layers: such as 1,32,256")
    parser.add_argument("--dtypes", help="of linear layers and --cases: some of bfloat16,float32,float16")
    parser.add_argument(
        "--forms",
        help="of linear layers: dense,int8,int4_g128,... as the names in the table, torch,onednn, and types of GGUF "
        "files, such as Q4_0",
    )
    parser.add_argument(
        "--working-set",
        help="of linear layers: MiB that all copies of a weight have together; as many as a cache holds shows its "
        "speed [128]",
    )
    parser.add_argument("--isas", help="of linear layers: instruction sets in turn, such as amx,avx512_bf16")
    parser.add_argument(
        "--cases",
        help="of attention: sequences x new tokens @ context : heads / KV heads x head size, such as "
        "32x1@1024:24/8x64,1x512@2048:32/8x128",
    )
    parser.add_argument(
        "--library",
        dest="other",
        metavar="OTHER.so",
        type=Path,
        help="another build of the native library: measure its linear layers and --cases and this one's, in turn",
    )
    parser.add_argument("--pairs", type=int, default=40, help="with --library: measurements of each [40]")
    add_json_flag(parser)


def _kernels(arguments: argparse.Namespace) -> int:
    """Measure the native CPU kernels against memory's speed and torch."""
    from micro import kernels, kernels_attention, kernels_in_turn, kernels_linear

    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(kernels.PARTS):
        raise ConfigError(f"parts must be some of {', '.join(kernels.PARTS)}, got {', '.join(sorted(unknown))}")
    if not all(number.isdecimal() and int(number) > 0 for number in arguments.threads.split(",")):
        raise ConfigError(f"threads must be numbers like 1,2, got {arguments.threads!r}")
    threads = [int(number) for number in arguments.threads.split(",")]
    try:
        names = ("shapes", "rows", "dtypes", "forms", "isas", "working_set")
        products = kernels_linear.choose({name: value for name in names if (value := getattr(arguments, name))})
        cases = [kernels_attention.chosen(text) for text in arguments.cases.split(",")] if arguments.cases else []
        if arguments.other is not None:
            check_positive(arguments, "pairs")
            products = products if "linear" in parts else products._replace(forms=())
            cases = cases if "attention" in parts else []
            figures = kernels_in_turn.run(arguments.other, threads, products, cases, arguments.pairs, report)
            return show(arguments, figures, kernels_in_turn.table)
        figures = kernels.run(parts, threads, report, products, cases)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return show(arguments, figures, kernels.table)


def _step_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1, help="sequences that decode together [1]")
    parser.add_argument("--context", type=int, default=192, help="tokens of each, in the middle of its decoding [192]")
    parser.add_argument("--steps", type=int, default=128, help="tokens that each generates, twice [128]")
    add_config_flags(parser, EngineConfig)
    add_json_flag(parser)


def _step(arguments: argparse.Namespace) -> int:
    """Measure how much time each part of one decode step takes, in all processes."""
    from micro import step

    lengths = arguments.streams, arguments.context, arguments.steps
    return show(arguments, step.run(arguments.model or DEMO_MODEL, *lengths, engine_settings(arguments)), step.table)


def _simulated_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-requests", type=int, default=100_000, help="[100000]")
    add_json_flag(parser)


def _simulated(arguments: argparse.Namespace) -> int:
    """Measure how many requests a second the scheduler serves with simulated workers and a virtual clock."""
    from micro import simulated

    check_positive(arguments, "num_requests")
    return show(arguments, simulated.run(arguments.num_requests), simulated.table)


def _beside_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tree", metavar="TREE", type=Path, help="another checkout, with its .venv")
    parser.add_argument("words", nargs="+", metavar="-- COMMAND", help="what to run in both, such as kernels FLAGS")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each [5]")
    add_json_flag(parser)


def _beside(arguments: argparse.Namespace) -> int:
    """Measure another version and this one in turn, and divide the figures of this one by the other's: benchmarks
    beside ../old -- kernels --parts linear --threads 2 --rows 1"""
    from micro import beside

    check_positive(arguments, "rounds")
    if not (arguments.tree / "benchmarks/__main__.py").is_file():
        raise ConfigError(f"TREE must be a checkout with benchmarks/__main__.py, got {arguments.tree}")
    figures = beside.run(arguments.tree, arguments.words, arguments.rounds, report)
    return show(arguments, figures, beside.table)


BENCHES = {
    "beside": Bench("any of the other commands in another checkout and in this one, in turn", _beside_flags, _beside),
    "simulated": Bench("the engine core alone: requests a second that it schedules", _simulated_flags, _simulated),
    "kernels": Bench("the native CPU kernels against memory's speed and torch", _kernels_flags, _kernels),
    "step": Bench("where the time of one decode step goes, in all processes", _step_flags, _step),
    "startup": Bench("from the command `serve` to its first token, and where the time goes", _startup_flags, _startup),
}
