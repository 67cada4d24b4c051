"""The all-reduce of two ranks on one host: ours and gloo's take turns in the same two processes.

Each rank is bound to separate cores. The ranks begin each round together. Times are medians, since the time of a call
depends on when the other rank calls.

    python -m micro.kernels_ranks RANK THREADS DESCRIPTOR FOLDER     one of the ranks; 0 prints the rows
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed
from torch._C._distributed_c10d import FileStore

from micro import child_path
from micro.kernels_timing import Row
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.kernels import cpu
from vllm_lite.parallel.shared_memory import SharedMemoryCommunicator
from vllm_lite.runtime.group_memory import create_group_memory

WORLD = 2
NUM_KB = (4, 64, 1024)
NUM_ROUNDS, CALLS_PER_ROUND = 25, 20
LIMIT_S = 120.0


def measure(num_threads: int) -> Iterator[Row]:
    """Measure with `num_threads` in each rank; nothing if there are too few cores. `ratio` is gloo's time over ours."""
    if WORLD * num_threads > len(os.sched_getaffinity(0)):
        return
    memory = create_group_memory()
    with TemporaryDirectory(prefix="vllm-lite-ranks-") as folder:
        command, environment = [sys.executable, "-m", __name__], os.environ | child_path()
        words = [str(num_threads), str(memory), folder]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *words], pass_fds=(memory,), stdout=subprocess.PIPE, text=True, env=environment
            )
            for rank in range(WORLD)
        ]
        os.close(memory)
        try:
            rows, _ = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
            if any(rank.returncode for rank in ranks):
                raise RuntimeError(f"ranks ended with status {[rank.returncode for rank in ranks]}")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    yield from json.loads(rows)


def main() -> None:
    rank, num_threads, memory = map(int, sys.argv[1:4])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank * num_threads : (rank + 1) * num_threads])
    torch.set_num_threads(num_threads)
    cpu.set_num_threads(num_threads)
    ours = SharedMemoryCommunicator(Shard(rank, WORLD), memory, shared_bytes=0, timeout_s=LIMIT_S)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = FileStore(str(Path(sys.argv[4]) / "store"), WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    rows = [_row(num_kb, ours) for num_kb in NUM_KB]
    if rank == 0:
        print(json.dumps(rows))
    torch.distributed.destroy_process_group()


def _row(num_kb: int, ours: SharedMemoryCommunicator) -> Row:
    x = torch.zeros(num_kb << 10 >> 1, dtype=torch.bfloat16)
    calls: list[Callable[[torch.Tensor], object]] = [ours.all_reduce, torch.distributed.all_reduce]
    times_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_ROUNDS):
        for call, times in zip(calls, times_s, strict=True):
            ours.barrier()
            for _ in range(CALLS_PER_ROUND):
                start_s = time.perf_counter()
                call(x)
                times.append(time.perf_counter() - start_s)
    own_s, gloo_s = map(median, times_s)
    shape = f"{num_kb} KB bfloat16, {WORLD} ranks"
    return Row(kernel="all-reduce", shape=shape, us=own_s * 1e6, gloo_us=gloo_s * 1e6, ratio=gloo_s / own_s)


if __name__ == "__main__":
    main()
