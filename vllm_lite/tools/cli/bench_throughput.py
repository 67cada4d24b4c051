"""Measure many requests at once against one at a time. --model is a folder, demo, random-100m or random-500m."""

import argparse

from vllm_lite.config import DEMO_MODEL
from vllm_lite.errors import ConfigError
from vllm_lite.tools.cli.bench_common import add_engine_flags, add_json_flag, engine_settings, save_json, show


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=32, help="[32]")
    parser.add_argument("--input-len", "--random-input-len", type=int, default=64, help="prompt tokens [64]")
    parser.add_argument("--output-len", "--random-output-len", type=int, default=32, help="generated tokens [32]")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, whose medians are shown [3]")
    parser.add_argument("--compare", action="store_true", help="measure transformers' generate in turns with it")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures of all at once as vLLM names them")
    add_json_flag(parser)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools.bench import throughput

    if min(arguments.num_prompts, arguments.input_len, arguments.output_len, arguments.repeats) < 1:
        raise ConfigError("--num-prompts, --input-len, --output-len and --repeats must be at least 1")
    figures = throughput.run(
        arguments.model or DEMO_MODEL,
        arguments.num_prompts,
        (arguments.input_len, arguments.output_len),
        engine_settings(arguments),
        compare=arguments.compare,
        repeats=arguments.repeats,
    )
    if arguments.output_json is not None:
        save_json(arguments.output_json, throughput.as_vllm(figures))
    return show(arguments, figures, throughput.table)
