"""Executor: the interface between the engine and what runs its steps, such as worker processes or a simulation.

It has a file of its own so that an executor can be written, and the engine be read, without importing another one.
"""

from typing import Protocol

from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.transport import Wakeup
from vllm_lite.transport.interface import Watched


class Executor(Watched, Protocol):
    """Runs steps in the order submitted. Every method may raise EngineDeadError, with the root cause, once a worker
    has died, hung or refused; nothing can be submitted after that."""

    def start(self, timeout_s: float, stop: Wakeup) -> Ready:
        """Block until the model is loaded everywhere; the smallest capacity of any worker. `stop` ends the wait."""

    def allocate(self, num_blocks: int, num_host_blocks: int) -> float:
        """Have the KV pools allocated. Block until they are; blocks per second that move between them, 0 if unknown."""

    def submit(self, *steps: SchedulerOutput) -> None:
        """Hand steps to the workers. Returns at once. The results of several may come together."""

    def poll(self) -> ModelOutput | None:
        """The result of the oldest step whose result has not been taken, or None. Never blocks."""

    def close(self) -> None:
        """End all workers. Safe to call twice."""
