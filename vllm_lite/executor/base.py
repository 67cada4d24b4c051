"""Executor: the interface between the engine and the workers, or a simulation, that run its steps.

It has a file of its own so that the engine, and other executors, import no particular one.
"""

from typing import NamedTuple, Protocol

from vllm_lite.errors import EngineDeadError, VllmLiteError
from vllm_lite.protocol.control import AdapterRead, BeginProfile, EndProfile, Profiled, Ready, StepTiming
from vllm_lite.protocol.stats import RestartCause
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.protocol.transfers import Transfer, TransferAnswer
from vllm_lite.transport.interface import Watched


class Failure(NamedTuple):
    """The rank that failed first, its cause, and the error to report. An uncertain one may be corrected by a message
    that has not arrived yet."""

    rank: int
    cause: RestartCause
    error: VllmLiteError
    is_certain: bool


class WorkersLostError(EngineDeadError):
    """A worker group cannot compute any more. The text is the first symptom; the executor's failure() finds the cause a
    little later."""


class Executor(Watched, Protocol):
    """One group of workers, which runs steps in the order of submission.

    Order of the calls: spawn, begin_load, ready, begin_allocate, started, then submit and poll. Only close() blocks.
    Once a worker has died, hung or failed, every call except end(), has_ended(), close() and failure() raises
    WorkersLostError; failure() then finds the cause. `pollables` become readable when there is anything to poll.
    """

    def spawn(self) -> None:
        """Start the workers, which finish their imports and then wait. Raises EngineError if they cannot start."""

    def is_prepared(self) -> bool:
        """Whether all workers of a standby group have finished their imports."""

    def begin_load(self, timeout_s: float, model: str | None = None) -> None:
        """Let the workers load the model; from here on they take device memory. `model`: the checkpoint's folder,
        instead of the configured one."""

    def ready(self) -> Ready | None:
        """Common abilities of all workers, once the model is loaded everywhere; None before that.

        Raises ModelError or ConfigError if they cannot load it, EngineError if that takes longer than `timeout_s`.
        """

    def begin_allocate(self, num_blocks: int, num_host_blocks: int, timeout_s: float) -> None:
        """Let the workers allocate the KV pools."""

    def started(self) -> float | None:
        """Rate of block moves between the pools in blocks per second, 0 if unknown; None until they are allocated.

        Raises EngineError if that takes longer than `timeout_s`.
        """

    def timings(self) -> tuple[StepTiming, ...]:
        """Step timings that the first worker measured at its start; may be empty."""

    def submit(self, *steps: SchedulerOutput) -> None:
        """Send steps to the workers in one message. Their results come in one message, too."""

    def poll(self) -> ModelOutput | None:
        """Take the result of the oldest step whose result has not been taken; None if the result has not arrived."""

    def read_adapter(self, number: int, name: str, path: str) -> None:
        """Let the workers read a LoRA adapter between two steps."""

    def drop_adapter(self, number: int) -> None:
        """Let the workers drop an adapter; no later step uses it."""

    def adapters_read(self) -> list[AdapterRead]:
        """Take the answers about adapters, one per adapter, once all workers have read it or one has failed."""

    def transfer(self, message: Transfer) -> None:
        """Let the workers move contents between the pools and a disk tier, after the steps submitted before."""

    def transferred(self) -> list[TransferAnswer]:
        """Take the answers about transfers, one per transfer, once all ranks have ended it; failures on any rank
        count."""

    def profile(self, message: BeginProfile | EndProfile) -> None:
        """Let the workers begin or end a profile between two steps."""

    def profiled(self) -> list[Profiled] | None:
        """The workers' answers to the latest profile message; None until all have arrived."""

    def expert_tokens(self) -> list[list[int]]:
        """Tokens per layer and expert that this group has computed; empty if they are not counted."""

    def failure(self) -> Failure | None:
        """The cause of a WorkersLostError; None while a message with a better one may still arrive."""

    def end(self) -> None:
        """Begin to end all workers. May be called repeatedly."""

    def has_ended(self) -> bool:
        """Whether all workers are gone after end(). Raises EngineError for one that cannot be ended."""

    def close(self) -> None:
        """End all workers, wait until they are gone, and release the group's resources. Safe to call twice."""
