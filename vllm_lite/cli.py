"""The command line: `vllm-lite serve | bench | replay | why`. Every other one comes with the issue that builds it."""

import argparse
import json
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

from vllm_lite import __version__
from vllm_lite.errors import VllmLiteError

ENGINE_FLAGS = ("quantization", "kv_cache_dtype", "attention_backend", "cpu_threads", "device")
"""Fields of EngineConfig that can be given to what measures an engine."""


class Parser(argparse.ArgumentParser):
    """One line for an error, as for every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Entry point of `vllm-lite` and `python -m vllm_lite`. Returns the exit status; errors are one line on stderr."""
    parser = Parser(prog="vllm-lite", description="An LLM inference engine.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands)
    bench = commands.add_parser("bench", help="measure this machine").add_subparsers(dest="bench", required=True)
    _add_bench_engine(bench)
    _add_bench_kernels(bench)
    _add_bench_step(bench)
    _add_bench_throughput(bench)
    _add_replay(commands)
    _add_why(commands)
    arguments = _parse(parser, argv)
    try:
        return int(arguments.run(arguments))
    except VllmLiteError as error:
        print(f"vllm-lite: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(parser: Parser, argv: list[str] | None) -> argparse.Namespace:
    """What is not known is said with the nearest flag that is."""
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser = getattr(arguments, "parser", parser)
        flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001
        near = get_close_matches(unknown[0].split("=")[0], flags, 1)
        parser.error(f"unknown argument {unknown[0]!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return arguments


def _add_serve(commands: "argparse._SubParsersAction[Parser]") -> None:
    from vllm_lite.config import add_flags
    from vllm_lite.server.config import ServeConfig

    parser = commands.add_parser(
        "serve",
        help="engine, workers and an OpenAI-compatible HTTP server",
        description="Serve a model over HTTP; without MODEL the bundled demo model. Flags win over VLLM_LITE_* "
        "variables, those over the file of --config.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="MODEL", nargs="?", help="folder of a Hugging Face checkpoint")
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="print all settings as such a file, and exit")
    add_flags(parser, ServeConfig)
    parser.set_defaults(run=_serve, parser=parser)


def _serve(arguments: argparse.Namespace) -> int:
    from vllm_lite.server.config import ServeConfig

    flags = {name: getattr(arguments, name) for name in ServeConfig.__struct_fields__}
    flags["model"] = arguments.folder or arguments.model
    config = ServeConfig.load(flags, file=arguments.config)
    if arguments.print_config:
        print(config.to_yaml(), end="")
        return 0
    from vllm_lite.server.serve import serve

    return serve(config)


def _add_bench_engine(
    commands: "argparse._SubParsersAction[Parser]",
) -> None:
    parser = commands.add_parser("engine", help="scheduler, messages and processes, without a model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_bench_engine)


def _bench_engine(arguments: argparse.Namespace) -> int:
    from vllm_lite.bench import engine

    figures = engine.run(lambda line: print(line, file=sys.stderr))
    print(json.dumps(figures) if arguments.json else engine.table(figures))
    return 0


def _add_bench_kernels(
    commands: "argparse._SubParsersAction[Parser]",
) -> None:
    parser = commands.add_parser("kernels", help="the native CPU kernels against memory's speed and torch")
    parser.add_argument("--parts", default="attention,linear,fused", help="[attention,linear,fused]")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, one after the other [1,2]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_bench_kernels)


def _bench_kernels(arguments: argparse.Namespace) -> int:
    from vllm_lite.bench import kernels
    from vllm_lite.errors import ConfigError

    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(kernels.PARTS):
        raise ConfigError(f"parts must be some of {', '.join(kernels.PARTS)}, got {', '.join(sorted(unknown))}")
    if not all(number.isdecimal() and int(number) > 0 for number in arguments.threads.split(",")):
        raise ConfigError(f"threads must be numbers like 1,2, got {arguments.threads!r}")
    threads = [int(number) for number in arguments.threads.split(",")]
    figures = kernels.run(parts, threads, lambda line: print(line, file=sys.stderr))
    print(json.dumps(figures) if arguments.json else kernels.table(figures))
    return 0


def _add_bench_step(
    commands: "argparse._SubParsersAction[Parser]",
) -> None:
    from vllm_lite.config import DEMO_MODEL

    parser = commands.add_parser("step", help="where the time of one decode step goes, in all processes")
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint folder [demo]")
    parser.add_argument("--streams", type=int, default=1, help="sequences that decode together [1]")
    parser.add_argument("--context", type=int, default=192, help="tokens of each, in the middle of its decoding [192]")
    parser.add_argument("--steps", type=int, default=128, help="tokens that each generates, twice [128]")
    _add_engine_flags(parser)
    parser.set_defaults(run=_bench_step)


def _bench_step(arguments: argparse.Namespace) -> int:
    from vllm_lite.bench import step

    lengths = arguments.streams, arguments.context, arguments.steps
    figures = step.run(arguments.model, *lengths, _engine_settings(arguments))
    print(json.dumps(figures) if arguments.json else step.table(figures))
    return 0


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="auto")
    for flag in ENGINE_FLAGS:
        parser.add_argument(f"--{flag.replace('_', '-')}", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig."""
    values = {name: getattr(arguments, name) for name in ("dtype", *ENGINE_FLAGS)}
    settings = {name: value for name, value in values.items() if value is not None}
    if "cpu_threads" in settings:
        settings["cpu_threads"] = int(settings["cpu_threads"])
    return settings


def _add_bench_throughput(
    commands: "argparse._SubParsersAction[Parser]",
) -> None:
    from vllm_lite.config import DEMO_MODEL

    parser = commands.add_parser("throughput", help="many requests at once against one at a time")
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint folder, 'random-100m' or 'random-500m' [demo]")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens [64]")
    parser.add_argument("--output-len", type=int, default=32, help="generated tokens [32]")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, whose medians are shown [3]")
    parser.add_argument("--compare", action="store_true", help="measure transformers' generate in turns with it")
    _add_engine_flags(parser)
    parser.set_defaults(run=_bench_throughput)


def _bench_throughput(arguments: argparse.Namespace) -> int:
    from vllm_lite.bench import throughput

    figures = throughput.run(
        arguments.model,
        arguments.num_prompts,
        (arguments.input_len, arguments.output_len),
        _engine_settings(arguments),
        compare=arguments.compare,
        repeats=arguments.repeats,
    )
    print(json.dumps(figures) if arguments.json else throughput.table(figures))
    return 0


def _add_replay(
    commands: "argparse._SubParsersAction[Parser]",
) -> None:
    parser = commands.add_parser("replay", help="decide again what a trace says was decided")
    parser.add_argument("file", help="what the engine wrote with --record")
    parser.add_argument("--until", metavar="step=N", type=_step_number, help="stop behind step N and show its state")
    parser.add_argument("--assert", dest="must_agree", action="store_true", help="exit with 1 at a divergence")
    parser.set_defaults(run=_replay)


def _step_number(text: str) -> int:
    name, _, number = text.rpartition("=")
    if name not in ("", "step") or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"must look like step=100, got {text!r}")
    return int(number)


def _replay(arguments: argparse.Namespace) -> int:
    from vllm_lite.engine.replay import Replay

    replay = Replay(arguments.file).run(arguments.until)
    print("\n".join(replay.report()))
    return int(arguments.must_agree and replay.divergence is not None)


def _add_why(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser("why", help="tell what happened to one request, and why")
    parser.add_argument("request", help="the request's id")
    parser.add_argument("file", help="what the engine wrote with --record")
    parser.set_defaults(run=_why)


def _why(arguments: argparse.Namespace) -> int:
    from vllm_lite.trace.reader import TraceReader
    from vllm_lite.trace.story import story

    print("\n".join(story(arguments.request, TraceReader(arguments.file))))
    return 0
