"""Promises of every communicator, tested for each of them alike. NCCL's runs here over gloo, in the place of GPUs."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deadlines import scaled
from tests.ranks import Connect, connected, in_threads, worker_group
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.config import EngineConfig
from vllm_lite.errors import RankLostError
from vllm_lite.kernels import cpu
from vllm_lite.parallel import select
from vllm_lite.parallel.communicator import Communicator
from vllm_lite.parallel.gloo import GlooCommunicator
from vllm_lite.parallel.nccl import NcclCommunicator
from vllm_lite.parallel.process_group import gloo_group
from vllm_lite.parallel.rendezvous import GroupEnd, Rendezvous
from vllm_lite.parallel.shared_memory import SharedMemoryCommunicator
from vllm_lite.process_settings import WorkerGroup
from vllm_lite.runtime.group_memory import end_group

CPU = torch.device("cpu")
SHARED_BYTES = 1 << 20


class WaitingGroup:
    """Calls of gloo that have ended when they return, like calls on one stream of a GPU for later calls."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> None:
        assert not opts.asyncOp
        self._group.allreduce(tensors).wait()

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> None:  # noqa: A002
        assert not opts.asyncOp
        self._group._allgather_base(output.view(-1), input.view(-1)).wait()

    def abort(self) -> None:
        pass


def connect_gloo(shard: Shard, group: WorkerGroup) -> Communicator:
    return GlooCommunicator(shard, group, CPU, scaled(20))


def connect_shared_memory(shard: Shard, group: WorkerGroup) -> Communicator:
    return SharedMemoryCommunicator(shard, group.memory, SHARED_BYTES, scaled(20))


def connect_like_nccl(shard: Shard, group: WorkerGroup) -> Communicator:
    end = GroupEnd(shard, group.memory)
    store = Rendezvous("gpus", shard, group).meet(end, scaled(20))
    gpus: Any = WaitingGroup(gloo_group(store, shard, scaled(20)))
    return NcclCommunicator(connect_gloo(shard, group), gpus, CPU, end)


EXACT = [
    pytest.param(connect_gloo, id="gloo"),
    pytest.param(
        connect_shared_memory,
        id="shared-memory",
        marks=pytest.mark.skipif(not cpu.available(), reason="no native library"),
    ),
]
ALL = [*EXACT, pytest.param(connect_like_nccl, id="nccl")]


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(100).to(dtype)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum in float32, in the order of the ranks, and round once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def all_reduced(ranks: list[Communicator], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    results = [part.clone() for part in parts]
    in_threads(len(ranks), lambda rank: ranks[rank].all_reduce(results[rank]))
    return results


def broadcasted(ranks: list[Communicator], parts: list[torch.Tensor], source: int) -> list[torch.Tensor]:
    results = [part.clone() for part in parts]
    in_threads(len(ranks), lambda rank: ranks[rank].broadcast(results[rank], source))
    return results


@pytest.mark.parametrize("connect", EXACT)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_have_the_same_bits_on_all_ranks(connect: Connect, world: int, tmp_path: Path) -> None:
    with connected(connect, world, tmp_path) as ranks:
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            for shape in ((1, 1), (1, 576), (3, 65), (40, 1000), (0, 8)):
                parts = [random(*shape, dtype=dtype, seed=10 * seed + rank) for rank in range(world)]
                for result in all_reduced(ranks, parts):
                    assert torch.equal(result, summed(parts)), (dtype, shape)


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300, 1e10])
def test_ranks_that_may_wait_for_ever_do_meet(backend: str, timeout_s: float, tmp_path: Path) -> None:
    settings = {"device": "cpu", "tensor_parallel_size": 2, "tensor_parallel_backend": backend}
    config = EngineConfig.check(settings | {"ready_timeout_s": timeout_s})
    resolved = config.resolve(max_position_embeddings=64, dtype="float32", model_path="/model")

    def connect(shard: Shard, group: WorkerGroup) -> Communicator:
        return select.connect(resolved, shard.rank, group, CPU, SHARED_BYTES)

    with connected(connect, 2, tmp_path) as ranks:
        assert [x.item() for x in all_reduced(ranks, [torch.ones(1, 1)] * 2)] == [2, 2]


def test_sums_that_a_gpu_makes_reach_all_ranks(tmp_path: Path) -> None:
    with connected(connect_like_nccl, 3, tmp_path) as ranks:
        parts = [random(5, 64, dtype=torch.float32, seed=rank) for rank in range(3)]
        for result in all_reduced(ranks, parts):
            torch.testing.assert_close(result, summed(parts))


