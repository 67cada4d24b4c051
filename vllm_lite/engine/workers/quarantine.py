"""Quarantine: keeps suspects apart from all other requests until it is known which of them kills the workers.

While there are suspects, a group of them runs and everything else is held: running and waiting sequences, and those
that arrive. One step at a time is in flight then, so that a death speaks against those who were in that step, and how
far each of them had come is known exactly. The trial ends when no suspect is left, and all go on in their old order.
"""

from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.in_flight import InFlight
from vllm_lite.engine.scheduling.queues import Queues
from vllm_lite.engine.scheduling.step_plan import OnDecision
from vllm_lite.engine.sequence import Status
from vllm_lite.engine.workers.suspects import Suspects
from vllm_lite.protocol.step import Continue, Draft, NewRequest, Resume


class Quarantine:
    """Stands before the queues, so that what is made of them need not know of any trial."""

    def __init__(self, queues: Queues, in_flight: InFlight) -> None:
        self._queues = queues
        self._in_flight = in_flight
        self._suspects = Suspects[Request]()
        self._group: list[Request] = []

    def on_death(self, now_s: float) -> tuple[Request, int] | None:
        """The workers have died with these steps in flight. Call it before anything of them is dropped. Returns a
        request that was found to kill them, if there is one, and the number of deaths in a row in which it was."""
        live = set(self._queues.requests.values())
        self._suspects.forget(live)
        batch, num_ended = self._batch()
        deaths = {request: self._suspects.num_deaths(request) + 1 for request in batch}
        progress = {request: _progress(request) for request in batch}
        convicted = self._suspects.died(progress, now_s, num_ended=num_ended)
        return None if convicted is None else (convicted, deaths[convicted])

    @property
    def is_trying(self) -> bool:
        """Whether there are suspects, or those that were held for them have not been let go yet."""
        return bool(self._group or self._suspects.groups)

    def _batch(self) -> tuple[list[Request], int]:
        """The live requests that the steps in flight compute, as they arrived, and the number of sequences that have
        ended since. Which of the steps were begun is not known; all are sent before the engine looks at its workers."""
        handles = {
            entry.handle
            for output in self._in_flight.outputs
            for entry in output.entries
            if isinstance(entry, NewRequest | Continue | Resume | Draft)
        }
        # One that was preempted since has left `running`, and still has its handle.
        known = [each for each in self._queues.unfinished() if each.handle in handles]
        requests = sorted({each.request for each in known}, key=lambda request: request.arrival)
        return requests, len(handles) - len(known)

    def lets_schedule(self, on_decision: OnDecision | None) -> bool:
        """Whether a step may be made now. If there are suspects, the queues hold all but the group on trial."""
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
    """Progress of a live request: tokens of the sequence that has least. While some run, only they count: a sample that
    waits for a row or for blocks may do so until another one has ended, and all else is held meanwhile. Samples that
    have not forked are as far as its prompt."""
    running = [sequence.num_tokens for sequence in request.sequences if sequence.status is Status.RUNNING]
    everywhere = (sequence.num_tokens for sequence in request.sequences)
    return min(running) if running else min(everywhere, default=request.num_prompt)
