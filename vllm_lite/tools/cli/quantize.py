"""Write a quantized checkpoint of MODEL to the folder --out, in compressed-tensors' format, which vLLM reads, too.
`serve` reads it like any other. Needs about as much memory as the largest file written, 4 GiB."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_lite.checkpoint import hub
from vllm_lite.config import DEMO_MODEL, demo_folder

SCHEMES = ("int4", "int4_g32", "int8", "fp8")
SHOWN = 5
"""Maximum number of matrices that are printed."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face checkpoint, org/model, or demo")
    parser.add_argument(
        "--scheme",
        choices=SCHEMES,
        default="int4",
        help="int4: a scale per 128 inputs of an output; int4_g32: per 32; int8 and fp8: per output (int4)",
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to write, which must be new or empty")


def run(arguments: argparse.Namespace) -> int:
    os.getcwd()  # raises an error if the folder was removed, where torch's libraries would end the process

    from vllm_lite.tools.quantize.checkpoint import quantize_checkpoint  # imports torch, which takes a second

    is_demo = arguments.model == DEMO_MODEL
    source = Path(demo_folder() if is_demo else hub.local_folder(hub.HubSource(arguments.model), what="model"))
    bar = tqdm(desc="quantizing", unit="B", unit_scale=True, file=sys.stderr, disable=not sys.stderr.isatty())
    with bar, _ended_by_signals():

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        written = quantize_checkpoint(source, Path(arguments.out), arguments.scheme, progress)
    print(f"{written.folder}: {written.num_quantized} matrices as {arguments.scheme}, {_size(written.num_bytes)}")
    if written.kept:
        more = f" and {len(written.kept) - SHOWN} more" if len(written.kept) > SHOWN else ""
        print(f"not divisible into whole groups, kept as they are: {', '.join(written.kept[:SHOWN])}{more}")
    print(f"Try: vllm-lite serve {written.folder}")
    return 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A block in which SIGTERM and SIGHUP end the process like Ctrl-C, so that no incomplete files are left."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
