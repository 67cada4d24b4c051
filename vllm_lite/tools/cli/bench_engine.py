"""Measure scheduler, messages and processes, without a model."""

import argparse
import sys

from vllm_lite.tools.cli.bench_common import add_json_flag, show


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools.bench import engine

    return show(arguments, engine.run(lambda line: print(line, file=sys.stderr)), engine.table)
