"""Measure the native CPU kernels against memory's speed and torch."""

import argparse
import sys

from vllm_lite.errors import ConfigError
from vllm_lite.tools.cli.bench_common import add_json_flag, show


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default="attention,linear,fused", help="[attention,linear,fused]")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, one after the other [1,2]")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools.bench import kernels

    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(kernels.PARTS):
        raise ConfigError(f"parts must be some of {', '.join(kernels.PARTS)}, got {', '.join(sorted(unknown))}")
    if not all(number.isdecimal() and int(number) > 0 for number in arguments.threads.split(",")):
        raise ConfigError(f"threads must be numbers like 1,2, got {arguments.threads!r}")
    threads = [int(number) for number in arguments.threads.split(",")]
    return show(arguments, kernels.run(parts, threads, lambda line: print(line, file=sys.stderr)), kernels.table)
