"""Two ranks as threads of this process under the engine's own executor: they serve together, and fail together."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.deadlines import scaled
from tests.thread_group import Mail, ThreadCommunicator, ThreadGroup
from vllm_lite import transport
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.shard import Stage
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import EngineDeadError, ModelError, RankLostError
from vllm_lite.executor import blocking
from vllm_lite.executor.multiproc import MultiprocExecutor
from vllm_lite.parallel import select
from vllm_lite.process_settings import WorkerGroup
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import Continue, Entry, ModelOutput, NewRequest, SchedulerOutput
from vllm_lite.runtime.group_memory import ended_by
from vllm_lite.worker.worker import Worker

DEADLINE_S = scaled(60.0)
GENERATION, NUM_BLOCKS, WORLD = 5, 20, 2
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
PROMPT = [5, 6, 7, 8, 9]

Connect = Callable[[ThreadGroup, int, WorkerGroup], ThreadCommunicator]


def meet(ranks: ThreadGroup, rank: int, _group: WorkerGroup) -> ThreadCommunicator:
    return ranks.communicators[rank]


class Group:
    """An executor whose workers are threads; each calls `connect` to meet the others of its stage."""

    def __init__(
        self, checkpoint: Path, folder: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch, num_stages: int = 1
    ) -> None:
        mail = Mail()
        stages = [ThreadGroup(WORLD, stage=Stage(index, num_stages), mail=mail) for index in range(num_stages)]

        def connected(
            _config: ResolvedConfig, rank: int, group: WorkerGroup, _device: torch.device, _shared_bytes: int
        ) -> ThreadCommunicator:
            return connect(stages[rank // WORLD], rank % WORLD, group)

        monkeypatch.setattr(select, "connect", connected)
        config = EngineConfig.check(
            {"num_gpu_blocks_override": NUM_BLOCKS, "max_num_batched_tokens": 64, "max_num_seqs": 4}
            | {"single_process": True, "tensor_parallel_size": WORLD, "cpu_threads": 1, "device": "cpu"}
        )
        spec = load_spec(checkpoint)
        sizes: dict[str, Any] = {"max_position_embeddings": spec.max_position_embeddings, "dtype": "float32"}
        self.folder = folder / "group"
        resolved = config.resolve(**sizes, model_path=str(checkpoint))
        self.executor = MultiprocExecutor(
            msgspec.structs.replace(resolved, num_stages=num_stages),
            f"inproc://{folder.name}",
            GENERATION,
            "vllm_lite.worker.process",
            group_folder=str(self.folder),
        )

    def start(self) -> None:
        assert blocking.load(self.executor, DEADLINE_S).num_blocks == NUM_BLOCKS
        blocking.allocate(self.executor, NUM_BLOCKS, 0, DEADLINE_S)

    def step(self, number: int, *entries: Entry) -> ModelOutput:
        self.executor.submit(SchedulerOutput(GENERATION, number, [], list(entries)))
        end_s = time.monotonic() + DEADLINE_S
        while (output := self.executor.poll()) is None:
            assert transport.wait(end_s - time.monotonic(), self.executor), "no answer"
        return output


@pytest.fixture
def make_group(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Connect], Group]]:
    made: list[Group] = []

    def make(connect: Connect = meet, num_stages: int = 1) -> Group:
        made.append(Group(tiny_checkpoint, tmp_path, connect, monkeypatch, num_stages))
        return made[-1]

    yield make
    for group in made:
        group.executor.close()
        assert not group.folder.exists()
    assert_no_worker_left()


def assert_no_worker_left() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("worker"):
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), thread.name


def prompt() -> NewRequest:
    return NewRequest(0, pack_tokens(PROMPT), len(PROMPT), GREEDY, 0, 0, len(PROMPT), [[1]])


def test_ranks_serve_together_and_one_answers(
    make_group: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group()
    group.start()
    assert len(group.step(1, prompt()).tokens) == 4
    for number in (2, 3):
        output = group.step(number, Continue(0, 1, []))
        assert (output.step, len(output.tokens)) == (number, 4)
    assert group.executor.poll() is None
    assert "dropped" not in caplog.text, "the other one answered too"


def test_two_stages_of_two_ranks_serve_as_one_stage(
    make_group: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    """One rank answers, the first of the last stage, with the same tokens as one stage of two ranks."""
    answers = []
    for num_stages in (1, 2):
        group = make_group(num_stages=num_stages)
        group.start()
        outputs = [group.step(1, prompt()), *(group.step(number, Continue(0, 1, [])) for number in (2, 3))]
        assert group.executor.poll() is None
        answers.append([(output.step, output.tokens) for output in outputs])
        group.executor.close()
    assert answers[0] == answers[1]
    assert "dropped" not in caplog.text, "another one answered too"


@pytest.mark.parametrize("culprit", range(WORLD))
def test_a_rank_that_raises_in_a_step_is_named(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, culprit: int
) -> None:
    execute = Worker.execute

    def failing(worker: Worker, step: SchedulerOutput) -> ModelOutput:
        if worker.rank == culprit and step.step == 2:
            raise ValueError("injected")
        return execute(worker, step)

    monkeypatch.setattr(Worker, "execute", failing)
    group = make_group()
    group.start()
    group.step(1, prompt())
    with pytest.raises(EngineDeadError, match=f"^worker {culprit} failed: ValueError: injected$"):
        group.step(2, Continue(0, 1, []))
    assert_no_worker_left()


def test_ranks_that_are_stopped_in_a_step_log_no_error(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that is closed while it computes ends the group first, or it would have to wait for the step."""
    entered, ended = threading.Barrier(WORLD + 1), threading.Event()

    def lost(_worker: Worker, _step: SchedulerOutput) -> ModelOutput:
        entered.wait(DEADLINE_S)
        assert ended.wait(DEADLINE_S)
        raise RankLostError("the group has ended")

    monkeypatch.setattr(Worker, "execute", lost)
    group = make_group()
    group.start()
    group.executor.submit(SchedulerOutput(GENERATION, 1, [], [prompt()]))
    entered.wait(DEADLINE_S)
    group.executor.meeting_place.end()
    ended.set()
    group.executor.close()
    assert_no_worker_left()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("culprit", range(WORLD))
def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, culprit: int
) -> None:
    load = Worker.load

    def failing(worker: Worker, communicator: ThreadCommunicator, *others: Any) -> Any:
        if worker.rank == culprit:
            raise ModelError("a tensor is damaged")
        communicator.barrier()
        return load(worker, communicator, *others)

    monkeypatch.setattr(Worker, "load", failing)
    with pytest.raises(ModelError, match="a tensor is damaged"):
        make_group().start()
    assert_no_worker_left()


@pytest.mark.parametrize("culprit", range(WORLD))
def test_a_rank_that_cannot_connect_does_not_leave_the_others_waiting(
    make_group: Callable[..., Group], culprit: int
) -> None:
    """The failed rank has no communicator yet, so it ends the group through the shared memory."""

    def connect(_ranks: ThreadGroup, rank: int, group: WorkerGroup) -> ThreadCommunicator:
        if rank == culprit:
            raise OSError("no such device")
        end_s = time.monotonic() + DEADLINE_S
        while not ended_by(group.memory)[0]:
            assert time.monotonic() < end_s
            time.sleep(0.001)
        raise RankLostError("a rank has ended")

    with pytest.raises(EngineDeadError, match=f"^worker {culprit} failed: OSError: no such device$"):
        make_group(connect).start()
    assert_no_worker_left()
