"""A worker without a model: it speaks the whole protocol and answers every step at once with token 1."""

from time import perf_counter

from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.codec import engine_to_worker, pack_tokens, worker_to_engine
from vllm_lite.protocol.control import KVGroupInfo, Load, Ready, Shutdown, Start, Started, WorkerHello
from vllm_lite.protocol.step import Continue, ModelOutput, NewRequest, Resume, SchedulerOutput, StepOutputs, Steps
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import connect
from vllm_lite.transport.interface import poller

SPIN_S = 50e-6
VOCAB_SIZE = 1000


def main(settings: WorkerSettings, stop: Wakeup) -> int:
    """Serve like a real worker. Every scheduled sequence is assumed to need a sample."""
    rank, generation = settings.rank, settings.generation
    connection = connect(settings.address, f"worker-{rank}".encode(), settings.keys or False)
    watched = poller(connection, stop)
    send = connection.send
    send(worker_to_engine.encode(WorkerHello(PROTOCOL_VERSION, settings.config.model, rank, generation, 0)))
    while not stop.is_set():
        spin_until = perf_counter() + SPIN_S
        while (payload := connection.recv()) is None:
            if perf_counter() > spin_until:
                watched.poll()
                if stop.is_set():
                    break
        if payload is None:
            break
        message = engine_to_worker.decode(payload)
        if isinstance(message, Shutdown):
            break
        if isinstance(message, Load):
            groups = (KVGroupInfo("full", 1),)
            send(worker_to_engine.encode(Ready(rank, generation, 4096, 1, groups, 4096, VOCAB_SIZE, ())))
            continue
        if isinstance(message, Start):
            send(worker_to_engine.encode(Started(rank, generation)))
            continue
        if rank:
            continue  # only rank 0 answers
        if isinstance(message, Steps):
            send(worker_to_engine.encode(StepOutputs([_answer(step) for step in message.steps])))
        elif isinstance(message, SchedulerOutput):
            send(worker_to_engine.encode(_answer(message)))
    connection.close()
    return 0


def _answer(step: SchedulerOutput) -> ModelOutput:
    num_scheduled = sum(isinstance(entry, NewRequest | Continue | Resume) for entry in step.entries)
    return ModelOutput(step.generation, step.step, pack_tokens([1] * num_scheduled))


if __name__ == "__main__":
    run_child(main, WorkerSettings)
