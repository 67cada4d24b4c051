"""Explain what happened to a request, and why."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", metavar="REQUEST", help="the request's id")
    parser.add_argument("file", metavar="FILE", help="a trace of --record; FILE.2, ... are read as well")


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.trace.reader import TraceReader
    from vllm_lite.trace.segments import segment_paths
    from vllm_lite.trace.story import story

    print("\n".join(story(arguments.request, *map(TraceReader, segment_paths(arguments.file)))))
    return 0
