"""Part of `gpu_check`: ranks that share a model, on one GPU.

- world 1 over NCCL: every call, then the same inside a CUDA graph that is replayed with other numbers; the end of the
  group must be noticed
- world 2 over gloo, two processes on one device: every call
- the demo model at world 2 over gloo: its greedy tokens must be those of one rank

With `--emulate` gloo takes the place of NCCL, and everything runs on the CPU.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from gpu_check_parts import parser_of, run_checks
from gpu_check_setup import capture

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.errors import RankLostError
from vllm_lite.parallel.communicator import Communicator, SingleRank
from vllm_lite.parallel.gloo import GlooCommunicator
from vllm_lite.parallel.nccl import connect_nccl
from vllm_lite.process_settings import WorkerGroup
from vllm_lite.runtime.group_memory import create_group_memory, end_group

TIMEOUT_S = 60.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROMPTS = ("The", "Once upon a time", "Every rank", "1, 2, 3, 4")
NUM_TOKENS = 24


@contextmanager
def worker_group() -> Iterator[WorkerGroup]:
    memory = create_group_memory()
    try:
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
            yield WorkerGroup(memory, folder)
    finally:
        os.close(memory)


# ---- calls of every communicator


def parts_of(world: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """One part for each rank, of whole numbers, so that sums are exact in every order and type."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for _ in range(world)]


def check_calls(rank: Communicator, device: torch.device) -> str | None:
    """Find the first call with a wrong result. All ranks must call this."""
    own, world = rank.shard.rank, rank.shard.world
    for seed, dtype in enumerate(DTYPES):
        for rows in (1, 7, 300):
            parts = parts_of(world, (rows, 1000), dtype, seed)
            x = parts[own].to(device, copy=True)
            rank.all_reduce(x)
            if not torch.equal(x.cpu(), torch.stack(parts).sum(0)):
                return f"all_reduce of {rows} rows of {dtype}"
    widths = tuple(64 + 3 * other for other in range(world))
    if not torch.equal(gathered(rank, widths), expected_columns(widths)):
        return "gather_columns"
    if rank.all_gather(torch.tensor([own, 7])).tolist() != [[other, 7] for other in range(world)]:
        return "all_gather"
    x = torch.tensor([own])
    rank.broadcast(x, world - 1)
    rank.barrier()
    return None if x.item() == world - 1 else "broadcast"


def expected_columns(widths: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(5 * sum(widths), dtype=torch.float32).view(5, -1)


def gathered(rank: Communicator, widths: tuple[int, ...]) -> torch.Tensor:
    expected = expected_columns(widths)
    x = rank.shared_rows(expected.shape[0], expected.shape[1], torch.float32).zero_()
    own = slice(sum(widths[: rank.shard.rank]), sum(widths[: rank.shard.rank + 1]))
    x[:, own] = expected[:, own].to(x.device)
    rank.gather_columns(x, widths)
    return x.cpu()


# ---- world 1 over NCCL


def world_one(device: torch.device) -> str | None:
    with worker_group() as group:
        host = cast("Communicator", SingleRank(torch.device("cpu")))
        if device.type == "cuda":
            rank: Communicator = connect_nccl(host, group, device, TIMEOUT_S)
        else:
            rank = cast("Communicator", GlooCommunicator(Shard(0, 1), group, device, TIMEOUT_S))
        try:
            return check_calls(rank, device) or check_graph(rank, device) or check_end(rank, device, group)
        finally:
            rank.close()


def check_graph(rank: Communicator, device: torch.device) -> str | None:
    """Calls between other kernels, captured once and replayed with other numbers."""
    x, logits = torch.zeros(4, 512, device=device), torch.zeros(4, 64, device=device)

    def run() -> None:
        doubled = x * 2
        rank.all_reduce(doubled)
        logits.copy_(doubled[:, :64] + 1)
        rank.gather_columns(logits, (64,))

    replay = capture(run)
    for number in range(3):
        x.fill_(number)
        replay()
        if not torch.equal(logits.cpu(), torch.full((4, 64), 2.0 * number + 1)):
            return f"replay {number} of a graph"
    return None


def check_end(rank: Communicator, device: torch.device, group: WorkerGroup) -> str | None:
    end_group(group.memory)
    try:
        rank.all_reduce(torch.zeros(1, 4, device=device))
    except RankLostError:
        return None
    return "a call behind the end of its group"


# ---- world 2 over gloo


def world_two(device: torch.device) -> str | None:
    """This process is rank 0, and starts another one of this script as rank 1."""
    with worker_group() as group:
        command = [sys.executable, __file__, "--rank-1", str(group.memory), group.folder]
        if device.type == "cpu":
            command.append("--emulate")
        with subprocess.Popen(command, pass_fds=[group.memory]) as peer:
            try:
                problem = as_rank(0, group, device)
                status = peer.wait(TIMEOUT_S)
            finally:
                peer.kill()
    return problem or (f"rank 1 ended with status {status}" if status else None)


def as_rank(own: int, group: WorkerGroup, device: torch.device) -> str | None:
    rank = cast("Communicator", GlooCommunicator(Shard(own, 2), group, device, TIMEOUT_S))
    try:
        return check_calls(rank, device)
    finally:
        rank.close()


# ---- a model


def greedy_tokens(device: torch.device, size: int) -> list[list[int]]:
    """Tokens of the demo model on `size` ranks, in float32, so that rounding does not change a token."""
    from vllm_lite import LLM, SamplingParams

    settings: dict[str, Any] = {"tensor_parallel_size": size, "tensor_parallel_backend": "gloo", "device": device.type}
    settings["single_process"] = device.type == "cpu"  # emulated ranks may as well be threads, which start sooner
    with LLM(dtype="float32", enforce_eager=True, gpu_memory_utilization=0.3, **settings) as llm:
        results = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def same_tokens(device: torch.device) -> str | None:
    one, two = (greedy_tokens(device, size) for size in (1, 2))
    return None if one == two else f"{two} instead of {one}"


CHECKS: dict[str, Callable[[torch.device], str | None]] = {
    "world 1 over nccl": world_one,
    "world 2 over gloo": world_two,
    "demo model at world 2 over gloo": same_tokens,
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--rank-1", nargs=2, metavar=("MEMORY", "FOLDER"), help="the other rank, which this script starts"
    )
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.emulate else "cuda:0")
    if arguments.rank_1:
        memory, folder = arguments.rank_1
        problem = as_rank(1, WorkerGroup(int(memory), folder), device)
        print(f"rank 1: {problem or 'equal'}", file=sys.stderr)
        return int(problem is not None)
    run_checks({name: partial(check, device) for name, check in CHECKS.items()}, arguments.first, lambda: True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
