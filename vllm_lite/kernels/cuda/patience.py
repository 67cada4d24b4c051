"""Waiting for a GPU with a deadline: one that hangs is found out by the thread that waits for it, and named.

A synchronising call of CUDA waits for ever, and says nothing. So the thread that has launched something asks for its
event again and again, until that is done or the patience is at an end.
"""

import time
from typing import Protocol

from vllm_lite.errors import DeviceHungError

PATIENCE_S = 15.0
"""How long a device may take by default."""
SPIN_S = 0.02
"""So long the host asks without a pause, as a step takes milliseconds and a thread that sleeps wakes up late."""
NAP_S = 0.0005
"""Its pauses from then on."""


class Event(Protocol):
    """torch.cuda.Event, as far as it is needed."""

    def query(self) -> bool:
        """Whether the device has done all that was launched before. Raises RuntimeError for an error of the device."""
        ...


class Wait:
    """For one event, from now on."""

    def __init__(self, event: Event, what: str, patience_s: float) -> None:
        """`what` is waited for, as the error names it; `patience_s` seconds at most."""
        self._event = event
        self._what = what
        self._patience_s = patience_s
        self._start_s = time.monotonic()

    def is_over(self) -> bool:
        """Whether the device is done. Raises DeviceHungError once it has taken longer than the patience lasts."""
        if self._event.query():
            return True
        if time.monotonic() - self._start_s > self._patience_s:
            raise DeviceHungError(
                f"the GPU has not finished {self._what} within {self._patience_s:g} s, so it is taken to hang "
                "(three quarters of --heartbeat-timeout-s; more where steps may take so long)"
            )
        return False

    def wait(self) -> None:
        """Return when the device is done. Raises DeviceHungError as `is_over` does."""
        while not self.is_over():
            time.sleep(0 if time.monotonic() - self._start_s < SPIN_S else NAP_S)
