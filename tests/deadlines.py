"""Deadlines that hold on a slow or busy machine: a generous limit for an idle machine, times this machine's slowness.

    subprocess.run(command, timeout=scaled(60))

Every wait of a test that must not time out uses `scaled`. A setting of the product that a test lets run out, and that
would end a healthy process if it were too short (`--heartbeat-timeout-s`), uses `patience`. A wait that is meant to
time out, and ends nobody, is not scaled.
"""

import hashlib
import math
import os
import threading
import time
from collections import deque

WORK = 90_000
"""Rounds of a hash, one after another, without the interpreter's lock."""
IDLE_S = 0.02
"""Seconds that these rounds take on the reference: an idle core of an EPYC at 2.6 GHz."""
EVERY_S = 10.0
LAST_S = 60.0
"""A machine is taken to be as slow as it was at any time during the last minute."""

_measured: deque[tuple[float, float]] = deque()
"""(time of a measurement, slowness), oldest first."""


def scaled(limit_s: float) -> float:
    """Scale `limit_s`, which is far more than needed on an idle machine, to this machine."""
    return limit_s * slowness()


def patience(limit_s: float) -> float:
    """Scale `limit_s`, which is at least ten times what a healthy process needs on an idle machine, to this machine.

    A test waits for all of it, so it grows with the root of the slowness only. What needs a tenth of the limit on an
    idle machine needs less than all of it on one that is up to a hundred times slower."""
    return limit_s * math.sqrt(slowness())


def slowness() -> float:
    """Factor by which work that uses all cores takes longer here than on the reference; at least 1."""
    now_s = time.monotonic()
    if not _measured or now_s - _measured[-1][0] > EVERY_S:
        _measured.append((now_s, measure() / IDLE_S))
    while now_s - _measured[0][0] > LAST_S:
        _measured.popleft()
    return max(1.0, *(factor for _, factor in _measured))


def measure() -> float:
    """Seconds that the work takes on every core that this process may use, all at once."""
    threads = [threading.Thread(target=_work) for _ in os.sched_getaffinity(0)]
    begin_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - begin_s


def _work() -> None:
    hashlib.pbkdf2_hmac("sha256", b"a machine", b"at work", WORK)
