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
"""Every kind with its weight. To stop is SIGSTOP for ever: the silence has to be noticed. To pause is SIGSTOP and, in
time, SIGCONT; to slow down is to pause again and again."""
DEADLY = ("kill-worker", "stop-worker", "kill-engine", "stop-engine", "kill-both")
SLOW_S, SLOW_TURN_S = 1.0, 0.02
IN_RECOVERY = 0.25
"""Probability that the next fault comes during the recovery from the last one."""
EARLIEST_S, LATEST_S = 0.02, 1.5
"""When, behind the last one."""


class Fault(NamedTuple):
    """`role` is whose process was hit, at `at_s` of time.monotonic(); `name` is what it is called."""

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
    """Do it to one of the processes found. None if there is none of that role, as in a recovery. It takes at most
    `pause_s`, SLOW_S for a slow one, and leaves nothing stopped but what is to stay so."""
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
    """Stop a process for a time; it goes on whatever happens here."""
    send(pid, signal.SIGSTOP)
    try:
        sleep(for_s)
    finally:
        send(pid, signal.SIGCONT)
