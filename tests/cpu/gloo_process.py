"""Rank 1 of two as a process: `python gloo_process.py MEMORY FOLDER`. It echoes the call that rank 0 asks for.

Rank 0 broadcasts one number: 0 to end, 1 to add up, 2 to gather columns of 3 and 5, 3 to be killed while rank 0 waits.
"""

import signal
import sys

import torch

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.parallel.gloo import GlooCommunicator
from vllm_lite.process_settings import WorkerGroup


def main() -> None:
    group = WorkerGroup(int(sys.argv[1]), sys.argv[2])
    rank = GlooCommunicator(Shard(1, 2), group, torch.device("cpu"), 100)
    command = torch.zeros(1, dtype=torch.int64)
    while True:
        rank.broadcast(command)
        if command == 0:
            rank.close()
            return
        if command == 1:
            rank.all_reduce(torch.arange(6, dtype=torch.bfloat16).view(2, 3))
        elif command == 2:
            x = rank.shared_rows(2, 8, torch.float32)
            x[:, 3:] = 1
            rank.gather_columns(x, (3, 5))
        else:
            signal.pause()


if __name__ == "__main__":
    main()
