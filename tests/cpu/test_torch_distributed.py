"""gloo and NCCL through torch.distributed: processes that join, leave and are killed, and the calls of NCCL.

test_communicators.py tests the common part of all communicators. There is no GPU here: a fake replaces torch's
ProcessGroupNCCL, and records its calls.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.deadlines import scaled
from tests.ranks import connected, in_threads, worker_group
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError, RankLostError
from vllm_lite.parallel import gloo, nccl, process_group, select
from vllm_lite.parallel.communicator import Communicator, SingleRank
from vllm_lite.parallel.gloo import GlooCommunicator
from vllm_lite.parallel.nccl import NcclCommunicator, connect_nccl
from vllm_lite.parallel.process_group import NCCL_ENVIRONMENT
from vllm_lite.parallel.rendezvous import GroupEnd
from vllm_lite.process_settings import Spread, WorkerGroup
from vllm_lite.runtime.group_memory import end_group, ended_by

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def connect(shard: Shard, group: WorkerGroup) -> GlooCommunicator:
    return GlooCommunicator(shard, group, CPU, scaled(20))


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + scaled(20)
    while not condition():
        assert time.monotonic() < deadline_s, what
        threading.Event().wait(0.001)


def test_ranks_on_several_hosts_meet_at_rank_0_and_have_no_memory_in_common(tmp_path: Path) -> None:
    made = EngineConfig(device="cpu", tensor_parallel_size=2, ready_timeout_s=scaled(20))
    config = made.resolve(max_position_embeddings=8, dtype="float32", model_path="m")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def body(rank: int) -> torch.Tensor:
            x = torch.full((2, 3), 1.0 + rank)
            spread = Spread(("127.0.0.1", "127.0.0.1"), port, None if rank else listener.fileno())
            with worker_group(tmp_path) as alone:
                group = msgspec.structs.replace(alone, spread=spread)
                communicator = select.connect(config, rank, group, CPU, 0)
                assert isinstance(communicator, GlooCommunicator)
                communicator.all_reduce(x)
                communicator.barrier()
                communicator.close()
            return x

        assert [x.tolist() for x in in_threads(2, body)] == [[[3.0] * 3] * 2] * 2
    assert list(tmp_path.iterdir()) == []


# ---- a separate process


@contextmanager
def rank_in_a_process(group: WorkerGroup) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, str(Path(__file__).with_name("gloo_process.py")), str(group.memory), group.folder]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, pass_fds=[group.memory], env=environment, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(rank: GlooCommunicator, command: int) -> None:
    rank.broadcast(torch.tensor([command]))


def listening(pid: int | str) -> list[str]:
    """The addresses that a process listens on, as /proc/net/tcp writes them."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(entry.path))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].split(":")[0])
    return found


def test_two_processes_over_loopback_and_one_of_them_is_killed(tmp_path: Path) -> None:
    with worker_group(tmp_path) as group, rank_in_a_process(group) as peer:
        before = len(listening("self"))
        rank = GlooCommunicator(Shard(0, 2), group, CPU, scaled(60))

        ask(rank, 1)
        x = torch.ones(2, 3, dtype=torch.bfloat16)
        rank.all_reduce(x)
        assert x.tolist() == [[1, 2, 3], [4, 5, 6]]
        ask(rank, 2)
        rows = torch.zeros(2, 8)
        rank.gather_columns(rows, (3, 5))
        assert rows.tolist() == [[0] * 3 + [1] * 5] * 2

        assert list(tmp_path.iterdir()) == []
        assert listening(peer.pid) == ["0100007F"]
        assert listening("self")[before:] == ["0100007F"]

        ask(rank, 3)
        killer = threading.Thread(target=kill_when, args=(rank, peer.pid), daemon=True)
        killer.start()
        with pytest.raises(RankLostError, match="rank 0 lost the connection to another rank") as caught:
            rank.barrier()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert not rank.is_waiting()
        killer.join()
        rank.close()
        del caught  # its frames hold the call that failed, and that the connection
        until(lambda: len(listening("self")) == before, "gloo still listens")


def kill_when(waiting: Communicator, pid: int) -> None:
    until(waiting.is_waiting, "rank 0 does not wait")
    os.kill(pid, signal.SIGKILL)


