"""Measure how long `vllm-lite serve`, or a script with LLM(), takes from the command to its first token, and where the
time goes. What stands behind `--` goes to it: bench startup --num-iters 5 -- MODEL --dtype bfloat16"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm_lite.config import DEMO_MODEL
from vllm_lite.errors import ConfigError
from vllm_lite.tools.cli.bench_common import add_engine_flags, add_json_flag, engine_settings, save_json, show


def add_flags(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--output-json", metavar="FILE", help="write what --json prints")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools.bench import startup

    if arguments.num_iters < 1:
        raise ConfigError(f"--num-iters must be at least 1, got {arguments.num_iters}")
    if arguments.idle_s < 0:
        raise ConfigError(f"--idle-s must be at least 0, got {arguments.idle_s:g}")
    words = arguments.serve_words
    if arguments.llm:
        command, measure = ["LLM", *words], partial(startup.llm_start, _llm_settings(words))
    else:
        command, measure = ["vllm-lite", "serve", *words], partial(startup.serve_start, words)
    progress = not arguments.disable_tqdm
    figures = startup.run(command, measure, arguments.num_iters, idle_s=arguments.idle_s, show_progress=progress)
    if arguments.output_json is not None:
        save_json(arguments.output_json, figures)
    return show(arguments, figures, startup.table)


def _llm_settings(words: Sequence[str]) -> dict[str, Any]:
    """Keywords of LLM that are the same as these words of a command line."""
    parser = argparse.ArgumentParser(
        usage="vllm-lite bench startup --llm -- [MODEL] [FLAGS of the engine]", add_help=False
    )
    parser.add_argument("folder", metavar="MODEL", nargs="?", default=DEMO_MODEL)
    add_engine_flags(parser)
    arguments = parser.parse_args(words)
    return {"model": arguments.model or arguments.folder, **engine_settings(arguments)}
