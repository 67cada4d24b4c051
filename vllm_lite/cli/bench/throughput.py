"""Measure many requests at once against one at a time."""

import argparse

from vllm_lite.cli.bench.common import add_engine_flags, add_json_flag, engine_settings, show
from vllm_lite.config import DEMO_MODEL


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint folder, 'random-100m' or 'random-500m' [demo]")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens [64]")
    parser.add_argument("--output-len", type=int, default=32, help="generated tokens [32]")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, whose medians are shown [3]")
    parser.add_argument("--compare", action="store_true", help="measure transformers' generate in turns with it")
    add_engine_flags(parser)
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.bench import throughput

    figures = throughput.run(
        arguments.model,
        arguments.num_prompts,
        (arguments.input_len, arguments.output_len),
        engine_settings(arguments),
        compare=arguments.compare,
        repeats=arguments.repeats,
    )
    return show(arguments, figures, throughput.table)