# ---- coming and going


def test_the_rendezvous_file_is_removed_and_another_group_can_use_the_folder(tmp_path: Path) -> None:
    with connected(connect, 2, tmp_path), connected(connect, 3, tmp_path) as ranks:
        assert list(tmp_path.iterdir()) == []
        assert (
            in_threads(3, lambda rank: ranks[rank].all_gather(torch.tensor([rank])).tolist()) == [[[0], [1], [2]]] * 3
        )


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    with (
        worker_group(tmp_path) as group,
        pytest.raises(RankLostError, match=r"1 of 2 ranks did not come within 0\.1 s"),
    ):
        GlooCommunicator(Shard(0, 2), group, CPU, 0.1)
    assert len(list(tmp_path.iterdir())) == 1, "the file of the group that never was"
    with worker_group(tmp_path) as group, pytest.raises(RankLostError, match="1 of 2 ranks"):
        GlooCommunicator(Shard(1, 2), group, CPU, 0.1)


def test_a_group_that_ends_while_ranks_come(tmp_path: Path) -> None:
    with worker_group(tmp_path) as group:
        end_group(group.memory, 1)
        with pytest.raises(RankLostError, match="rank 1 has ended the group that rank 0 belongs to"):
            connect(Shard(0, 2), group)


def test_a_rank_that_is_too_late_for_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(connect, 2, tmp_path) as ranks:
        monkeypatch.setattr(ranks[0], "_timeout_s", 0.1)
        with pytest.raises(RankLostError, match=r"rank 0 waited 0\.1 s for the other ranks"):
            ranks[0].barrier()
        ranks[1].close()


def test_waiting_for_longer_than_a_look_is_no_failure(tmp_path: Path) -> None:
    with connected(connect, 2, tmp_path) as ranks:
        looks: list[object] = []
        late: Any = ranks[0]
        look = late._end.check
        late._end.check = lambda *cause: looks.append(look(*cause))

        def meet(rank: int) -> list[list[int]]:
            if rank == 1:
                until(lambda: len(looks) > 2, "rank 0 does not look")
            gathered: list[list[int]] = ranks[rank].all_gather(torch.tensor([rank])).tolist()
            return gathered

        assert in_threads(2, meet) == [[[0], [1]]] * 2


def test_closing_during_an_unanswered_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's own end waits for that call, for as long as the time out of its group."""
    monkeypatch.setattr(gloo, "CLOSE_S", 0.05)
    with worker_group(tmp_path) as group:
        ranks = in_threads(2, lambda rank: GlooCommunicator(Shard(rank, 2), group, CPU, scaled(60)))
        end_group(group.memory)
        monkeypatch.setattr(ranks[0]._end, "check", lambda *_: None)
        monkeypatch.setattr(ranks[0], "_timeout_s", 0)
        with pytest.raises(RankLostError):
            ranks[0].barrier()
        ranks[0].close()
        ranks[0].close()
        left = [thread for thread in threading.enumerate() if thread.name == "gloo closes"]
        assert len(left) == 1, "gloo waits, this does not"
        ranks[1].close()  # the connection breaks, and with it the call
        until(lambda: not left[0].is_alive(), "gloo still waits")


# ---- NCCL


