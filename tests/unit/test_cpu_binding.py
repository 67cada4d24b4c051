"""Distribution of a machine's cores to its workers, on machines written into a folder."""

import ctypes
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.deadlines import scaled
from tests.fake_sys import make_sys
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.runtime import cpu_binding
from vllm_lite.runtime.cpu_binding import Binding, Core, Topology, check_binding, plan_binding, read_topology
from vllm_lite.runtime.machine import (
    NO_QUOTA,
    cpu_quota,
    format_cpu_list,
    num_physical_cores,
    parse_cpu_list,
    siblings,
)
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.worker import process


@pytest.fixture
def small(tmp_path: Path) -> Topology:
    """The topology of one node of four cores, without hyper-threads."""
    return read_topology(make_sys(tmp_path, [4]), range(4))


@pytest.fixture
def large(tmp_path: Path) -> Topology:
    """Two sockets of four cores with two threads each: node 0 has CPUs 0-3 and 8-11, node 1 4-7 and 12-15."""
    return read_topology(make_sys(tmp_path, [4, 4], threads=2), range(16))


def plans(topology: Topology, world: int, bind: str = "auto", threads: int | None = None) -> list[Binding]:
    return [plan_binding(bind, rank, world, threads, topology) for rank in range(world)]


# ---- the machine


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), (" 5 , 1-2\n", (1, 2, 5)), ("3,3,2-4", (2, 3, 4))]
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus


@pytest.mark.parametrize("text", ["", ",", "a", "1-", "-1", "3-1", "0-99999999999", "1;2", "٣"])
def test_invalid_lists_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected"):
        parse_cpu_list(text)


def test_hyper_threads_are_no_cores(tmp_path: Path) -> None:
    root = make_sys(tmp_path, [4, 4], threads=2)
    assert siblings(9, root) == (1, 9)
    assert num_physical_cores(root, range(16)) == 8
    assert num_physical_cores(root, [0, 8, 1]) == 2, "of the affinity mask"
    assert siblings(99, root) == (99,), "one that the kernel does not list"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, NO_QUOTA),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, NO_QUOTA),
        ({}, NO_QUOTA),
        ({"cpu.max": "what?"}, NO_QUOTA),
    ],
)
def test_a_containers_quota(tmp_path: Path, files: dict[str, str], quota: int) -> None:
    for name, text in files.items():
        file = tmp_path / "fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert cpu_quota(tmp_path) == quota


def test_this_machine() -> None:
    topology = read_topology()
    assert topology.num_cores == num_physical_cores()
    assert set(topology.allowed) == os.sched_getaffinity(0) <= topology.online


# ---- auto and none


def test_one_worker_has_all_cores_and_is_not_bound(large: Topology) -> None:
    assert plans(large, 1) == [Binding((), 8, None)]
    assert plans(large, 1, threads=3) == [Binding((), 3, None)]


def test_one_node(small: Topology) -> None:
    assert plans(small, 2) == [Binding((0, 1), 2, None), Binding((2, 3), 2, None)]
    assert plans(small, 4) == [Binding((cpu,), 1, None) for cpu in range(4)]
    assert [len(plan.cpus) for plan in plans(small, 3)] == [1, 1, 2]


def test_two_sockets(large: Topology) -> None:
    assert plans(large, 2) == [Binding((0, 1, 2, 3), 4, 0), Binding((4, 5, 6, 7), 4, 1)]
    assert [(plan.cpus, plan.node) for plan in plans(large, 4)] == [((0, 1), 0), ((2, 3), 0), ((4, 5), 1), ((6, 7), 1)]
    three = plans(large, 3)
    assert [plan.node for plan in three] == [0, 0, 1], "an even share would cross the nodes and be no larger"
    assert [plan.num_threads for plan in three] == [2, 2, 4]


def test_sockets_that_are_numbered_in_turn(tmp_path: Path) -> None:
    root = make_sys(tmp_path, [2, 2, 2, 2])
    for node in range(4):
        (root / f"devices/system/node/node{node}/cpulist").write_text(f"{node},{node + 4}\n")
    in_turn = read_topology(root, range(8))
    assert plans(in_turn, 4) == [Binding((node, node + 4), 2, node) for node in range(4)]
    assert plans(in_turn, 2) == [Binding((0, 1, 4, 5), 4, None), Binding((2, 3, 6, 7), 4, None)], "two nodes each"


