"""Measure this machine, or a server."""

import argparse

from vllm_lite.tools.cli import add_commands

COMMANDS = {
    "serve": "a server over HTTP, ours or another: throughput and latencies under load",
    "latency": "one batch, from its prompts to its last tokens",
    "startup": "from the command `serve` to its first token, and where the time goes",
    "engine": "scheduler, messages and processes, without a model",
    "kernels": "the native CPU kernels against memory's speed and torch",
    "step": "where the time of one decode step goes, in all processes",
    "throughput": "many requests at once against one at a time",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_commands(parser, f"{__name__}_", COMMANDS, tuple(COMMANDS))