@pytest.mark.parametrize("connect", ALL)
@pytest.mark.parametrize("widths", [(64, 64), (128, 64, 3), (0, 5, 64)])
def test_columns_of_different_widths(connect: Connect, widths: tuple[int, ...], tmp_path: Path) -> None:
    world, total = len(widths), sum(widths)
    with connected(connect, world, tmp_path) as ranks:
        for num_rows in (1, 7):
            expected = random(num_rows, total, dtype=torch.float32, seed=num_rows)

            def gather(rank: int, num_rows: int = num_rows, expected: torch.Tensor = expected) -> torch.Tensor:
                ranks[rank].barrier()  # no rank may overwrite memory that another one still reads
                x = ranks[rank].shared_rows(num_rows, total, torch.float32)
                own = slice(sum(widths[:rank]), sum(widths[: rank + 1]))
                x[:, own] = expected[:, own]
                ranks[rank].gather_columns(x, widths)
                return x.clone()

            for x in in_threads(world, gather):
                assert torch.equal(x, expected)


@pytest.mark.parametrize("connect", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_small_tensors_are_gathered_and_broadcast(connect: Connect, dtype: torch.dtype, tmp_path: Path) -> None:
    world = 3
    parts = [random(2, 3, dtype=torch.float32, seed=rank).gt(0).to(dtype) for rank in range(world)]
    with connected(connect, world, tmp_path) as ranks:
        for gathered in in_threads(world, lambda rank: ranks[rank].all_gather(parts[rank])):
            assert torch.equal(gathered, torch.stack(parts))
        assert in_threads(world, lambda rank: ranks[rank].all_gather(torch.empty(0, 3))) != []
        for source in range(world):
            for x in broadcasted(ranks, parts, source):
                assert torch.equal(x, parts[source])


@pytest.mark.parametrize("connect", ALL)
def test_no_rank_leaves_a_barrier_before_all_have_arrived(connect: Connect, tmp_path: Path) -> None:
    come: list[int] = []
    with connected(connect, 3, tmp_path) as ranks:

        def meet(rank: int) -> int:
            come.append(rank)
            ranks[rank].barrier()
            return len(come)

        assert in_threads(3, meet) == [3, 3, 3]


@pytest.mark.parametrize("connect", ALL)
def test_a_waiting_rank_reports_it_and_continues_once_the_others_arrive(connect: Connect, tmp_path: Path) -> None:
    with connected(connect, 2, tmp_path) as ranks:
        assert [rank.is_waiting() for rank in ranks] == [False, False]

        def meet(rank: int) -> None:
            if rank == 1:
                wait_until_waiting(ranks[0])
            ranks[rank].barrier()

        in_threads(2, meet)
        assert [rank.is_waiting() for rank in ranks] == [False, False]


@pytest.mark.parametrize("connect", ALL)
def test_a_rank_that_aborts_sets_the_others_free_and_is_named(connect: Connect, tmp_path: Path) -> None:
    with connected(connect, 3, tmp_path) as ranks:
        assert [rank.lost_rank() for rank in ranks] == [None, None, None]

        def lose(rank: int) -> None:
            if rank == 2:
                wait_until_waiting(ranks[0])
                wait_until_waiting(ranks[1])
                ranks[2].abort()
                ranks[2].abort()
                return
            with pytest.raises(RankLostError, match="rank 2"):
                ranks[rank].barrier()
            for call in (ranks[rank].barrier, lambda: ranks[rank].all_reduce(torch.zeros(1, 4))):
                with pytest.raises(RankLostError, match="rank 2"):
                    call()
            ranks[rank].abort()  # as a rank does that fails because of another: the first one counts

        in_threads(3, lose)
        assert [rank.lost_rank() for rank in ranks] == [2, 2, None]


@pytest.mark.parametrize("connect", ALL)
def test_no_call_begins_once_the_group_has_ended(connect: Connect, tmp_path: Path) -> None:
    with connected(connect, 2, tmp_path) as ranks:
        ranks[1].abort()

        def call(rank: int) -> bool:
            try:
                ranks[rank].all_gather(torch.zeros(4))
            except RankLostError:
                return False
            except RuntimeError:  # rank 1 may also fail because of its own call
                return rank != 1
            return True

        assert not in_threads(2, call)[0]


@pytest.mark.parametrize("connect", ALL)
def test_the_engine_ends_a_group(connect: Connect, tmp_path: Path) -> None:
    with worker_group(tmp_path) as group:
        ranks = in_threads(2, lambda rank: connect(Shard(rank, 2), group))
        waiting = threading.Thread(target=end_when, args=(ranks[0], group), daemon=True)
        waiting.start()
        with pytest.raises(RankLostError, match="the engine"):
            ranks[0].broadcast(torch.zeros(3), 1)
        assert ranks[0].lost_rank() in (None, 1), "at most the rank that it was waiting for"
        waiting.join()
        in_threads(2, lambda rank: ranks[rank].close())


def end_when(waiting: Communicator, group: WorkerGroup) -> None:
    wait_until_waiting(waiting)
    end_group(group.memory)


def wait_until_waiting(communicator: Communicator) -> None:
    deadline_s = time.monotonic() + scaled(20)
    while not communicator.is_waiting():
        assert time.monotonic() < deadline_s, "it does not wait"
        threading.Event().wait(0.001)
