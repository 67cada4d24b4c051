"""Who failed first, and why: what the engine knows of the ranks of a worker group, and what it concludes.

A rank that ends takes the others along: they leave their waits for it with an error, or hang in them. `first_failure`
names the rank where it began. What it believes, the strongest first:

1. what a rank says of itself (Failed), unless it says that it only waited for another one;
2. the end of a process that has said nothing;
3. a rank that cannot be reached;
4. a rank whose heartbeats have stopped;
5. a group in which no rank makes progress: a rank is stuck that waits for nobody;
6. what a rank that waited says of the others.

Between ranks of which the same is known, the word in the group's memory decides, then what was noticed first, then the
least progress.
"""

import time
from collections.abc import Sequence

from vllm_lite.errors import EngineDeadError, ModelError, RankLostError, VllmLiteError
from vllm_lite.executor.base import Failure
from vllm_lite.protocol.control import Failed, WorkerHeartbeat

ENDS_WITHOUT_A_WORD = frozenset(("killed by SIGKILL",))
"""Such an end is nobody's fault inside the group, and no message follows it. Any other one, a signal that a library
raises included, may be the consequence of what another rank is about to say."""


class RankHealth:
    """The engine's knowledge of the health of one rank's worker. Times are those of time.monotonic()."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 0
        self.is_loaded = False
        self.failed: Failed | None = None
        self.ended: str | None = None
        """How its process ended: "killed by SIGKILL", "exit status 1"."""
        self.is_reachable = True
        self.noticed_s = float("inf")
        """When the first of these three was noticed."""
        self.known_s = 0.0
        """When its end or its reason was noticed, whichever was later; 0 before."""
        self.last_heard_s = self.last_progress_s = time.monotonic()
        self.stopped_s: float | None = None
        """Since when its process has been seen to be stopped; looked at until it `has_torch`."""
        self.progress = -1
        self.is_waiting = False
        """Whether it waited for another rank or for the engine when its last heartbeat was sent."""

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
        """A message could not be handed to its process."""
        self.is_reachable = False
        self.noticed_s = min(self.noticed_s, now_s)

    def is_well(self, now_s: float, limit_s: float) -> bool:
        """Whether there is nothing to look into: it has not ended, is heard of, and makes progress."""
        if self.noticed_s != float("inf") or self.is_silent(now_s, limit_s):
            return False
        return now_s - self.last_progress_s <= limit_s

    def excuse(self, seconds: float, now_s: float) -> None:
        """Nobody has listened for so long: it counts neither as silence nor as time without progress."""
        self.last_heard_s = min(now_s, self.last_heard_s + seconds)
        self.last_progress_s = min(now_s, self.last_progress_s + seconds)
        if self.stopped_s is not None:
            self.stopped_s = min(now_s, self.stopped_s + seconds)

    @property
    def is_explained(self) -> bool:
        """Whether it has said why it fails, or its process has ended: its silence says nothing more."""
        return self.failed is not None or self.ended is not None

    @property
    def has_torch(self) -> bool:
        """Whether it has begun to load: the progress grows with the weights that are read."""
        return self.is_loaded or self.progress > 0

    def on_looked_at(self, now_s: float, *, is_stopped: bool) -> None:
        """Its process runs, or is stopped."""
        self.stopped_s = (now_s if self.stopped_s is None else self.stopped_s) if is_stopped else None

    def is_silent(self, now_s: float, limit_s: float) -> bool:
        """Silence counts once a worker has begun to load: importing torch from a cold disk holds the GIL, and with it
        the thread of its heartbeat, for as long as that takes. Until then it counts where the process is stopped, and
        otherwise there is the deadline of a start."""
        since_s = self.last_heard_s if self.has_torch else self.stopped_s
        return since_s is not None and now_s - since_s > limit_s


def first_failure(
    ranks: Sequence[RankHealth], now_s: float, limit_s: float, *, has_work: bool, first_to_abort: int | None = None
) -> Failure | None:
    """The failure in which that of the group began; None while all is well.

    `limit_s`: the longest silence, and, with work to do, the longest time without progress. `first_to_abort`: the rank
    that the group's memory names.
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
    """The rank for which the others wait, as far as heartbeats show."""
    return min(ranks, key=lambda rank: (rank.is_waiting, rank.progress))


def awaits_cause(ranks: Sequence[RankHealth]) -> bool:
    """Whether a rank has neither spoken nor ended, and none has ended without a word: that one is about to."""
    known = [rank for rank in ranks if rank.is_explained]
    return len(known) < len(ranks) and all(rank.failed is not None for rank in known)


def _first_reported(ranks: Sequence[RankHealth], first_to_abort: int | None) -> Failure | None:
    """Judge by what was said or noticed: rules 1 to 3."""
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
    """Nobody makes progress. A rank that was stopped while it waited looks as if it waited still: half of the limit
    without a heartbeat shows the difference."""
    silent = [rank for rank in ranks if rank.is_silent(now_s, limit_s / 2)]
    if silent:
        return _silent(slowest(silent), now_s)
    rank = slowest(ranks)
    error = EngineDeadError(f"{rank} is stuck: no layer in {limit_s:.0f} s")
    return Failure(rank.rank, "stuck", error, is_certain=True)


def _waited(ranks: Sequence[RankHealth], first_to_abort: int | None) -> Failure | None:
    """Only ranks that waited have spoken: name the one that they waited for."""
    failed = next((rank.failed for rank in ranks if rank.failed is not None), None)
    if failed is None:
        return None
    lost = failed.waited_for if first_to_abort is None else first_to_abort
    if lost is None or lost == failed.rank:
        return Failure(failed.rank, "failed", _reported(failed), is_certain=False)
    reason = f"worker {lost} was lost, and did not say why; worker {failed.rank} waited for it: {failed.message}"
    return Failure(lost, "died", EngineDeadError(reason), is_certain=False)
