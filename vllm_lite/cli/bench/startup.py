"""Measure how long `vllm-lite serve` takes from the command to its first streamed token, and where the time goes. What
stands behind `--` goes to serve: bench startup --num-iters 5 -- MODEL --dtype bfloat16"""

import argparse

from vllm_lite.cli.bench.common import add_json_flag, save_json, show
from vllm_lite.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("serve_words", nargs="*", metavar="-- MODEL FLAGS", help="what to serve [the bundled model]")
    parser.add_argument("--num-iters", type=int, default=3, help="starts, of which the median is shown [3]")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_argument("--output-json", metavar="FILE", help="write what --json prints")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.bench import startup

    if arguments.num_iters < 1:
        raise ConfigError(f"--num-iters must be at least 1, got {arguments.num_iters}")
    figures = startup.run(arguments.serve_words, arguments.num_iters, show_progress=not arguments.disable_tqdm)
    if arguments.output_json is not None:
        save_json(arguments.output_json, figures)
    return show(arguments, figures, startup.table)
