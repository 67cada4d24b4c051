"""Ranks that meet in shared memory: bits of sums, every way in which a wait can end, and the state afterwards."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.deadlines import scaled
from tests.rank_process import (
    CALLS,
    FLOATS,
    NUM_CALLS,
    SHARED_BYTES,
    Call,
    inputs,
    plain_sum,
    play,
    random_calls,
    sizes,
)
from tests.ranks import in_threads
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.errors import RankLostError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library
from vllm_lite.kernels.cpu.collectives import SLOT_BYTES, Waits
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.parallel.shared_memory import SharedMemoryCommunicator
from vllm_lite.runtime.group_memory import MAX_RANKS, create_group_memory, end_group

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

Ranks = list[SharedMemoryCommunicator]
LONG_S = 1e6
PHASES = {"spins": Waits(LONG_S, 0), "yields": Waits(0, LONG_S), "sleeps": Waits(0, 0)}


@pytest.fixture
def memory() -> Iterator[int]:
    """The descriptor of a group's memory."""
    fd = create_group_memory()
    yield fd
    os.close(fd)


def connect(memory: int, world: int, timeout_s: float | None = None, waits: Waits | None = None) -> Ranks:
    limit_s = timeout_s or scaled(30)
    return in_threads(
        world, lambda rank: SharedMemoryCommunicator(Shard(rank, world), memory, SHARED_BYTES, limit_s, waits)
    )


def play_in_threads(ranks: Ranks, calls: list[Call], seed: int) -> None:
    def run(rank: int) -> str:
        try:
            return play(ranks[rank], calls, seed)
        except BaseException:
            ranks[rank].abort()
            raise

    assert len(set(in_threads(len(ranks), run))) == 1


# ---- results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_of_all_sizes_and_types(world: int, memory: int) -> None:
    ranks = connect(memory, world)
    play_in_threads(ranks, [Call("all_reduce", size, dtype) for dtype in FLOATS for size in sizes(dtype)], seed=world)


def test_sums_on_every_instruction_set(memory: int, each_vector_isa: str) -> None:
    ranks = connect(memory, 2)
    play_in_threads(ranks, [Call("all_reduce", size, dtype) for dtype in FLOATS for size in (1, 7, 4099, 70_001)], 1)


def test_sums_on_several_threads_a_rank(memory: int) -> None:
    ranks, before = connect(memory, 2), cpu.num_threads()
    cpu.set_num_threads(3)
    try:
        play_in_threads(ranks, [Call("all_reduce", size, torch.bfloat16) for size in (300_001, 524_288, 1_100_000)], 1)
    finally:
        cpu.set_num_threads(before)


def test_a_sum_is_rounded_once_in_the_order_of_the_ranks(memory: int) -> None:
    """In bfloat16, with its eight bits, 256 + 1 + 1 is 256; in float32, 1e8 - 1e8 + 1 differs from 1e8 + 1 - 1e8."""
    ranks = connect(memory, 3)
    x = torch.tensor([[256.0, 1.0, 1.0]]).t().bfloat16()
    y = torch.tensor([[1e8, -1e8, 1.0]]).t().contiguous()

    def run(rank: int) -> tuple[float, float]:
        mine, other = x[rank].clone(), y[rank].clone()
        ranks[rank].all_reduce(mine)
        ranks[rank].all_reduce(other)
        return mine.item(), other.item()

    assert in_threads(3, run) == [(258.0, 1.0)] * 3


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("world", [2, 4])
def test_random_calls(world: int, phase: str, memory: int) -> None:
    """Ranks never wait for more than they need, so they drift apart by as much as is allowed."""
    spins_for_a_core = phase == "spins" and world > len(os.sched_getaffinity(0))  # then a meeting takes time slices
    count = 8 if spins_for_a_core else 160 // world
    play_in_threads(connect(memory, world, waits=PHASES[phase]), random_calls(world, world, count), seed=world)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(
            Call, st.sampled_from(sorted(CALLS)), st.integers(1, 70_000), st.sampled_from(FLOATS), st.integers(0, 1)
        ),
        max_size=12,
    )
)
def test_random_calls_agree_on_all_ranks(calls: list[Call]) -> None:
    memory = create_group_memory()
    play_in_threads(connect(memory, 2), calls, seed=1)
    os.close(memory)


