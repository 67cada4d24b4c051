"""Compiles the kernels that `gpu_check` needs, ahead of time: gpu_check_kernels.py FOLDER [--arch sm_90].

It needs no GPU. The keys of the cache do not depend on the machine, so a machine with the same version of NVRTC finds
these kernels. The list has the kernels that the tests name, that the cases launch, and that workers and measurements
request with the sizes of a GPU; a launcher that launches nothing records these. Kernels that are not in the list are
compiled on the other machine, and `gpu_check` counts them.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_check_linear import KINDS, OTHER_WAYS, ROWS, bounds, random_weight
from gpu_check_prefill import TABLE_SHAPES

from tests.kernels.cases import Recorder, all_cases, needed_by
from tests.kernels.instantiations import INSTANTIATIONS
from vllm_lite.kernels.cuda.attention import decode_attention, prefill_attention
from vllm_lite.kernels.cuda.compiler import KernelCompiler, Nvrtc
from vllm_lite.kernels.cuda.weights.many_rows import for_weight
from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear

ARCH = "sm_90"
Name = tuple[str, str]
"""A file of csrc/cuda and an instantiation."""
BF16 = torch.bfloat16
HEADS = ((128, 1), (128, 4), (128, 8), (64, 1), (64, 4), (64, 8))
"""Head size, and query heads per KV head, in measurements and models."""
WORKERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("1b", "bfloat16", {}),
    ("8b", "bfloat16", {}),
    ("8b", "bfloat16", {"quantization": "int4"}),
)


def wanted() -> list[Name]:
    """All kernels that a run of `gpu_check` is known to request."""
    names = dict.fromkeys((one.source, one.name) for one in INSTANTIATIONS)
    for source in (of_cases(), of_measurements(), of_workers()):
        names |= dict.fromkeys(source)
    return list(names)


def of_cases() -> Iterator[Name]:
    for cases in all_cases().values():
        yield from ((source, name) for source, names in needed_by(cases.values()).items() for name in names)


def of_measurements() -> Iterator[Name]:
    caches = (BF16, torch.float8_e4m3fn)
    for head_size, group in HEADS:
        for kv_dtype in caches:
            for block_size in (8, 16):
                shape = (BF16, kv_dtype, head_size, group, block_size)
                yield decode_attention.SOURCE, decode_attention.kernel_name(*shape)
                name = decode_attention.cascade_name(BF16, kv_dtype, head_size, block_size)
                yield decode_attention.CASCADE_SOURCE, name
    roomy = Recorder.multiprocessor_bytes
    for head_size in {size for size, *_ in TABLE_SHAPES}:
        keys = prefill_attention.keys_a_tile(head_size, roomy)
        yield prefill_attention.SOURCE, prefill_attention.kernel_name(BF16, BF16, head_size, keys)
    yield from of_linear_layers()


def of_linear_layers() -> Iterable[Name]:
    recorder, device = Recorder(), torch.device("cpu")
    for size in ((4096, 4096), (28672, 1024)):
        for kind in KINDS:
            weight = random_weight(kind, size, device)
            layer = PackedLinear(recorder, weight, None, for_weight(recorder, weight, float8_rows=False))
            for rows in ROWS:
                x = torch.zeros(rows, size[1], dtype=BF16)
                layer.forward(x, torch.empty(rows, size[0], dtype=BF16))
            for rows in OTHER_WAYS:
                x = torch.zeros(rows, size[1], dtype=BF16)
                with bounds(rows, rows):
                    layer.forward(x, torch.empty(rows, size[0], dtype=BF16))
    recorder.kernel("packed_linear.cuh", "plain_codes")
    return recorder.names


def of_workers() -> Iterable[Name]:
    """Kernels that whole workers with few layers request: for prompts and decodes, greedy and sampled, with few and
    many sequences."""
    import gpu_check_models as models

    recorder = Recorder()
    end = models.launch_with(recorder)
    try:
        for name, dtype, settings in WORKERS:
            run_worker(name, dtype, settings)
    finally:
        end()  # or the library that is carried along would seem not to be there
    return recorder.names


def run_worker(name: str, dtype: str, settings: dict[str, Any]) -> None:
    import gpu_check_models as models
    from gpu_check_step import GREEDY, RANDOM, Steps

    from vllm_lite.worker.device import Device

    narrow = {"hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
    heads = {"head_dim": models.MODELS[name].get("head_dim", 128), "max_position_embeddings": 2048}
    models.MODELS["narrow"] = models.MODELS[name] | narrow | heads
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 2048}
    device = Device(torch.device("cpu"), models.HostMemory())
    worker = models.RandomWorker("narrow", device, dtype=dtype, **limits, **settings)
    steps = Steps("narrow", worker)
    for batch in (1, 8, 64):
        for sampling in (GREEDY, RANDOM):
            with contextlib.suppress(Exception), steps.decoding(batch, 300, sampling) as going:
                worker.run(going)
    with contextlib.suppress(Exception):
        worker.run([steps.request(0, 300, 1)])
    worker.close()


# ---- compiling


@cache
def compiler(arch: str, folder: str) -> KernelCompiler:
    """The product's, over whichever way to NVRTC is here."""
    try:
        from vllm_lite.kernels.cuda.cupy_launcher import CupyNvrtc

        nvrtc: Nvrtc = CupyNvrtc()
    except Exception:  # CuPy is missing, or has no NVRTC
        from tests.kernels.nvrtc import nvrtc as bindings

        nvrtc = bindings()
    return KernelCompiler(nvrtc, arch, Path(folder))


def compile_one(arch: str, folder: str, name: Name) -> bool:
    """Returns whether it had to be compiled."""
    own = compiler(arch, folder)
    before = own.num_compiled
    own.compile(*name)
    return own.num_compiled > before


def fill(folder: Path, arch: str, names: Iterable[Name]) -> int:
    """Compile the kernels that a cache folder lacks, and remove those that are not in the list. Returns the number of
    compiled kernels."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    named = list(names)
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn")) as pool:
        count = len(named)
        made = sum(pool.map(compile_one, [arch] * count, [str(folder)] * count, named))
    kept = {compiler(arch, str(folder)).path_of(*name).name for name in named}
    for path in folder.glob("*.cubin"):
        if path.name not in kept:
            path.unlink()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default=ARCH)
    arguments = parser.parse_args()
    start_s = time.monotonic()
    names = wanted()
    made = fill(arguments.folder, arguments.arch, names)
    size = sum(path.stat().st_size for path in arguments.folder.glob("*.cubin"))
    print(
        f"{len(names)} kernels for {arguments.arch}, {made} of them compiled now: {size / 1e6:.1f} MB, "
        f"{time.monotonic() - start_s:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