def test_few_ranks_get_whole_nodes(tmp_path: Path) -> None:
    four = read_topology(make_sys(tmp_path / "4", [2, 2, 2, 2]), range(8))
    assert [plan.cpus for plan in plans(four, 2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {plan.node for plan in plans(four, 2)} == {None}, "the memory of two nodes"
    three = read_topology(make_sys(tmp_path / "3", [4, 4, 4]), range(12))
    assert [len(plan.cpus) for plan in plans(three, 2)] == [6, 6], "one node each would leave a third idle"


def test_a_node_with_few_allowed_cpus_is_left_out(tmp_path: Path) -> None:
    masked = read_topology(make_sys(tmp_path, [8, 8]), range(9))
    assert [(plan.cpus, plan.node) for plan in plans(masked, 2)] == [((0, 1, 2, 3), 0), ((4, 5, 6, 7), 0)]


def test_the_affinity_mask_bounds_the_shares(tmp_path: Path) -> None:
    masked = read_topology(make_sys(tmp_path, [4, 4], threads=2), [2, 10, 3, 14, 15])
    assert [core.cpus for core in masked.cores] == [(2, 10), (3,), (14,), (15,)]
    assert plans(masked, 2) == [Binding((2, 3), 2, 0), Binding((14, 15), 2, 1)]


def test_fewer_cores_than_ranks_and_quotas_bind_nothing(tmp_path: Path, small: Topology) -> None:
    assert plans(small, 5) == [Binding((), 1, None)] * 5
    quota = read_topology(make_sys(tmp_path / "q", [8], cpu_max="450000 100000"), range(8))
    assert quota.num_cores == 5
    assert plans(quota, 2) == [Binding((), 2, None)] * 2
    assert plans(quota, 8) == [Binding((), 1, None)] * 8
    enough = read_topology(make_sys(tmp_path / "e", [4], cpu_max="400000 100000"), range(4))
    assert plans(enough, 2)[1] == Binding((2, 3), 2, None)


def test_none_shares_out_the_threads(large: Topology) -> None:
    assert plans(large, 2, "none") == [Binding((), 4, None)] * 2
    assert plans(large, 16, "none") == [Binding((), 1, None)] * 16


def test_the_threads_setting_is_per_worker(large: Topology) -> None:
    assert plans(large, 2, threads=3) == [Binding((0, 1, 2, 3), 3, 0), Binding((4, 5, 6, 7), 3, 1)]
    both = Binding((0, 1, 2, 3, 8, 9, 10, 11), 5, 0)
    assert plans(large, 2, threads=5)[0] == both, "more threads than cores take the cores' second threads"
    assert plans(large, 2, "none", threads=3) == [Binding((), 3, None)] * 2
    assert plans(large, 2, "0-3|4", threads=2)[1] == Binding((4,), 2, 1)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), data=st.data())
def test_shares_are_disjoint_and_within_nodes_where_possible(sizes: list[int], data: st.DataObject) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    allowed = dict(enumerate(nodes))
    topology = Topology(
        tuple(Core((cpu,), node) for cpu, node in allowed.items()), allowed, frozenset(allowed), NO_QUOTA
    )
    world = data.draw(st.integers(2, len(topology.cores) + 1).filter(lambda n: n <= len(topology.cores) or n > 2))
    found = plans(topology, world)
    if world > len(topology.cores):
        assert not any(plan.cpus for plan in found)
        return
    cpus = [cpu for plan in found for cpu in plan.cpus]
    assert len(cpus) == len(set(cpus)), "a CPU of two ranks"
    assert cpus == sorted(cpus), "contiguous"
    assert all(plan.num_threads == len(plan.cpus) >= 1 for plan in found)
    if len(set(sizes)) == 1 and (world >= len(sizes) or len(sizes) % world == 0):
        assert len(cpus) == sum(sizes), "a core of nobody"
    if len(set(sizes)) == 1 and world >= len(sizes) and world % len(sizes) == 0:
        assert all(len({topology.allowed[cpu] for cpu in plan.cpus}) == 1 for plan in found)
    least = sum(sizes) // world
    assert min(len(plan.cpus) for plan in found) >= cpu_binding.LEAST_SHARE * least
    for plan in found:
        assert plan.node is None or all(topology.allowed[cpu] == plan.node for cpu in plan.cpus)


# ---- lists


def test_a_list_is_followed_as_written(large: Topology) -> None:
    assert plans(large, 2, "0-2,8|12-15") == [Binding((0, 1, 2, 8), 4, 0), Binding((12, 13, 14, 15), 4, 1)]
    assert plans(large, 1, "3-4") == [Binding((3, 4), 2, None)], "of two nodes"


