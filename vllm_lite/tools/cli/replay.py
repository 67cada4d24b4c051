"""Repeat the decisions of a trace and report where they diverge, compare it with another one, or show it."""

import argparse
from pathlib import Path

DEFAULT_PORT = 8001


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a trace of --record; FILE.2, ... are read as well")
    parser.add_argument(
        "--until", metavar="step=N", type=_step_number, help="stop after step N of FILE and show its state"
    )
    parser.add_argument("--assert", dest="must_agree", action="store_true", help="exit with 1 at a divergence")
    parser.add_argument("--diff", metavar="OTHER", help="only show where the trace OTHER first differs from FILE")
    parser.add_argument("--plot", metavar="FILE.png", help="draw requests, KV blocks and tokens over time")
    parser.add_argument("--page", action="store_true", help="show its steps in a browser, like the page at /")
    parser.add_argument(
        "--port", type=_port, help=f"where --page listens, on this machine alone; 0: any [{DEFAULT_PORT}]"
    )


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.errors import ConfigError

    if arguments.diff is not None:
        return _diff(arguments)
    if arguments.page:
        for name in ("until", "must_agree", "plot"):
            if getattr(arguments, name):
                raise ConfigError(f"--page shows the whole trace; give it without --{_FLAGS.get(name, name)}")
        from vllm_lite.tools.replay.page import serve

        return serve(arguments.file, DEFAULT_PORT if arguments.port is None else arguments.port)
    if arguments.port is not None:
        raise ConfigError("--port is where --page listens; give both")
    return _replay(arguments)


def _diff(arguments: argparse.Namespace) -> int:
    from vllm_lite.errors import ConfigError
    from vllm_lite.trace.difference import difference

    for name in ("until", "plot", "page", "port"):
        if getattr(arguments, name):
            raise ConfigError(f"--diff compares two traces; give it without --{name}")
    lines, agree = difference(arguments.file, arguments.diff)
    print("\n".join(lines))
    return int(arguments.must_agree and not agree)


def _replay(arguments: argparse.Namespace) -> int:
    from vllm_lite.engine.observe.replay import Replay
    from vllm_lite.tools.replay.plot import MOST_ENTRIES, plot
    from vllm_lite.tools.replay.timeline import Timeline
    from vllm_lite.tools.replay.walk import stats_of
    from vllm_lite.trace.segments import segment_paths

    if arguments.plot is not None:
        from vllm_lite.tools.plotting import check

        check(arguments.plot)
    timeline, num_blocks = Timeline(MOST_ENTRIES), 0

    def measure(replay: Replay) -> None:
        timeline.add(replay.wall_s, stats_of(replay))

    # Each engine counts its steps from 1, so a step is one of the given file.
    paths = segment_paths(arguments.file) if arguments.until is None else [arguments.file]
    agrees = True
    for path in paths:
        replay = Replay(path).run(arguments.until, None if arguments.plot is None else measure)
        if len(paths) > 1:
            print(f"{path}, life {replay.reader.header.life} of the engine:")
        print("\n".join(replay.report()))
        agrees = agrees and replay.divergence is None
        num_blocks = max(num_blocks, replay.reader.header.num_blocks - 1)
        if arguments.plot is not None:
            measure(replay)
    if arguments.plot is not None:
        plot(timeline, num_blocks, Path(arguments.file).name, arguments.plot)
        print(f"plot: {arguments.plot}")
    return int(arguments.must_agree and not agrees)


_FLAGS = {"must_agree": "assert"}


def _step_number(text: str) -> int:
    name, _, number = text.rpartition("=")
    if name not in ("", "step") or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"must look like step=100, got {text!r}")
    return int(number)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)
