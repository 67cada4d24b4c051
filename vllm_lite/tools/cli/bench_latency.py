"""Measure how long one batch takes, from its prompts to its last tokens."""

import argparse

from vllm_lite.config import DEMO_MODEL
from vllm_lite.errors import ConfigError
from vllm_lite.tools.cli.bench_common import add_engine_flags, add_json_flag, engine_settings, save_json, show


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens [32]")
    parser.add_argument("--output-len", type=int, default=128, help="generated tokens [128]")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts that run together [8]")
    parser.add_argument("--n", type=int, default=1, help="samples of each prompt [1]")
    parser.add_argument("--use-beam-search", action="store_true", help="n beams instead of n samples")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="batches before those that are measured [10]")
    parser.add_argument("--num-iters", type=int, default=30, help="batches [30]")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_argument("--output-json", metavar="FILE", help="write avg_latency, latencies and percentiles")
    add_json_flag(parser)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools.bench import latency

    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    figures = latency.run(
        arguments.model or DEMO_MODEL,
        (arguments.batch_size, arguments.input_len, arguments.output_len),
        (max(arguments.num_iters_warmup, 0), arguments.num_iters),
        engine_settings(arguments),
        sampling={"n": arguments.n, "use_beam_search": arguments.use_beam_search},
        show_progress=not arguments.disable_tqdm,
    )
    if arguments.output_json is not None:
        save_json(arguments.output_json, figures)
    return show(arguments, figures, latency.table)
