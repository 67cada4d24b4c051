"""Decide again what a trace says was decided, and tell where the decisions part."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what the engine wrote with --record; FILE.2, ... as well")
    parser.add_argument(
        "--until", metavar="step=N", type=_step_number, help="stop behind step N of FILE and show its state"
    )
    parser.add_argument("--assert", dest="must_agree", action="store_true", help="exit with 1 at a divergence")


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.engine.observe.replay import Replay
    from vllm_lite.trace.segments import segment_paths

    # Each engine counts its steps from 1, so a step is one of the file that is named.
    paths = segment_paths(arguments.file) if arguments.until is None else [arguments.file]
    agrees = True
    for path in paths:
        replay = Replay(path).run(arguments.until)
        if len(paths) > 1:
            print(f"{path}, life {replay.reader.header.life} of the engine:")
        print("\n".join(replay.report()))
        agrees = agrees and replay.divergence is None
    return int(arguments.must_agree and not agrees)


def _step_number(text: str) -> int:
    name, _, number = text.rpartition("=")
    if name not in ("", "step") or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"must look like step=100, got {text!r}")
    return int(number)
