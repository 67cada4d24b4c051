"""The native thread pool: every task runs once, whatever else the machine does."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.deadlines import scaled
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.library import function, int64, pointer

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

FORK = """
import os
from tests.cpu.test_thread_pool import others_take_part
from vllm_lite.kernels import cpu
cpu.set_num_threads(3)
assert others_take_part()
child = os.fork()
assert others_take_part()
if child:
    _, status = os.waitpid(child, 0)
    assert status == 0, status
"""


CPUS = """
import os, time
from tests.cpu.test_thread_pool import count_tasks
from tests.deadlines import scaled
from vllm_lite.kernels import cpu

def tasks():
    return {int(name) for name in os.listdir("/proc/self/task")}

def cpus():
    return [os.sched_getaffinity(thread) for thread in tasks() - others]

def wake_from(own):
    time.sleep(0.001)  # longer than threads spin: the next job wakes them
    within = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {own})
    os.sched_setaffinity(0, within)
    count_tasks(30, work=20_000)

def await_cpus(own, expected):
    deadline_s = time.monotonic() + scaled(20)
    while cpus() != expected:
        assert time.monotonic() < deadline_s, (cpus(), expected)
        wake_from(own)

others, allowed = tasks(), os.sched_getaffinity(0)
one, two = allowed
cpu.set_num_threads(2)
for own, other in ((one, two), (two, one), (one, two), (two, one)):
    await_cpus(own, [{other}])
for thread in tasks():  # as `taskset --all-tasks` does
    os.sched_setaffinity(thread, {one})
for _ in range(20):
    wake_from(one)
    assert cpus() == [{one}]
for thread in tasks():
    os.sched_setaffinity(thread, allowed)
await_cpus(two, [{one}])
cpu.set_num_threads(2, binds=False)
await_cpus(one, [allowed])
cpu.set_num_threads(2)
await_cpus(one, [{two}])
cpu.set_num_threads(3)
await_cpus(one, [allowed, allowed])
"""


FIRST, BY_THREAD = 0, 1


def count_tasks(
    num_tasks: int, work: int = 0, nested: int = 0, order: int = FIRST
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:  # both [num_tasks]
    """Count the runs of each task, nested ones included; and name the thread that ran it last."""
    counts, threads = np.zeros(num_tasks, np.int32), np.full(num_tasks, -1, np.int32)
    count = function("vllm_lite_count_tasks", (int64, int64, int64, int64, pointer, pointer))
    count(num_tasks, work, nested, order, counts.ctypes.data, threads.ctypes.data)
    return counts, threads


def others_take_part() -> bool:
    """Whether another thread than the calling one takes tasks. It may wake up too late for a job, but not for all."""
    for _ in range(1000):
        counts, threads = count_tasks(30, work=20_000)
        assert (counts == 1).all()
        if len(set(threads.tolist())) > 1:
            return True
    return False


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


@pytest.mark.parametrize("order", [FIRST, BY_THREAD])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 16])
def test_every_task_runs_once(num_threads: int, order: int) -> None:
    """Includes more threads than cores, and jobs so short that most threads come too late."""
    cpu.set_num_threads(num_threads)
    assert cpu.num_threads() == num_threads
    for num_tasks in [0, 1, 2, 3, 100, *range(300), 2**16 - 1, 2**16, 2**17 + 1]:
        counts, threads = count_tasks(num_tasks, work=num_tasks % 7 * 100 if num_tasks < 300 else 0, order=order)
        assert (counts == 1).all()
        assert ((threads >= 0) & (threads < num_threads)).all()


def test_parts_are_begun_by_their_threads_and_ended_by_others() -> None:
    cpu.set_num_threads(3)
    helped = False
    for num_tasks in range(2, 200):
        _, threads = count_tasks(num_tasks, work=2000, order=BY_THREAD)
        for thread in range(3):
            part = threads[num_tasks * thread // 3 : num_tasks * (thread + 1) // 3] == thread
            assert part[: part.sum()].all()
            helped = helped or (0 < part.sum() < len(part))
    assert helped


def test_other_threads_take_part() -> None:
    cpu.set_num_threads(3)
    assert others_take_part()


def test_the_number_of_threads_may_change_at_any_time() -> None:
    for num_threads in [4, 1, 2, 7, 3, 3, 1, 4] * 10:
        cpu.set_num_threads(num_threads)
        counts, threads = count_tasks(20, work=500)
        assert (counts == 1).all()
        assert threads.max() < num_threads
    with pytest.raises(ValueError, match="at least 1, got 0"):
        cpu.set_num_threads(0)


def test_nested_jobs_run_in_their_task() -> None:
    cpu.set_num_threads(4)
    for _ in range(50):
        assert (count_tasks(40, nested=5)[0] == 6).all()


def test_two_threads_may_call_at_once() -> None:
    """The second caller works without the pool."""
    cpu.set_num_threads(3)
    wrong: list[NDArray[np.int32]] = []
    start = threading.Barrier(3)

    def call() -> None:
        start.wait(scaled(10))
        for _ in range(200):
            counts, _ = count_tasks(30, work=1000)
            if (counts != 1).any():
                wrong.append(counts)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(scaled(30))
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)


def test_a_forked_child_starts_threads_of_its_own() -> None:
    result = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=scaled(30), check=False
    )
    assert result.returncode == 0, result.stderr


def test_with_a_thread_for_each_cpu_none_is_on_the_callers() -> None:
    """Wherever the system moves the caller. CPUs that the user takes away stay unused, and with more threads than CPUs
    they may run on all."""
    two = sorted(os.sched_getaffinity(0))[:2]
    if len(two) < 2:
        pytest.skip("there is one CPU")
    result = subprocess.run(
        [sys.executable, "-c", CPUS],
        preexec_fn=lambda: os.sched_setaffinity(0, two),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert result.returncode == 0, result.stderr


def count_fetches(reads: list[tuple[int, int]], first: int, next_read: int, thread: int) -> int:
    """Count the pieces of 1 KiB that one of two threads fetches of reads, (bytes of a block, blocks) each."""
    memory = np.zeros(8, np.uint8)
    records = np.array([(memory.ctypes.data, *read) for read in reads], np.int64)
    count = function("vllm_lite_count_fetches", (pointer, int64, int64, int64, int64, int64), int64)
    return int(count(records.ctypes.data, len(reads), first, next_read, thread, 2))


def test_waiting_threads_fetch_their_part_of_the_next_weights() -> None:
    """Half a MB is the most that one fetches. The second has the blocks [5, 10), [2, 5), [1, 2) and [500, 1000)."""
    reads, most = [(1024, 10), (512, 5), (1000, 2), (4096, 1000)], 512 * 1024
    assert count_fetches(reads, 1000, 1000, 1) == 5 + 2 + 1 + -(-(most - 5 * 1024 - 3 * 512 - 1000) // 1024)
    assert count_fetches(reads, 1000, 1001, 1) == 2 + 1 + -(-(most - 3 * 512 - 1000) // 1024)
    assert count_fetches([(1024, 9)] * 4, 1000, 1000, 0) == 4 * 4
