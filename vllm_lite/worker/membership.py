"""Membership: one worker's connection to the other ranks of its group, and its message when it or one of them fails.

It has the group's shared memory from the start, so that a worker which fails before it is connected, such as one that
cannot import torch, does not leave the others waiting for it. No torch here.
"""

import os
from typing import TYPE_CHECKING

from vllm_lite.errors import ConfigError, ModelError, RankLostError
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol.control import Failed
from vllm_lite.runtime import log
from vllm_lite.runtime.group_memory import end_group, ended_by

if TYPE_CHECKING:
    import torch

    from vllm_lite.parallel.communicator import Communicator


class Membership:
    """Created when a worker starts and closed when it ends. A single worker is a group of one."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._memory = None if settings.group is None else settings.group.memory
        self._communicator: Communicator | None = None
        self._is_connecting = False

    def connect(self, device: "torch.device", shared_bytes: int) -> "Communicator":
        """Connect to the other ranks; see parallel.select.connect."""
        from vllm_lite.parallel import select

        settings = self._settings
        self._is_connecting = True
        try:
            self._communicator = select.connect(settings.config, settings.rank, settings.group, device, shared_bytes)
        finally:
            self._is_connecting = False
        if settings.group is not None:
            log.moment("worker", "meets the other ranks")
        return self._communicator

    def is_waiting(self) -> bool:
        """Whether this rank waits for another one right now. Called by the heartbeat's thread."""
        communicator = self._communicator
        return self._is_connecting or (communicator is not None and communicator.is_waiting())

    def failed(self, error: Exception) -> Failed:
        """The message to the engine about `error`, which ends this worker.

        After another rank, or the engine, has ended the group, any error is reported as RankLostError.
        """
        settings, kind, message = self._settings, type(error).__name__, str(error)
        lost = self._communicator.lost_rank() if self._communicator is not None else None
        ended, by = (False, None) if self._memory is None else ended_by(self._memory)
        if lost is None and by != settings.rank:
            lost = by
        was_left = lost is not None or (ended and by is None)
        if was_left and not isinstance(error, RankLostError):
            kind, message = RankLostError.__name__, f"{kind}: {message}"
        bad_input = not was_left and isinstance(error, ModelError | ConfigError)
        return Failed(settings.rank, settings.generation, kind, message, bad_input, lost)

    def was_dismissed(self) -> bool:
        """Whether the engine has ended the group, because it stops or knows the rank that failed first."""
        return self._memory is not None and ended_by(self._memory) == (True, None)

    def abort(self) -> None:
        """Make the other ranks leave their waits for this one."""
        if self._communicator is not None:
            self._communicator.abort()
        if self._memory is not None:
            end_group(self._memory, self._settings.rank)

    def close(self) -> None:
        """Leave the group, and close this worker's descriptor of its memory. No thread may call any method after
        this."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            os.close(memory)
