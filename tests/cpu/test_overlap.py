"""Steps that are launched before the host has the previous tokens give the same tokens as steps that wait for them."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.cuda_capture import CapturingLauncher, CudaLikeCapture
from tests.driver import GENERATION, GREEDY, Driver, make_prompt, new_request
from tests.kernels import emulator
from tests.plays import Play
from vllm_lite.attention.cuda import CudaBackend
from vllm_lite.errors import DeviceHungError
from vllm_lite.kernels.cuda import sampler as cuda_sampler
from vllm_lite.kernels.cuda.patience import Wait
from vllm_lite.kernels.cuda.sampler import PickedLater
from vllm_lite.protocol.codec import ToWorker, engine_to_worker, unpack_tokens
from vllm_lite.protocol.control import Shutdown
from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.protocol.step import (
    Continue,
    Draft,
    Entry,
    Finish,
    Fork,
    ModelOutput,
    Preempt,
    Resume,
    SchedulerOutput,
    SetToken,
    StepOutputs,
)
from vllm_lite.worker import worker as worker_module
from vllm_lite.worker.device import Device
from vllm_lite.worker.overlap import Overlap
from vllm_lite.worker.process import WorkerLoop
from vllm_lite.worker.worker import Worker

pytestmark = [
    pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator"),
    pytest.mark.usefixtures("as_on_a_gpu"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("overlap") / "model", num_hidden_layers=1, head_dim=32)


@pytest.fixture
def driver_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Make drivers whose workers behave like a GPU's; with `ahead` their sampler leaves tokens on the device."""
    launcher = CapturingLauncher(emulator.EmulatorLauncher())
    monkeypatch.setattr(worker_module, "select_backend", lambda shape, _: CudaBackend(shape, launcher))

    def make(*, ahead: bool, **settings: Any) -> Driver:
        driver = Driver(model, on=Device(CPU, capture=CudaLikeCapture()), **settings)
        if ahead:
            cast("Any", driver.worker.runner.sampler)._launcher = launcher
            driver.worker.overlap = Overlap.of(driver.worker.runner)
            assert driver.worker.overlap is not None
        return driver

    return make


def steps_of(seed: int, count: int) -> list[SchedulerOutput]:
    play = Play(seed, 1)
    made = [play.step() for _ in range(count)]
    return [SchedulerOutput(GENERATION, number, [], entries) for number, entries in enumerate(made, start=1)]


