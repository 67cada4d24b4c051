"""The worker's process with a ledger; recorded programs measure each of their calls. Entry point of a child."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from micro.ledger import Ledger
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.kernels.cpu.weights.record import Record
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport.interface import poller
from vllm_lite.worker import process
from vllm_lite.worker.batch.input_batch import InputBatch
from vllm_lite.worker.graphs import DecodeGraphs, DecodeInputs
from vllm_lite.worker.sampling.ranked_sampler import RankedSampler
from vllm_lite.worker.sampling.sampler import Sampler
from vllm_lite.worker.worker import Worker

LINEARS = ("qkv", "output", "gate-up", "down")
"""The linear layers of a dense decoder layer, in their order; the last one of all is the LM head."""


def _process_main(settings: WorkerSettings, stop: Wakeup) -> int:
    ledger = Ledger()
    ledger.watch(type(poller()), {"poll": "wait"})
    ledger.watch(process.WorkerLoop, {"receive": "receive", "send": "send"})
    ledger.watch(InputBatch, dict.fromkeys(("apply", "build", "sample_inputs", "commit"), "batch"))
    ledger.watch(DecodeInputs, {"load": "batch"})
    ledger.watch(DecodeGraphs, {"logits": "graph"})
    for sampler in (Sampler, RankedSampler):
        ledger.watch(sampler, {"sample": "sampler"})
    ledger.watch(Worker, {"execute": "runner"})
    profiles = _Profiles(ledger)
    _end_steps(ledger)
    try:
        return process.process_main(settings, stop)
    finally:
        if settings.rank == 0:  # only rank 0 answers the engine, so its steps include the answers
            profiles.enter()
            ledger.save("worker")


class _Profiles:
    """Collects the times of the calls of recorded programs, and adds them up by name only after the last step, so that
    steps take no longer. Names are read when a program is recorded, because the model may be gone at the end."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: list[tuple[int, Program, NDArray[np.int64]]] = []
        self._names: dict[Program, list[str]] = {}
        Program.replay = ledger.timed("program", self._replay)  # type: ignore[method-assign]
        record = Program.record

        def record_and_name(program: Program, run: Callable[[], None]) -> None:
            record(program, run)
            self._names[program] = call_names(program.names, program.first_arguments)

        Program.record = record_and_name  # type: ignore[method-assign,assignment]

    def _replay(self, program: Program) -> None:
        self._kept.append((len(self._ledger.steps), program, program.profile()))

    def enter(self) -> None:
        """Write the times into the ledger as "call NAME", and the numbers of calls as "calls NAME"."""
        for number, program, times_ns in self._kept:
            step = self._ledger.steps[number]
            for name, took_ns in zip(self._names[program], times_ns.tolist(), strict=True):
                step[f"call {name}"] = step.get(f"call {name}", 0) + took_ns
                step[f"calls {name}"] = step.get(f"calls {name}", 0) + 1


def _end_steps(ledger: Ledger) -> None:
    """End the ledger's step when the worker has executed a step. The time to send its results counts towards the next
    step."""
    execute = Worker.execute

    def execute_and_end_step(worker: Worker, step: SchedulerOutput) -> ModelOutput:
        output = execute(worker, step)
        ledger.end_step(streams=len(step.entries), steps=1)
        return output

    Worker.execute = execute_and_end_step  # type: ignore[method-assign,assignment]


def call_names(functions: list[str], first_arguments: list[int]) -> list[str]:
    """Name each call of a program. Linear layers are named by their order in a decoder layer, in models with experts by
    their numbers of outputs and inputs; the last one is the LM head."""
    names = [function.removeprefix("vllm_lite_") for function in functions]
    linears = [index for index, name in enumerate(names) if name == "linear"]
    for number, index in enumerate(linears):
        if index == linears[-1]:
            own = "LM head"
        elif "experts" in names:
            weight = Record.from_address(first_arguments[index])
            own = f"{weight.num_outputs} x {weight.num_inputs}"
        else:
            own = LINEARS[number % len(LINEARS)]
        names[index] = f"linear {own}"
    return names


if __name__ == "__main__":
    run_child(_process_main, WorkerSettings, graceful=True)
