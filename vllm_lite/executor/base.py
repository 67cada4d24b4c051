"""Executor: the interface between the engine and what runs its steps, such as worker processes or a simulation.

It has a file of its own so that an executor can be written, and the engine be read, without importing another one.
"""

from typing import NamedTuple, Protocol

from vllm_lite.errors import EngineDeadError, VllmLiteError
from vllm_lite.protocol.control import AdapterRead, BeginProfile, EndProfile, Profiled, Ready, StepTiming
from vllm_lite.protocol.stats import RestartCause
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.protocol.transfers import Transfer, TransferAnswer
from vllm_lite.transport.interface import Watched


class Failure(NamedTuple):
    """The rank that failed first, what happened to it, and the error that says so. One that is not certain may be
    corrected by a message that is still on its way."""

    rank: int
    cause: RestartCause
    error: VllmLiteError
    is_certain: bool


class WorkersLostError(EngineDeadError):
    """A group of workers can compute nothing any more. Its text is what was known when that was noticed; the executor's
    failure() knows better a little later."""


class Executor(Watched, Protocol):
    """One group of workers, which runs steps in the order submitted.

    Its life: spawn, begin_load, ready, begin_allocate, started, then submit and poll; no call blocks but close(). As
    soon as a worker has died, hung or failed, every call but end() and close() raises WorkersLostError; nothing can be
    submitted after that, and failure() finds out why. `pollables` announce whatever there is to ask for.
    """

    def spawn(self) -> None:
        """Start the workers, which import what they need and then wait. Raises EngineError if that is impossible."""

    def is_prepared(self) -> bool:
        """Whether all workers of a group that is to replace another one have imported what they need."""

    def begin_load(self, timeout_s: float, model: str | None = None) -> None:
        """Have them load the model: memory is measured and taken from here on. `model`: the checkpoint in this folder,
        in place of the configuration's."""

    def ready(self) -> Ready | None:
        """Common abilities of all workers, once the model is loaded everywhere; None before that.

        Raises ModelError or ConfigError if they cannot load it, EngineError if that takes longer than `timeout_s`.
        """

    def begin_allocate(self, num_blocks: int, num_host_blocks: int, timeout_s: float) -> None:
        """Have the KV pools allocated."""

    def started(self) -> float | None:
        """Blocks per second that move between the pools, 0 if unknown; None until those are there.

        Raises EngineError if that takes longer than `timeout_s`.
        """

    def timings(self) -> tuple[StepTiming, ...]:
        """Steps that the first worker has timed when it started; none: it has not."""

    def submit(self, *steps: SchedulerOutput) -> None:
        """Hand steps to the workers. The results of several may come together."""

    def poll(self) -> ModelOutput | None:
        """The result of the oldest step whose result has not been taken, or None."""

    def read_adapter(self, number: int, name: str, path: str) -> None:
        """Have the workers read a LoRA adapter, between two steps."""

    def drop_adapter(self, number: int) -> None:
        """Have them forget it; no step that is submitted later has it."""

    def adapters_read(self) -> list[AdapterRead]:
        """Answers on adapters: of each once, that all workers have read it or why one cannot."""

    def transfer(self, message: Transfer) -> None:
        """Have the workers move contents between the pools and a tier, behind the steps that were submitted before."""

    def transferred(self) -> list[TransferAnswer]:
        """Their answers: of each transfer once, when all ranks have ended it, and what failed on any of them."""

    def profile(self, message: BeginProfile | EndProfile) -> None:
        """Have the workers profile their steps, or end that, between two steps."""

    def profiled(self) -> list[Profiled] | None:
        """Their answers to the last such message; None until all have come."""

    def expert_tokens(self) -> list[list[int]]:
        """For each layer how many tokens each of its experts has got from this group; empty if nobody counts them."""

    def failure(self) -> Failure | None:
        """After a WorkersLostError: what happened. None as long as a message that says more may be on its way."""

    def end(self) -> None:
        """Begin to end all workers. May be called again."""

    def has_ended(self) -> bool:
        """After end(): whether all of them are gone. Raises EngineError for one that cannot be ended."""

    def close(self) -> None:
        """End all workers, wait for that, and remove what belongs to the group. Safe to call twice."""