@pytest.mark.parametrize(
    ("bind", "world", "sentence"),
    [
        (
            "0-3",
            2,
            "cpu_bind must be auto, none, or 2 lists of CPUs, one for each rank, like 0-3|4-7; got 1: '0-3'",
        ),
        (
            "0|1",
            1,
            "cpu_bind must be auto, none, or one list of CPUs like 0-7; got 2: '0|1'",
        ),
        ("0-3|x", 2, "cpu_bind: expected numbers of CPUs like 0-3,8, got 'x'; it looks like 0-3|4-7"),
        ("all", 1, "cpu_bind: expected numbers of CPUs like 0-3,8, got 'all'; it looks like 0-7"),
        (
            "0-3|14-17",
            2,
            "cpu_bind names CPUs 16-17 for worker 1, which this machine does not have; it may use 0-15",
        ),
        (
            "0-3|2-5",
            2,
            "cpu_bind gives CPUs 2-3 to worker 0 and to worker 1; each may have a CPU of its own only",
        ),
    ],
)
def test_a_list_that_cannot_be_followed_is_one_sentence(large: Topology, bind: str, world: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_binding(bind, world, "cpu", large)
    assert str(caught.value) == sentence


def test_cpus_that_are_there_and_not_allowed(tmp_path: Path) -> None:
    masked = read_topology(make_sys(tmp_path, [8]), range(4))
    with pytest.raises(ConfigError, match=r"CPUs 4-5 for worker 1, which this process may not use; it may use 0-3$"):
        check_binding("0-1|2-5", 2, "cpu", masked)


def test_bindings_without_a_list_are_not_checked(small: Topology) -> None:
    for bind in ("auto", "none"):
        check_binding(bind, 64, "cpu", small)
        check_binding(bind, 2, "cuda", small)
    with pytest.raises(ConfigError, match=r"cpu_bind '0\|1' is for CPU workers, and this engine's run on GPUs"):
        check_binding("0|1", 2, "cuda", small)


def test_the_setting_none_is_a_word() -> None:
    assert EngineConfig.load({"cpu_bind": "none"}, env={}).cpu_bind == "none"
    assert EngineConfig.load({}, env={"VLLM_LITE_CPU_BIND": "0|1"}).cpu_bind == "0|1"


# ---- binding


def in_thread(*bindings: Binding) -> set[int]:
    """Apply bindings in a thread of their own, so that they end with it. Returns the thread's final CPU mask."""
    seen: set[int] = set()

    def bind() -> None:
        for binding in bindings:
            cpu_binding.apply(binding)
        seen.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join(scaled(10))
    return seen


@pytest.fixture(autouse=True)
def no_threads_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "to be restored")
    monkeypatch.delenv("OMP_NUM_THREADS")


def test_torch_has_the_bindings_threads_unless_the_user_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_binding.apply(Binding((), 3, None))
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    cpu_binding.apply(Binding((), 3, None))
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("value", "num_threads"), [("4", 4), (" 3,2", 3), ("0", None), ("many", None), ("", None), ("-2", None)]
)
def test_threads_that_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, value: str, num_threads: int | None
) -> None:
    assert cpu_binding.threads_of_the_user() is None
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert cpu_binding.threads_of_the_user() == num_threads


@pytest.mark.parametrize(("flag", "num_threads"), [(None, 3), (2, 2)])
def test_a_worker_is_bound_for_the_threads_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, flag: int | None, num_threads: int
) -> None:
    bindings: list[Binding] = []
    for name in ("name_process", "finish", "main"):
        monkeypatch.setattr(process, name, lambda *_: None)
    monkeypatch.setattr("vllm_lite.runtime.log.setup", lambda *_: None)
    monkeypatch.setattr(process, "apply", bindings.append)
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = EngineConfig(device="cpu", cpu_threads=flag)
    resolved = config.resolve(max_position_embeddings=8, dtype="float32", model_path="model")
    process.process_main(WorkerSettings(resolved, "ipc:///nowhere", 0, 1), Wakeup())
    assert [binding.num_threads for binding in bindings] == [num_threads]


def test_a_worker_is_bound_with_its_threads() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    assert in_thread(Binding((one,), 1, None)) == {one}
    assert in_thread(Binding((), 1, None)) == before, "not bound"
    assert os.sched_getaffinity(0) == before


def test_a_refusal_is_only_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(logging.getLogger("vllm_lite"), "propagate", True)
    with caplog.at_level("INFO"):
        assert in_thread(Binding((60000,), 1, None)) == before
        in_thread(Binding(tuple(before), 1, 900))
    assert "cannot be bound to CPUs 60000: Invalid argument" in caplog.text
    assert "memory is not bound to node 900: " in caplog.text


def test_memory_is_allocated_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """get_mempolicy in the same thread returns the policy. Skipped on machines that forbid the call."""
    found: dict[str, Any] = {}

    def ask() -> None:
        cpu_binding.apply(Binding(tuple(os.sched_getaffinity(0)), 1, 0))
        mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
        number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
        call = ctypes.CDLL(None, use_errno=True).syscall
        found["status"] = call(ctypes.c_long(number), ctypes.byref(mode), mask, ctypes.c_ulong(1025), None, 0)
        found["mode"], found["mask"] = mode.value, mask[0]

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(scaled(10))
    if found["status"] != 0:
        pytest.skip("get_mempolicy is forbidden here")
    assert (found["mode"], found["mask"]) == (cpu_binding.MPOL_PREFERRED, 1)


def test_bindings_as_they_are_logged() -> None:
    assert str(Binding((0, 1, 2, 3), 4, 1)) == "4 threads on CPUs 0-3 of node 1"
    assert str(Binding((2,), 1, None)) == "1 thread on CPUs 2"
    assert str(Binding((), 2, None)) == "2 threads, not bound"
