"""One rank of a group in shared memory, and the calls that tests let ranks make, as threads or as processes.

python -m tests.rank_process RANK WORLD DESCRIPTOR SEED    prints a digest of all results, then sums up until killed
"""

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tests.deadlines import scaled
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.kernels.cpu.collectives import SLOT_BYTES
from vllm_lite.parallel.communicator import Communicator
from vllm_lite.parallel.shared_memory import SharedMemoryCommunicator

SHARED_BYTES = 1 << 16
NUM_CALLS = 50
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ALONE_BYTES = 64 << 10
"""Larger tensors are summed up in parts."""


class Call(NamedTuple):
    name: str
    size: int
    dtype: torch.dtype = torch.float32
    source: int = 0


def sizes(dtype: torch.dtype) -> list[int]:
    """Numbers of elements on both sides of every limit."""
    parts, slot = ALONE_BYTES // dtype.itemsize, SLOT_BYTES // dtype.itemsize
    return [1, 7, 4096, parts - 1, parts, parts + 1, slot - 1, slot, slot + 1, 2 * slot + 77]


def random_calls(seed: int, world: int, count: int) -> list[Call]:
    rng = random.Random(seed)
    calls = []
    for _ in range(count):
        name, dtype = rng.choice(sorted(CALLS)), rng.choice(FLOATS)
        size = rng.choice(sizes(dtype)) if rng.random() < 0.2 else rng.randrange(1, 3000)
        calls.append(Call(name, size, dtype, rng.randrange(world)))
    return calls


def inputs(call: Call, seed: int, world: int) -> list[torch.Tensor]:
    """Inputs of each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(call.size, generator=generator).mul_(100).to(call.dtype) for _ in range(world)]


def plain_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all parts in float32, in the order of the ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _all_reduce(ranks: Communicator, _call: Call, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = parts[ranks.shard.rank].clone()
    ranks.all_reduce(x)
    return x, plain_sum(parts)


def _all_gather(ranks: Communicator, _call: Call, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return ranks.all_gather(parts[ranks.shard.rank]), torch.stack(parts)


def _broadcast(ranks: Communicator, call: Call, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = parts[ranks.shard.rank].clone()
    ranks.broadcast(x, call.source)
    return x, parts[call.source]


def _columns(ranks: Communicator, call: Call, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather rows with one column from each rank, and two from rank 0."""
    rank, world = ranks.shard.rank, ranks.shard.world
    widths = (2,) + (1,) * (world - 1)
    num_rows = min(call.size, 300)
    expected = torch.stack([parts[0], *parts])[:, :num_rows].t().float()
    rows = ranks.shared_rows(num_rows, world + 1, torch.float32)
    start = sum(widths[:rank])
    rows[:, start : start + widths[rank]] = expected[:, start : start + widths[rank]]
    ranks.gather_columns(rows, widths)
    got = rows.clone()
    ranks.barrier()  # no rank may overwrite them before all have read them
    return got, expected


def _barrier(ranks: Communicator, _call: Call, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    ranks.barrier()
    return parts[0], parts[0]


CALLS: dict[str, Callable[[Communicator, Call, list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "columns": _columns,
    "barrier": _barrier,
}
"""Name of a call -> a function that makes it and returns its result and the expected result."""


def play(ranks: Communicator, calls: Sequence[Call], seed: int) -> str:
    """Make the calls and compare each result with the expected one. Returns a digest of all results."""
    digest = hashlib.sha256()
    for i, call in enumerate(calls):
        got, expected = CALLS[call.name](ranks, call, inputs(call, 1000 * seed + i, ranks.shard.world))
        assert torch.equal(got, expected), f"call {i} on rank {ranks.shard.rank}: {call}"
        digest.update(got.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    rank, world, memory, seed = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    ranks = SharedMemoryCommunicator(Shard(rank, world), memory, SHARED_BYTES, scaled(60))
    print(play(ranks, random_calls(seed, world, NUM_CALLS), seed), flush=True)
    x = torch.zeros(SLOT_BYTES)
    while True:
        ranks.all_reduce(x)


if __name__ == "__main__":
    main()
