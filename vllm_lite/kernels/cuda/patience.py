"""Waiting for a GPU with a timeout, so that a GPU that hangs is detected and named by the waiting thread. CUDA's
synchronising calls wait forever without an error, so the thread polls an event until it is done or the timeout is
over."""

import time
from typing import Protocol

from vllm_lite.errors import DeviceHungError

PATIENCE_S = 15.0
"""Default timeout in seconds."""
SPIN_S = 0.02
"""Time of polling without pauses, as a step takes milliseconds and a sleeping thread wakes up late."""
NAP_S = 0.0005
"""Pause between polls afterwards."""


class Event(Protocol):
    """The part of torch.cuda.Event that is used."""

    def query(self) -> bool:
        """Whether all work launched before has ended. Raises RuntimeError for an error of the device."""
        ...


class Wait:
    """A wait for one event, starting now."""

    def __init__(self, event: Event, what: str, patience_s: float) -> None:
        """`what` names the work in the error; `patience_s` is the timeout."""
        self._event = event
        self._what = what
        self._patience_s = patience_s
        self._start_s = time.monotonic()

    def is_over(self) -> bool:
        """Whether the device is done. Raises DeviceHungError after the timeout."""
        if self._event.query():
            return True
        if time.monotonic() - self._start_s > self._patience_s:
            raise DeviceHungError(
                f"the GPU has not finished {self._what} within {self._patience_s:g} s, so it is taken to hang "
                "(three quarters of --heartbeat-timeout-s; more where steps may take so long)"
            )
        return False

    def wait(self) -> None:
        """Wait until the device is done. Raises DeviceHungError like `is_over`."""
        while not self.is_over():
            time.sleep(0 if time.monotonic() - self._start_s < SPIN_S else NAP_S)