def test_no_slot_is_written_before_all_have_read_it(memory: int) -> None:
    """Bits of the sums depend only on the latest values, so a rank that reads a later value of its neighbour is
    noticed."""
    ranks = connect(memory, 3, waits=Waits(LONG_S, 0) if (os.cpu_count() or 1) > 2 else Waits(0, 0))

    def run(rank: int) -> None:
        x = torch.empty(3000, dtype=torch.int32).view(torch.float32)
        for i in range(1000):
            x.fill_(float(i * (rank + 1)))
            ranks[rank].all_reduce(x)
            assert x.eq(float(6 * i)).all(), i

    in_threads(3, run)


def test_rows_are_one_memory_for_all_ranks(memory: int) -> None:
    """Whatever calls the ranks have made before: one that replays a graph has made fewer than one that does not."""
    ranks = connect(memory, 2)
    ranks[0].shared_rows(1, 1, torch.float32)
    rows = [rank.shared_rows(4, 8, torch.float32) for rank in ranks]
    rows[0].fill_(1)
    assert rows[1].eq(1).all()
    with pytest.raises(ValueError, match=r"share 65536 bytes for rows, got \[4, 5000\] of torch.float32: 80000"):
        ranks[0].shared_rows(4, 5000, torch.float32)


# ---- what is refused


@pytest.mark.parametrize(
    "x",
    [torch.zeros(4, 4).t(), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.float64), torch.zeros(4).int()],
    ids=["transposed", "strided", "float64", "int32"],
)
def test_an_all_reduce_of_something_else(x: torch.Tensor, memory: int) -> None:
    ranks = connect(memory, 2)
    with pytest.raises(ValueError, match=r"contiguous tensors of float32, bfloat16 or float16, got torch\.\w+ \["):
        ranks[0].all_reduce(x)
    play_in_threads(ranks, [Call("all_reduce", 5)], seed=1)


def test_an_exchange_of_something_else(memory: int) -> None:
    ranks = connect(memory, 2)
    with pytest.raises(ValueError, match="contiguous"):
        ranks[0].all_gather(torch.zeros(8)[::2])
    with pytest.raises(ValueError, match="contiguous"):
        ranks[0].broadcast(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="one of the 2 ranks, got 2"):
        ranks[0].broadcast(torch.zeros(4), 2)
    with pytest.raises(ValueError, match=r"rows of 4 columns made by `shared_rows`, got \[2, 4\]"):
        ranks[0].gather_columns(torch.zeros(2, 4), (2, 2))
    with pytest.raises(ValueError, match=r"rows of 5 columns made by `shared_rows`, got \[2, 4\]"):
        ranks[0].gather_columns(ranks[0].shared_rows(2, 4, torch.float32), (2, 3))
    play_in_threads(ranks, [Call("all_reduce", 5)], seed=1)


def test_different_calls_are_noticed(memory: int) -> None:
    ranks = connect(memory, 2)

    def run(rank: int) -> None:
        x = torch.zeros(4 + rank)
        for _ in range(2):  # nor does any later call succeed
            with pytest.raises(RuntimeError, match=f"rank {rank} made another call than other ranks"):
                ranks[rank].all_reduce(x)
        assert not x.any()

    in_threads(2, run)
    assert ranks[0].lost_rank() is None, "both are to blame"


def test_different_sizes_are_noticed(memory: int) -> None:
    def run(rank: int) -> None:
        with pytest.raises(RuntimeError, match="another call"):
            SharedMemoryCommunicator(Shard(rank, 2), memory, 1000 * (1 + rank), scaled(20))

    in_threads(2, run)
    assert os.fstat(memory).st_size == 4096


def test_the_configuration_allows_as_many_ranks_as_there_is_room_for() -> None:
    assert library.function("vllm_lite_group_max_ranks", (), library.int32)() == MAX_RANKS


def test_a_rank_cannot_join_twice(memory: int) -> None:
    connect(memory, 2)
    with pytest.raises(RuntimeError, match="rank 1 of the group has come already"):
        SharedMemoryCommunicator(Shard(1, 2), memory, SHARED_BYTES, scaled(20))
    for shard in (Shard(0, 1), Shard(2, 2), Shard(0, 99)):
        with pytest.raises(ValueError, match=f"2 to 31 ranks, got rank {shard.rank} of {shard.world}"):
            SharedMemoryCommunicator(shard, memory, SHARED_BYTES, scaled(20))


