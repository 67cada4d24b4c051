"""Health of a worker group's ranks: finds the rank that failed first, and why.

When a rank ends, the others fail, too: they leave their waits for it with an error, or hang in them. `first_failure`
names the rank where the failure began. Its evidence, the strongest first:

1. a rank's own Failed message, unless it only waited for another rank;
2. the end of a process that has sent no message;
3. a rank that cannot be reached;
4. a rank whose heartbeats have stopped;
5. no progress of any rank: then a rank hangs that does not wait for another one;
6. the rank for which a waiting rank says that it waited.

Between ranks with the same evidence the group's shared memory decides, then the time of notice, then the least
progress.
"""

import time
from collections.abc import Sequence

from vllm_lite.errors import EngineDeadError, ModelError, RankLostError, VllmLiteError
from vllm_lite.executor.base import Failure
from vllm_lite.protocol.control import Failed, WorkerHeartbeat

ENDS_WITHOUT_A_WORD = frozenset(("killed by SIGKILL",))
"""Ends that no other rank has caused, and that no message explains. Any other end, even by a signal that a library
raises, may be the consequence of a failure that another rank is about to report."""


class RankHealth:
    """The engine's knowledge of the health of one rank's worker. Times are those of time.monotonic()."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 0
        self.is_loaded = False
        self.failed: Failed | None = None
        self.ended: str | None = None
        """End of its process: "killed by SIGKILL", "exit status 1"."""
        self.is_reachable = True
        self.noticed_s = float("inf")
        """Time at which the first of these three was noticed."""
        self.known_s = 0.0
        """Time at which its end or its reason was noticed, whichever was later; 0 before."""
        self.last_heard_s = self.last_progress_s = time.monotonic()
        self.stopped_s: float | None = None
        """Time since which its process has been stopped; checked until it `has_torch`."""
        self.progress = -1
        self.is_waiting = False
        """Whether its latest heartbeat said that it waits for another rank or for the engine."""

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self.pid})"

    def on_heartbeat(self, message: WorkerHeartbeat, now_s: float) -> None:
        self.is_waiting = message.waiting
        if message.progress != self.progress:
            self.progress, self.last_progress_s = message.progress, now_s

    def on_failed(self, failed: Failed, now_s: float) -> None:
        self.failed = self.failed or failed
        self.noticed_s, self.known_s = min(self.noticed_s, now_s), now_s

    def on_ended(self, reason: str, now_s: float) -> None:
        self.ended = reason
        self.noticed_s, self.known_s = min(self.noticed_s, now_s), now_s

    def on_unreachable(self, now_s: float) -> None:
        """Record that a message could not be delivered to its process."""
        self.is_reachable = False
        self.noticed_s = min(self.noticed_s, now_s)

    def is_well(self, now_s: float, limit_s: float) -> bool:
        """Whether it runs, sends heartbeats and makes progress."""
        if self.noticed_s != float("inf") or self.is_silent(now_s, limit_s):
            return False
        return now_s - self.last_progress_s <= limit_s

    def excuse(self, seconds: float, now_s: float) -> None:
        """Subtract time in which the engine did not listen, from its silence and its time without progress."""
        self.last_heard_s = min(now_s, self.last_heard_s + seconds)
        self.last_progress_s = min(now_s, self.last_progress_s + seconds)
        if self.stopped_s is not None:
            self.stopped_s = min(now_s, self.stopped_s + seconds)

    @property
    def is_explained(self) -> bool:
        """Whether it has sent its reason or its process has ended, so that silence is no evidence."""
        return self.failed is not None or self.ended is not None

    @property
    def has_torch(self) -> bool:
        """Whether it has begun to load: progress grows with the weights read."""
        return self.is_loaded or self.progress > 0

    def on_looked_at(self, now_s: float, *, is_stopped: bool) -> None:
        """Record whether its process is stopped (SIGSTOP)."""
        self.stopped_s = (now_s if self.stopped_s is None else self.stopped_s) if is_stopped else None

    def is_silent(self, now_s: float, limit_s: float) -> bool:
        """Whether its heartbeats have been missing for `limit_s`. Before it has begun to load this only counts if the
        process is stopped: importing torch from a cold disk holds the GIL, and with it the heartbeat's thread. Until
        then the deadline of the start applies."""
        since_s = self.last_heard_s if self.has_torch else self.stopped_s
        return since_s is not None and now_s - since_s > limit_s


def first_failure(
    ranks: Sequence[RankHealth], now_s: float, limit_s: float, *, has_work: bool, first_to_abort: int | None = None
) -> Failure | None:
    """The failure with which that of the group began; None while all ranks are well.

    `limit_s`: maximum silence, and with work to do also the maximum time without progress. `first_to_abort`: the rank
    that ended the group first, as the group's memory says.
    """
    by_reports = _first_reported(ranks, first_to_abort)
    if by_reports is not None:
        return by_reports
    silent = [rank for rank in ranks if not rank.is_explained and rank.is_silent(now_s, limit_s)]
    if silent:
        return _silent(min(silent, key=lambda rank: rank.progress), now_s)
    if has_work and all(now_s - rank.last_progress_s > limit_s for rank in ranks):
        return _stuck(ranks, now_s, limit_s)
    return _waited(ranks, first_to_abort)


def slowest(ranks: Sequence[RankHealth]) -> RankHealth:
    """The rank for which the others wait, judged by the heartbeats."""
    return min(ranks, key=lambda rank: (rank.is_waiting, rank.progress))


def awaits_cause(ranks: Sequence[RankHealth]) -> bool:
    """Whether a rank has neither reported nor ended, and none has ended without a report: it may report a cause."""
    known = [rank for rank in ranks if rank.is_explained]
    return len(known) < len(ranks) and all(rank.failed is not None for rank in known)


def _first_reported(ranks: Sequence[RankHealth], first_to_abort: int | None) -> Failure | None:
    """Judge by reports and ends: rules 1 to 3."""
    in_order = sorted(ranks, key=lambda rank: (rank.rank != first_to_abort, rank.noticed_s, rank.progress))
    for rank in in_order:
        if rank.failed is not None and _is_cause(rank.failed):
            return Failure(rank.rank, "failed", _reported(rank.failed), first_to_abort in (None, rank.rank))
    for rank in in_order:
        if rank.ended is not None and rank.failed is None:
            error = EngineDeadError(f"{rank} died: {rank.ended}")
            is_certain = rank.ended in ENDS_WITHOUT_A_WORD and first_to_abort in (None, rank.rank)
            return Failure(rank.rank, "died", error, is_certain)
    for rank in in_order:
        if not rank.is_reachable and rank.failed is None:
            reason = f"worker {rank.rank} cannot be reached any more"
            return Failure(rank.rank, "unreachable", EngineDeadError(reason), is_certain=False)
    return None


def _is_cause(failed: Failed) -> bool:
    return failed.waited_for is None and failed.kind != RankLostError.__name__


def _reported(failed: Failed) -> VllmLiteError:
    if failed.bad_input:
        return ModelError(failed.message)
    return EngineDeadError(f"worker {failed.rank} failed: {failed.kind}: {failed.message}")


def _silent(rank: RankHealth, now_s: float) -> Failure:
    reason = f"{rank} has been silent for {now_s - rank.last_heard_s:.0f} s"
    return Failure(rank.rank, "silent", EngineDeadError(reason), is_certain=True)


def _stuck(ranks: Sequence[RankHealth], now_s: float, limit_s: float) -> Failure:
    """The failure of a group without progress. A rank that was stopped while it waited still looks as if it waited;
    half of the limit without a heartbeat shows the difference."""
    silent = [rank for rank in ranks if rank.is_silent(now_s, limit_s / 2)]
    if silent:
        return _silent(slowest(silent), now_s)
    rank = slowest(ranks)
    error = EngineDeadError(f"{rank} is stuck: no layer in {limit_s:.0f} s")
    return Failure(rank.rank, "stuck", error, is_certain=True)


def _waited(ranks: Sequence[RankHealth], first_to_abort: int | None) -> Failure | None:
    """Name the rank that others waited for, if only waiting ranks have reported."""
    failed = next((rank.failed for rank in ranks if rank.failed is not None), None)
    if failed is None:
        return None
    lost = failed.waited_for if first_to_abort is None else first_to_abort
    if lost is None or lost == failed.rank:
        return Failure(failed.rank, "failed", _reported(failed), is_certain=False)
    reason = f"worker {lost} was lost, and did not say why; worker {failed.rank} waited for it: {failed.message}"
    return Failure(lost, "died", EngineDeadError(reason), is_certain=False)
