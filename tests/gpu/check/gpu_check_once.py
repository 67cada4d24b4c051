"""Launch the most important kernels for a profiler, each twice: it measures the second launch of each.

gpu_check_once.py [--emulate]; `gpu_check` runs it under ncu, where that is installed.
"""

import argparse

import numpy as np
import torch
from gpu_check_bench import E4M3, Bench
from gpu_check_cases import open_launcher
from gpu_check_graphs import lists_for
from gpu_check_parts import emit
from gpu_check_prefill import Prefill
from gpu_check_setup import paged

from vllm_lite.kernels.cuda import sampler
from vllm_lite.kernels.sampling import DRAW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate", action="store_true")
    bench = Bench(*open_launcher(parser.parse_args().emulate))
    context, new, vocab = (40, 20, 1000) if bench.small else (8192, 4096, 128256)
    for dtype in (torch.bfloat16, E4M3):
        problem = paged(bench.shape(2 if bench.small else 64, context, 4, kv_dtype=dtype), bench.device, 0)
        work = lists_for(problem, [context] * problem.shape.batch)
        for _ in range(2):
            bench.attend(problem, 0, work)
    prefill = Prefill(bench, 1, new, bench.shape(1, new, 4)).ours()
    for _ in range(2):
        prefill(0)
    for rows in (1, 64) if not bench.small else (1,):
        draws = np.zeros(rows, DRAW)
        draws["temperature"], draws["top_k"], draws["top_p"], draws["max_distance"] = 1.0, 50, 0.9, np.inf
        logits = torch.randn(rows, vocab, device=bench.device)
        for _ in range(2):
            sampler.pick_on_device(bench.launcher, logits, draws)
    if not bench.small:
        torch.cuda.synchronize()
    emit(finished=True)


if __name__ == "__main__":
    main()
