"""The worker's process with a ledger, in which recorded programs tell the time of each call. Entry point of a child."""

from vllm_lite.bench.ledger import Ledger
from vllm_lite.config import WorkerSettings
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.supervise import run_child
from vllm_lite.transport.interface import poller
from vllm_lite.wakeup import Wakeup
from vllm_lite.worker import process
from vllm_lite.worker.graphs import DecodeGraphs, DecodeInputs
from vllm_lite.worker.input_batch import InputBatch
from vllm_lite.worker.sampler import Sampler
from vllm_lite.worker.worker import Worker

LINEARS = ("qkv", "output", "gate-up", "down")
"""The linear layers of a decoder layer, in their order; the last one of all is the LM head."""


def _process_main(settings: WorkerSettings, stop: Wakeup) -> int:
    ledger = Ledger()
    ledger.watch(type(poller()), {"poll": "wait"})
    ledger.watch(process.Session, {"receive": "receive", "send": "send"})
    ledger.watch(InputBatch, dict.fromkeys(("apply", "build", "sample_inputs", "commit"), "batch"))
    ledger.watch(DecodeInputs, {"load": "batch"})
    ledger.watch(DecodeGraphs, {"logits": "graph"})
    ledger.watch(Sampler, {"sample": "sampler"})
    ledger.watch(Worker, {"execute": "runner"})
    _watch_programs(ledger)
    _end_steps(ledger)
    try:
        return process.process_main(settings, stop)
    finally:
        ledger.save("worker")


def _watch_programs(ledger: Ledger) -> None:
    """Their calls appear as "call NAME", and how many there are as "calls NAME"."""

    def profile(program: Program) -> None:
        names = call_names(program.names)
        for name, took_ns in zip(names, program.profile().tolist(), strict=True):
            ledger.add(f"call {name}", took_ns)
            ledger.add(f"calls {name}", 1)

    Program.replay = ledger.timed("program", profile)  # type: ignore[method-assign]


def _end_steps(ledger: Ledger) -> None:
    """Behind each step: what it costs to send its results counts for the next one."""
    execute = Worker.execute

    def execute_and_turn(worker: Worker, step: SchedulerOutput) -> ModelOutput:
        output = execute(worker, step)
        ledger.end_step(streams=len(step.entries), steps=1)
        return output

    Worker.execute = execute_and_turn  # type: ignore[method-assign,assignment]


def call_names(functions: list[str]) -> list[str]:
    """What each call of a program is for, by the order of a decoder's linear layers."""
    names = [function.removeprefix("vllm_lite_") for function in functions]
    linears = [index for index, name in enumerate(names) if name == "linear"]
    for number, index in enumerate(linears):
        names[index] = "linear " + ("LM head" if index == linears[-1] else LINEARS[number % len(LINEARS)])
    return names


if __name__ == "__main__":
    run_child(_process_main, WorkerSettings, graceful=True)
