"""Measure where the time of one decode step goes, in all processes."""

import argparse

from vllm_lite.config import DEMO_MODEL
from vllm_lite.tools.cli.bench_common import add_engine_flags, add_json_flag, engine_settings, show


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1, help="sequences that decode together [1]")
    parser.add_argument("--context", type=int, default=192, help="tokens of each, in the middle of its decoding [192]")
    parser.add_argument("--steps", type=int, default=128, help="tokens that each generates, twice [128]")
    add_engine_flags(parser)
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools.bench import step

    lengths = arguments.streams, arguments.context, arguments.steps
    return show(arguments, step.run(arguments.model or DEMO_MODEL, *lengths, engine_settings(arguments)), step.table)
