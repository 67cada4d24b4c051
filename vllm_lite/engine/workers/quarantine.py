"""Quarantine: runs suspects apart from all other requests until it is known which of them kills the workers.

While there are suspects, a group of them runs and all other sequences are held, new ones included. Only one step is in
flight then, so that a death counts against exactly the requests of that step, whose progress is known. The trial ends
when no suspect is left; all requests then continue in their old order.
"""

from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.in_flight import InFlight
from vllm_lite.engine.scheduling.queues import Queues
from vllm_lite.engine.scheduling.step_plan import OnDecision
from vllm_lite.engine.sequence import Status
from vllm_lite.engine.workers.suspects import Suspects
from vllm_lite.protocol.step import Continue, Draft, NewRequest, Resume


class Quarantine:
    """Holds and releases sequences in the queues, so that scheduling itself knows nothing of trials."""

    def __init__(self, queues: Queues, in_flight: InFlight) -> None:
        self._queues = queues
        self._in_flight = in_flight
        self._suspects = Suspects[Request]()
        self._group: list[Request] = []

    def on_death(self, now_s: float) -> tuple[Request, int] | None:
        """Learn from a death of the workers; call it before the steps in flight are dropped. Returns the request that
        is found to kill them, with its number of deaths in a row, or None."""
        live = set(self._queues.requests.values())
        self._suspects.forget(live)
        batch, num_ended = self._batch()
        deaths = {request: self._suspects.num_deaths(request) + 1 for request in batch}
        progress = {request: _progress(request) for request in batch}
        convicted = self._suspects.died(progress, now_s, num_ended=num_ended)
        return None if convicted is None else (convicted, deaths[convicted])

    @property
    def is_trying(self) -> bool:
        """Whether there are suspects, or sequences are still held for them."""
        return bool(self._group or self._suspects.groups)

    def _batch(self) -> tuple[list[Request], int]:
        """The live requests in the steps in flight, in order of arrival, and the number of sequences in them that have
        ended since. It is not known which of the steps were begun, so all count."""
        handles = {
            entry.handle
            for output in self._in_flight.outputs
            for entry in output.entries
            if isinstance(entry, NewRequest | Continue | Resume | Draft)
        }
        # A sequence that was preempted since is not in `running`, but still has its handle.
        known = [each for each in self._queues.unfinished() if each.handle in handles]
        requests = sorted({each.request for each in known}, key=lambda request: request.arrival)
        return requests, len(handles) - len(known)

    def lets_schedule(self, on_decision: OnDecision | None) -> bool:
        """Whether a step may be scheduled now. If there are suspects, hold all sequences but the group on trial."""
        if not self.is_trying:
            return True
        if self._in_flight:
            return False
        group = self._suspects.proceed(self._progress_of_live)
        if group != self._group:
            self._group = list(group)
            self._queues.run_only(set(group) or None)
            if on_decision is not None:
                self._report(on_decision)
        return True

    def _report(self, on_decision: OnDecision) -> None:
        for request in self._group:
            deaths, others = self._suspects.num_deaths(request), len(self._group) - 1
            for sequence in request.sequences:
                on_decision("tried", sequence, {"deaths": deaths, "others": others})
        for sequence in self._queues.held:
            on_decision("waits_for_trial", sequence, {})

    def _progress_of_live(self, request: Request) -> int | None:
        return _progress(request) if self._queues.requests.get(request.request_id) is request else None


def _progress(request: Request) -> int:
    """Progress of a live request: tokens of its shortest running sequence, or of its shortest one if none runs: a
    sample that waits for a row or blocks may have to wait until another one has ended. Samples that have not forked
    count with the prompt."""
    running = [sequence.num_tokens for sequence in request.sequences if sequence.status is Status.RUNNING]
    everywhere = (sequence.num_tokens for sequence in request.sequences)
    return min(running) if running else min(everywhere, default=request.num_prompt)