class FakeNccl:
    """Records its calls. With `error` set, they fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.aborted = threading.Event()
        self.error: Exception | None = None

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> None:
        self._called(f"allreduce {len(tensors)} {opts.asyncOp}")

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> None:  # noqa: A002
        self._called(f"allgather {list(input.shape)} {opts.asyncOp}")
        output.copy_(input[None])

    def abort(self) -> None:
        self.calls.append("abort")
        self.aborted.set()

    def _called(self, call: str) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(call)


class FakeHost(SingleRank):
    """The communicator for the CPU of rank 0 of two."""

    shard = Shard(0, 2)

    def __init__(self, memory: int) -> None:
        super().__init__(CPU)
        self.memory = memory
        self.calls: list[str] = []

    def barrier(self) -> None:
        self.calls.append("barrier")

    def abort(self) -> None:
        end_group(self.memory, 0)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[WorkerGroup]:
    with worker_group(tmp_path) as made:
        yield made


def over(fake: FakeNccl, group: WorkerGroup) -> NcclCommunicator:
    host: Any = FakeHost(group.memory)
    return NcclCommunicator(host, fake, CPU, GroupEnd(Shard(0, 2), group.memory))  # type: ignore[arg-type]


def test_calls_are_put_on_the_current_stream_and_parts_are_padded(group: WorkerGroup) -> None:
    fake = FakeNccl()
    rank = over(fake, group)
    rank.all_reduce(torch.ones(1, 4))
    x = torch.tensor([[1.0, 2.0, 3.0, 0.0, 0.0]])
    rank.gather_columns(x, (3, 2))
    assert x.tolist() == [[1, 2, 3, 1, 2]]
    assert fake.calls == ["allreduce 1 False", "allgather [1, 3] False"]
    assert (rank.graph_safe, rank.shares_memory, rank.is_waiting()) == (True, False, False)
    rank.close()
    assert fake.calls[-1] == "abort"
    assert not ended_by(group.memory)[0], "a rank that closes ends nobody's group"


@pytest.mark.parametrize("by", ["the engine", "rank 1"])
def test_kernels_are_made_to_leave_when_the_group_ends(by: str, group: WorkerGroup) -> None:
    fake = FakeNccl()
    rank = over(fake, group)
    end_group(group.memory, 1 if by == "rank 1" else None)
    assert fake.aborted.wait(scaled(20))
    with pytest.raises(RankLostError, match=f"{by} has ended the group"):
        rank.all_reduce(torch.ones(1, 4))
    assert fake.calls == ["abort"]
    rank.close()
    assert fake.calls == ["abort"]


def test_an_abort_of_this_rank_reaches_the_others_and_its_own_kernels(group: WorkerGroup) -> None:
    fake = FakeNccl()
    rank = over(fake, group)
    rank.abort()
    assert ended_by(group.memory) == (True, 0)
    assert fake.aborted.wait(scaled(20))
    rank.close()


def test_an_error_of_nccl_names_a_lost_rank_only_if_one_is_lost(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNccl()
    rank = over(fake, group)
    fake.error = RuntimeError("unhandled cuda error")
    with pytest.raises(RuntimeError, match="unhandled cuda error"):
        rank.all_reduce(torch.ones(1, 4))

    def fail(*_: object) -> None:
        end_group(group.memory, 1)
        raise RuntimeError("NCCL communicator was aborted")

    monkeypatch.setattr(fake, "_called", fail)
    with pytest.raises(RankLostError, match="rank 1 has ended") as caught:
        rank.all_reduce(torch.ones(1, 4))
    assert "was aborted" in str(caught.value.__cause__)
    rank.close()


def test_an_abort_that_hangs_or_fails_does_not_block(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl, "CLOSE_S", 0.05)
    fake, go_on = FakeNccl(), threading.Event()
    monkeypatch.setattr(fake, "abort", lambda: (go_on.wait(scaled(20)), 1 / 0))
    rank = over(fake, group)
    rank.close()
    assert rank.watcher.is_alive()
    go_on.set()
    rank.watcher.join(scaled(20))
    assert "NCCL could not be aborted: division by zero" in caplog.text


class FakeProcessGroupNCCL(FakeNccl):
    """Replaces torch's class, which a torch without CUDA does not have."""

    made: "FakeProcessGroupNCCL"

    class Options:
        _timeout = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__()
        assert store.check(["arrived"])
        self.calls += [f"rank {rank} of {size}, {options._timeout.total_seconds()} s"]
        self.environment = {name: os.environ[name] for name in NCCL_ENVIRONMENT}
        type(self).made = self

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(f"connects {device}")