# ---- programs


def test_a_recorded_call_is_one_like_any_other(memory: int) -> None:
    """Each replay is another meeting, since the number of the meeting is in memory."""
    ranks = connect(memory, 2)
    x = torch.zeros(2, 40_000, dtype=torch.bfloat16)
    before: list[torch.Tensor] = []

    def run(rank: int) -> None:
        program = Program()
        program.record(lambda: ranks[rank].all_reduce(x[rank]))
        program.record(ranks[rank].barrier)
        assert program.names == ["vllm_lite_all_reduce", "vllm_lite_barrier"]
        for seed in range(5):
            parts = inputs(Call("all_reduce", 40_000, torch.bfloat16), seed, 2)
            x[rank] = parts[rank]
            program.replay()
            assert torch.equal(x[rank], plain_sum(parts))
            ranks[rank].all_reduce(x[rank])
        before.append(x[rank].clone())

    in_threads(2, run)
    assert torch.equal(*before)


def test_a_program_that_a_rank_ends(memory: int) -> None:
    ranks, x = connect(memory, 2), torch.zeros(10)
    program = Program()
    program.record(lambda: ranks[0].all_reduce(x))
    assert ranks[0].lost_rank() is None
    with waiting(ranks[0], program.replay) as errors:
        ranks[1].abort()
    assert isinstance(errors[0], RuntimeError)
    assert "call 0 of 1 of a recorded step failed, vllm_lite_all_reduce" in str(errors[0])
    assert ranks[0].lost_rank() == 1
    assert ranks[1].lost_rank() is None


# ---- ends


@contextmanager
def waiting(rank: SharedMemoryCommunicator, call: Callable[[], object], asleep: bool = False) -> Iterator[list[object]]:
    """The block runs while `call` waits in another thread; afterwards that has ended with the error in the list."""
    errors: list[object] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(rank.is_waiting)
    if asleep:
        until(lambda: state_of(thread) == "S")
    yield errors
    thread.join(scaled(20))
    assert not thread.is_alive()
    assert not rank.is_waiting()
    assert len(errors) == 1


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + scaled(20)
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0)


def state_of(thread: threading.Thread) -> str:
    return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0]


CALLS_THAT_WAIT: dict[str, Callable[[SharedMemoryCommunicator], object]] = {
    "all_reduce": lambda rank: rank.all_reduce(torch.zeros(5)),
    "all_gather": lambda rank: rank.all_gather(torch.zeros(5)),
    "broadcast": lambda rank: rank.broadcast(torch.zeros(5), rank.shard.rank),
    "gather_columns": lambda rank: rank.gather_columns(rank.shared_rows(1, 4, torch.float32), (2, 2)),
    "barrier": lambda rank: rank.barrier(),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("call", CALLS_THAT_WAIT)
def test_abort_ends_every_wait(call: str, phase: str, memory: int) -> None:
    ranks = connect(memory, 2, LONG_S, PHASES[phase])
    with waiting(ranks[0], lambda: CALLS_THAT_WAIT[call](ranks[0]), asleep=phase == "sleeps") as errors:
        ranks[1].abort()
    assert isinstance(errors[0], RankLostError)
    assert str(errors[0]) == "rank 0 cannot go on: rank 1 has ended the group while it waited for rank 1"
    assert ranks[0].lost_rank() == 1
    with pytest.raises(RankLostError, match="rank 1 has ended the group"):
        ranks[0].barrier()
    ranks[0].abort()
    assert (ranks[0].lost_rank(), ranks[1].lost_rank()) == (1, None), "the first one counts"


@pytest.mark.parametrize("phase", PHASES)
def test_the_engine_ends_every_wait(phase: str, memory: int) -> None:
    """The engine wakes no sleeper, so ranks look from time to time."""
    ranks = connect(memory, 3, LONG_S, PHASES[phase])
    with (
        waiting(ranks[0], lambda: ranks[0].all_reduce(torch.zeros(5)), asleep=phase == "sleeps") as first,
        waiting(ranks[2], lambda: ranks[2].all_reduce(torch.zeros(5)), asleep=phase == "sleeps") as second,
    ):
        end_group(memory)
    for rank, (error,) in ((0, first), (2, second)):
        assert isinstance(error, RankLostError)
        assert str(error) == f"rank {rank} cannot go on: the engine has ended the group while it waited for rank 1"
        assert ranks[rank].lost_rank() == 1


def test_a_group_that_has_ended_is_not_waited_for(memory: int) -> None:
    """Not even with all the others there."""
    ranks = connect(memory, 2)
    end_group(memory, 1)
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"rank 0 cannot go on: rank 1 has ended the group$"):
            ranks[0].barrier()
    with pytest.raises(RuntimeError, match="rank 1 has left its group"):
        ranks[1].barrier()
    assert not ranks[0].is_waiting()


