"""The faults that chaos.py injects: signals to the engine, to workers and to clients, drawn from a seed."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from tests.acceptance.chaos_check import Process

KINDS: dict[str, int] = {
    "kill-worker": 8,
    "stop-worker": 1,
    "pause-worker": 2,
    "slow-worker": 2,
    "kill-engine": 4,
    "stop-engine": 1,
    "pause-engine": 2,
    "slow-engine": 1,
    "kill-both": 1,
    "kill-client": 2,
}
"""Kind of fault -> weight. "stop" is SIGSTOP for ever, whose silence has to be noticed. "pause" is SIGSTOP and, before
that happens, SIGCONT; "slow" is repeated pauses."""
DEADLY = ("kill-worker", "stop-worker", "kill-engine", "stop-engine", "kill-both")
SLOW_S, SLOW_TURN_S = 1.0, 0.02
IN_RECOVERY = 0.25
"""Probability that the next fault comes during the recovery from the last one."""
EARLIEST_S, LATEST_S = 0.02, 1.5
"""Earliest and latest time of such a fault after the last one."""


class Fault(NamedTuple):
    """A fault, at `at_s` of time.monotonic(). `role`: the role of the process that was hit; `name`: the name in the
    report."""

    kind: str
    role: str
    name: str
    at_s: float

    @property
    def is_deadly(self) -> bool:
        return self.kind in DEADLY


def draw(rng: random.Random, kinds: Sequence[str]) -> str:
    return rng.choices(kinds, [KINDS[kind] for kind in kinds])[0]


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def inject(kind: str, rng: random.Random, found: Sequence[Process], pause_s: float) -> Fault | None:
    """Inject a fault of this kind into one of the processes `found`. Returns None if there is none of that role, as
    during a recovery. It takes at most `pause_s`, or SLOW_S for "slow", and leaves no process stopped, except for
    "stop"."""
    what, _, role = kind.partition("-")
    workers = [process for process in found if process.role == "worker"]
    engines = [process for process in found if process.role == "engine"]
    victims = {"worker": workers, "engine": engines, "both": engines}[role]
    if not victims:
        return None
    victim = rng.choice(victims)
    fault = Fault(kind, victim.role, victim.name, time.monotonic())
    if what == "kill":
        for process in (victim, *(workers if role == "both" else ())):
            send(process.pid, signal.SIGKILL)
    elif what == "stop":
        send(victim.pid, signal.SIGSTOP)
    elif what == "pause":
        stopped(victim.pid, rng.uniform(0.05, pause_s), time.sleep)
    else:
        end_s = time.monotonic() + SLOW_S
        while time.monotonic() < end_s:
            stopped(victim.pid, SLOW_TURN_S, time.sleep)
            time.sleep(SLOW_TURN_S)
    return fault


def stopped(pid: int, for_s: float, sleep: Callable[[float], None]) -> None:
    """Stop a process for some time; it continues whatever happens here."""
    send(pid, signal.SIGSTOP)
    try:
        sleep(for_s)
    finally:
        send(pid, signal.SIGCONT)