def test_nccl_is_connected_and_used_once_before_anything_is_captured(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NCCL_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")  # a user's
    monkeypatch.setattr(process_group, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeProcessGroupNCCL, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: FakeProcessGroupNCCL.made.calls.append("synchronize"))
    host: Any = FakeHost(group.memory)
    host.shard = Shard(0, 1)
    rank = connect_nccl(host, group, CPU, 7)
    made = FakeProcessGroupNCCL.made
    assert made.calls == ["rank 0 of 1, 7.0 s", "connects cpu", "allreduce 1 False", "synchronize"]
    assert made.environment == NCCL_ENVIRONMENT | {"NCCL_SOCKET_IFNAME": "eth7"}
    assert host.calls == ["barrier"]
    assert os.listdir(group.folder) == []
    rank.close()
    assert host.calls == ["barrier", "close"]


@pytest.mark.parametrize("error", [RuntimeError("Duplicate GPU detected"), ValueError("no GPUs found!")])
def test_refusals_of_nccl_are_one_sentence(
    error: Exception, group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(process_group, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "nccl_group", refuse)
    host: Any = FakeHost(group.memory)
    host.shard = Shard(0, 1)
    with pytest.raises(ConfigError, match=f"NCCL cannot connect cpu to the GPUs of the other ranks: {error}"):
        connect_nccl(host, group, CPU, 7)


# ---- the choice


@pytest.mark.parametrize(
    ("device", "asked", "size", "native", "chosen"),
    [
        ("cpu", "auto", 1, True, "none"),
        ("cpu", "gloo", 1, True, "none"),
        ("cpu", "auto", 2, True, "shared-memory"),
        ("cpu", "auto", 2, False, "gloo"),
        ("cpu", "gloo", 2, True, "gloo"),
        ("cuda", "auto", 2, True, "nccl"),
        ("cuda", "gloo", 2, True, "gloo"),
    ],
)
def test_the_communication_backend_by_device_and_size(
    device: Any, asked: Any, size: int, native: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_lite.parallel.select.cpu.available", lambda: native)
    config: Any = EngineConfig(device=device, tensor_parallel_backend=asked, tensor_parallel_size=size)
    assert select.backend_of(config) == chosen


def resolved(device: Any = "cpu", **settings: Any) -> Any:
    config = EngineConfig(**settings)
    return config.resolve(max_position_embeddings=64, dtype="float32", model_path="m", machine=(device, 1 << 30))


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("shared-memory", "cuda")])
def test_a_backend_that_the_device_lacks_is_refused(backend: Any, device: Any) -> None:
    with pytest.raises(ConfigError, match=f"^tensor_parallel_backend {backend} .* but device is {device}; give auto, "):
        resolved(device, tensor_parallel_backend=backend, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda"), ("shared-memory", "cpu"), ("auto", "cuda")],
)
def test_other_ways_to_exchange_are_kept(backend: Any, device: Any) -> None:
    kept = resolved(device, tensor_parallel_backend=backend, tensor_parallel_size=2)
    assert kept.tensor_parallel_backend == backend


def test_ranks_are_connected_as_configured(tmp_path: Path) -> None:
    assert isinstance(select.connect(resolved(), 0, None, CPU, 0), SingleRank)
    config = resolved(tensor_parallel_size=2, tensor_parallel_backend="gloo")
    with pytest.raises(RuntimeError, match="the group that it belongs to"):
        select.connect(config, 0, None, CPU, 0)
    with worker_group(tmp_path) as group:
        for rank in in_threads(2, lambda rank: select.connect(config, rank, group, CPU, 0)):
            assert isinstance(rank, GlooCommunicator)
            rank.close()


def test_shared_memory_needs_the_native_library(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_lite.parallel.select.cpu.available", lambda: False)
    config = resolved(tensor_parallel_size=2, tensor_parallel_backend="shared-memory")
    with pytest.raises(ConfigError, match="the native library is not there"):
        select.connect(config, 0, group, CPU, 0)


def test_a_torch_without_nccl_is_one_sentence_and_leaves_no_rank_connected(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost(group.memory)
    monkeypatch.setattr(process_group, "is_nccl_available", lambda: False)
    monkeypatch.setattr(select, "backend_of", lambda _, **__: "nccl")
    monkeypatch.setattr(select, "connect_on_the_cpu", lambda *_: host)
    with pytest.raises(ConfigError, match=r"has no NCCL.*--tensor-parallel-backend gloo"):
        select.connect(resolved(tensor_parallel_size=2), 0, group, CPU, 0)
    assert host.calls == ["close"]