@pytest.mark.parametrize("phase", PHASES)
def test_a_wait_has_a_deadline(phase: str, memory: int) -> None:
    ranks = connect(memory, 2, 0.5 + scaled(1), PHASES[phase])
    ranks[0]._group._record.timeout_ns = 20_000_000
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"rank 1 did not come within .* s, rank 0 waited for it"):
            ranks[0].barrier()
    assert ranks[0].lost_rank() == 1


def test_a_rank_that_joins_too_late(memory: int) -> None:
    """The late rank finds that the other one has arrived, and has given up."""
    ranks = connect(memory, 2)
    ranks[0]._group._record.timeout_ns = 20_000_000
    with pytest.raises(RankLostError, match="rank 1 did not come"):
        ranks[0].barrier()
    ranks[1].barrier()
    with waiting(ranks[1], ranks[1].barrier):
        with pytest.raises(RankLostError, match="rank 1 did not come"):
            ranks[0].barrier()
        ranks[0].abort()


def test_ranks_that_do_not_come(memory: int) -> None:
    with pytest.raises(RankLostError, match=r"rank 1 did not come within 0\.05 s"):
        SharedMemoryCommunicator(Shard(0, 2), memory, SHARED_BYTES, 0.05)
    other = create_group_memory()
    end_group(other)
    with pytest.raises(RankLostError, match="the engine has ended the group"):
        SharedMemoryCommunicator(Shard(0, 2), other, SHARED_BYTES, LONG_S)
    os.close(other)


def test_a_rank_that_has_left_makes_no_calls(memory: int) -> None:
    ranks = connect(memory, 2)
    ranks[0].close()
    with pytest.raises(RuntimeError, match="rank 0 has left its group"):
        ranks[0].barrier()
    assert ranks[0].lost_rank() is None
    ranks[0].abort()
    assert ranks[1].lost_rank() == 0


def test_a_rank_that_is_a_process_and_is_killed(memory: int) -> None:
    """This one is rank 0. The other ends at any point of its sums."""
    with started(1, 2, memory, 5) as child:
        ranks = SharedMemoryCommunicator(Shard(0, 2), memory, SHARED_BYTES, LONG_S)
        digest = play(ranks, random_calls(5, 2, NUM_CALLS), 5)
        assert child.stdout is not None
        assert child.stdout.readline().split() == [digest]
        x = torch.zeros(SLOT_BYTES)

        def go_on() -> None:
            while True:
                ranks.all_reduce(x)

        with waiting(ranks, go_on) as errors:
            child.send_signal(signal.SIGKILL)
            assert child.wait(scaled(20)) == -signal.SIGKILL
            end_group(memory, 1)
        assert isinstance(errors[0], RankLostError)
        assert ranks.lost_rank() == 1


def test_no_segment_of_shared_memory_remains(memory: int) -> None:
    """The memory has no name, and is unmapped with the last that uses it: rows outlive their communicator."""
    inode = str(os.fstat(memory).st_ino)  # other tests of this process may have groups of their own

    def is_mapped() -> bool:
        return any(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())

    ranks = connect(memory, 2)
    rows = ranks[0].shared_rows(2, 2, torch.float32)
    play_in_threads(ranks, [Call("all_reduce", 5)], seed=1)
    assert is_mapped()
    for rank in ranks:
        rank.close()
    del ranks, rank
    gc.collect()
    rows.fill_(1)
    del rows
    gc.collect()
    assert not is_mapped()
    assert not [name for name in os.listdir("/dev/shm") if "vllm_lite" in name]


# ---- processes


@contextmanager
def started(rank: int, world: int, memory: int, seed: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.rank_process", *map(str, (rank, world, memory, seed))]
    child = subprocess.Popen(command, pass_fds=(memory,), stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()