@pytest.mark.parametrize("seed", [1, 2])
def test_random_steps(seed: int, driver_of: Callable[..., Driver]) -> None:
    """Prompts in chunks, decodes, arrivals and ends, some of them together: by graphs and without."""
    settings = {"cudagraph_capture_sizes": [1, 2, 8]}
    waiting, ahead = (driver_of(ahead=ahead, **settings).worker for ahead in (False, True))
    steps, cut = steps_of(seed, 40), random.Random(seed)
    most = 0
    launch = Overlap.launch

    def counted(self: Overlap, step: SchedulerOutput) -> None:
        nonlocal most
        launch(self, step)
        most = max(most, len(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Overlap, "launch", counted)
        while steps:
            count = cut.randint(1, 6)
            together, steps = steps[:count], steps[count:]
            outputs = ahead.run(together)
            for got, step in zip(outputs, together, strict=True):
                expected = waiting.execute(step)
                assert (got.step, got.tokens, got.counts) == (expected.step, expected.tokens, expected.counts)
            ahead.runner.batch.check_integrity()
            assert torch.equal(ahead.runner.cache_engine.pool, waiting.runner.cache_engine.pool)
    assert most == 2


def test_a_handle_that_passes_to_a_new_sequence(driver_of: Callable[..., Driver]) -> None:
    """The engine gives the handle of a sequence that has ended to the next one, in the same step: its prompt is not
    touched by the token that the old one still gets."""
    both: list[Entry] = [Continue(0, 1, []), Continue(1, 1, [])]
    steps = [asks(*both), asks(Finish(1), Continue(0, 1, []), new_request(1, make_prompt(7), [6])), asks(*both)]
    waiting, ahead = (started(driver_of(ahead=ahead)) for ahead in (False, True))
    assert [each.tokens for each in ahead.run(steps)] == [waiting.execute(step).tokens for step in steps]
    assert torch.equal(ahead.runner.cache_engine.pool, waiting.runner.cache_engine.pool)
    assert ahead.runner.batch.tokens_of(1).tolist() == waiting.runner.batch.tokens_of(1).tolist()


# ---- which steps go ahead


def started(driver: Driver) -> Worker:
    driver.run(new_request(0, make_prompt(20), [1, 2, 3]), new_request(1, make_prompt(9), [4, 5]))
    return driver.worker


def asks(*entries: Entry, ops: tuple[Any, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(GENERATION, 2, list(ops), list(entries))


RULED = Sampling(0.0, 0, 1.0, 0.0, 0, rules=LogitRules(1.0, 0.5, 1.2, (), b"", ()))


@pytest.mark.parametrize(
    ("step", "goes"),
    [
        (asks(Continue(0, 1, []), Continue(1, 1, [])), True),
        (asks(Continue(0, 1, []), Finish(1)), True),
        (asks(Continue(0, 1, []), new_request(2, make_prompt(5), [7])), True),
        (asks(Finish(0)), False),
        (asks(), False),
        (asks(Continue(0, 1, []), ops=((1, 1, 9),)), False),
        (asks(Draft(0, 2, [])), False),
        (asks(Fork(0, 5, GREEDY, 20, 19, 20)), False),
        (asks(Preempt(0), Continue(1, 1, [])), False),
        (asks(Resume(0, 0, 0, 1, [[9]])), False),
        (asks(SetToken(0, 5), Continue(0, 1, [])), False),
        (asks(new_request(2, make_prompt(5), [7], sampling=RULED)), False),
        (asks(new_request(2, make_prompt(5), [7], sampling=Sampling(0.0, 0, 1.0, 0.0, 0, logprobs=1))), False),
        (asks(new_request(2, make_prompt(5), [7], sampling=Sampling(0.0, 0, 1.0, 0.0, 0, prompt_logprobs=1))), False),
        (SchedulerOutput(GENERATION + 1, 2, [], [Continue(0, 1, [])]), False),
    ],
    ids=lambda value: "" if isinstance(value, bool) else "+".join(type(entry).__name__ for entry in value.entries),
)
def test_only_steps_independent_of_the_last_result_run_ahead(
    step: SchedulerOutput, goes: bool, driver_of: Callable[..., Driver]
) -> None:
    assert started(driver_of(ahead=True)).can_run_ahead(step) == goes


@pytest.mark.parametrize("sampling", [RULED, Sampling(0.0, 0, 1.0, 0.0, 0, logprobs=1)], ids=["rules", "logprobs"])
def test_no_step_runs_ahead_while_a_sequence_needs_tokens(sampling: Sampling, driver_of: Callable[..., Driver]) -> None:
    driver = driver_of(ahead=True)
    worker = started(driver)
    driver.run(new_request(2, make_prompt(5), [7], sampling=sampling))
    assert not worker.can_run_ahead(asks(Continue(0, 1, [])))
    driver.run(Finish(2))
    assert worker.can_run_ahead(asks(Continue(0, 1, [])))


def test_on_a_cpu_no_step_runs_ahead(model: Path) -> None:
    assert Driver(model).worker.overlap is None


def test_a_row_that_is_not_finite_is_reported(driver_of: Callable[..., Driver]) -> None:
    worker = started(driver_of(ahead=True))
    inner = worker.runner.forward.logits
    worker.runner.forward.logits = lambda inputs: inner(inputs).index_fill(0, torch.tensor([1]), torch.nan)  # type: ignore[method-assign]
    (output,) = worker.run([asks(Continue(0, 1, []), Continue(1, 1, []))])
    assert output.failed is not None
    assert [handle for handle, _ in output.failed] == [1]


def test_warming_up_compiles_kernels_for_few_and_many_samples(
    driver_of: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a memory profile nothing else would compile them before the first large step."""
    runner = driver_of(ahead=True).worker.runner
    kernel, names = CapturingLauncher.kernel, set[str]()

    def noted(own: CapturingLauncher, source: str, name: str) -> Callable[..., None]:
        names.add(name.partition("<")[0])
        return kernel(own, source, name)

    monkeypatch.setattr(CapturingLauncher, "kernel", noted)
    monkeypatch.setattr(cuda_sampler, "MIN_PART", 16)
    monkeypatch.setattr(cuda_sampler, "BLOCKS", 4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    runner.device = torch.device("cuda")
    runner.warm_up()
    assert names >= {"pick", "best_part", "coarse_part", "draw_part"}


# ---- the loop


class ScriptedConnection:
    """A connection that delivers given messages, and records all sent ones."""

    def __init__(self, messages: list[ToWorker]) -> None:
        self.messages = messages
        self.events: list[str] = []

    def recv(self) -> bytes | None:
        return engine_to_worker.encode(self.messages.pop(0)) if self.messages else None


def loop_with(connection: ScriptedConnection, monkeypatch: pytest.MonkeyPatch) -> WorkerLoop:
    loop = WorkerLoop.__new__(WorkerLoop)
    loop.connection = cast("Any", connection)
    launch = Overlap.launch

    def launched(self: Overlap, step: SchedulerOutput) -> None:
        connection.events.append(f"launch {step.step}")
        launch(self, step)

    def send(_: WorkerLoop, message: Any) -> None:
        assert isinstance(message, ModelOutput | StepOutputs)
        connection.events.append(f"send {cast('ModelOutput', message).step}")

    monkeypatch.setattr(Overlap, "launch", launched)
    monkeypatch.setattr(WorkerLoop, "send", send)
    return loop


@pytest.mark.parametrize("device_is_quick", [False, True])
def test_a_step_that_arrives_in_time_is_launched_before_the_previous_result(
    device_is_quick: bool, driver_of: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = started(driver_of(ahead=True))
    both = [Continue(0, 1, []), Continue(1, 1, [])]
    steps = [SchedulerOutput(GENERATION, number, [], list(both)) for number in (2, 3, 4)]
    connection = ScriptedConnection([*steps[1:], Shutdown()])
    if not device_is_quick:
        monkeypatch.setattr(Overlap, "is_done", lambda _: not connection.messages)
    left = loop_with(connection, monkeypatch).run_ahead(worker, steps[0])
    if device_is_quick:  # the tokens are there first
        assert connection.events == ["launch 2", "send 2"]
        assert left is None
        return
    assert connection.events == ["launch 2", "launch 3", "send 2", "launch 4", "send 3", "send 4"]
    assert isinstance(left, Shutdown)


def test_tokens_come_to_the_host_in_the_end(driver_of: Callable[..., Driver]) -> None:
    waiting, ahead = (started(driver_of(ahead=ahead)) for ahead in (False, True))
    steps = [asks(Continue(0, 1, []), Continue(1, 1, [])) for _ in range(4)]
    outputs = ahead.run(steps)
    assert [unpack_tokens(output.tokens) for output in outputs] == [
        unpack_tokens(waiting.execute(step).tokens) for step in steps
    ]
    for handle in (0, 1):
        assert ahead.runner.batch.tokens_of(handle).tolist() == waiting.runner.batch.tokens_of(handle).tolist()


# ---- a device that hangs


class Hung:
    """The event of a launch that never ends."""

    def query(self) -> bool:
        return False


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everything that is launched from now on never finish."""
    made = PickedLater.__init__

    def hung(self: PickedLater, records: torch.Tensor, patience_s: float = 0.0) -> None:
        made(self, records, patience_s)
        self.pending = Wait(Hung(), "a step", patience_s)

    monkeypatch.setattr(PickedLater, "__init__", hung)


def test_a_device_that_hangs_is_said_and_not_waited_for(
    driver_of: Callable[..., Driver], hangs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the loop waits for the next message or the device, and while it waits for the device alone."""
    worker = driver_of(ahead=True, heartbeat_timeout_s=0.1).worker
    new = SchedulerOutput(GENERATION, 2, [], [new_request(0, make_prompt(5), [1])])
    said = r"has not finished a step within 0\.075 s, .*heartbeat-timeout-s"
    connection = ScriptedConnection([])
    with pytest.raises(DeviceHungError, match=said):
        loop_with(connection, monkeypatch).run_ahead(worker, new)
    assert connection.events == ["launch 2"]
    assert worker.overlap is not None
    with pytest.raises(DeviceHungError, match=said):
        worker.overlap.take()


def test_a_device_that_hangs_is_said_by_steps_that_wait(driver_of: Callable[..., Driver], hangs: None) -> None:
    worker = driver_of(ahead=True, heartbeat_timeout_s=0.1).worker
    step = SchedulerOutput(GENERATION, 2, [], [new_request(0, make_prompt(5), [1], sampling=RULED)])
    with pytest.raises(DeviceHungError, match=r"within 0\.075 s"):
        worker.execute(step)


def test_the_end_of_a_wait_that_was_short() -> None:
    """An event that completes after some polls, and one whose device has an error."""
    answers = iter([False] * 3 + [True])
    Wait(cast("Any", SimpleNamespace(query=lambda: next(answers))), "it", 60).wait()
    assert next(answers, None) is None

    def fails() -> bool:
        raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        Wait(cast("Any", SimpleNamespace(query=fails)), "it", 60).wait()
