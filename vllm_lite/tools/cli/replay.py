"""Decide again what a trace says was decided, and tell where the decisions part."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what the engine wrote with --record")
    parser.add_argument("--until", metavar="step=N", type=_step_number, help="stop behind step N and show its state")
    parser.add_argument("--assert", dest="must_agree", action="store_true", help="exit with 1 at a divergence")


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.engine.observe.replay import Replay

    replay = Replay(arguments.file).run(arguments.until)
    print("\n".join(replay.report()))
    return int(arguments.must_agree and replay.divergence is not None)


def _step_number(text: str) -> int:
    name, _, number = text.rpartition("=")
    if name not in ("", "step") or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"must look like step=100, got {text!r}")
    return int(number)
