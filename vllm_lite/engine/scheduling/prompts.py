"""Prompts: shares the token budget that decodes leave between running and waiting prompts."""

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import Growth
from vllm_lite.engine.scheduling.admission import Admitter
from vllm_lite.engine.scheduling.preemption import Preemption
from vllm_lite.engine.scheduling.queues import Queues
from vllm_lite.engine.scheduling.step_plan import StepPlan, joined
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.step import Continue


class Prompts:
    """Cuts running prompts into chunks, and lets the Admitter admit waiting ones."""

    def __init__(self, queues: Queues, kv: KVCacheManager, preemption: Preemption, admitter: Admitter) -> None:
        self._queues = queues
        self._kv = kv
        self._preemption = preemption
        self._admitter = admitter

    def schedule(self, plan: StepPlan) -> None:
        """Share the budget that decodes leave between running and waiting prompts.

        The first running prompt gets half of the budget, and whatever the others leave. The other half goes, in this
        order, to running prompts that it completes, to waiting ones, and to the running one that lacks least. So short
        prompts do not wait for long ones, and none starves, since each becomes the first in time. The first prompt
        allocates the blocks of its half before all others: if it came last, it would be preempted for those behind it,
        and they for it.
        """
        unserved = list(plan.prompts)
        plan.room = plan.budget
        share = 0
        growth: Growth | None = None
        if unserved and plan.budget:
            first = unserved[0]
            half = plan.budget - plan.budget // 2
            share = self._count(first, half) or self._count(first, plan.budget)  # an uncut medium may need all of it
            if share:
                plan.room -= share
                growth = self._preemption.grow(first, first.num_computed + share, unserved, plan)
            if growth is None:
                plan.room = plan.budget
            else:
                unserved.remove(first)
        others = sorted((each for each in unserved if each is not plan.prompts[0]), key=Sequence.num_missing)
        while others and others[0].num_missing() <= plan.room:
            self._chunk(others.pop(0), plan.room, unserved, plan)
            others = [sequence for sequence in others if sequence.status is Status.RUNNING]
        if self._queues.waiting and not plan.num_preempted:
            plan.shortest = others[0].num_missing() if others else None
            self._admitter.schedule_waiting(plan)
        for sequence in others:
            self._chunk(sequence, plan.room, unserved, plan)
        if growth is not None:
            first = plan.prompts[0]
            # Other prompts may have used up the step's allowance of media since, but `share` has its blocks already.
            end = first.num_computed + max(share, self._count(first, plan.budget))
            more = self._kv.grow(first, end)  # for the left-over budget no sequence is preempted
            if more is None:
                room = min(end, first.num_slots) - first.num_computed
                end, more = first.num_computed + max(share, self._count(first, room)), Growth([])
            plan.entries += more.entries
            _serve(first, end, joined(growth.new_ids, more.new_ids), plan)
        unserved = list(plan.forked)
        for sequence in plan.forked:
            self._chunk(sequence, plan.budget, unserved, plan)
        for sequence in plan.prompts:  # after the last preemption: only blocks that this step computes may be cached
            if sequence.status is Status.RUNNING:
                self._kv.cache_blocks(sequence, sequence.num_computed)

    def _count(self, sequence: Sequence, most: int) -> int:
        """Number of the sequence's next tokens, at most `most`, that the step can compute."""
        return self._kv.reachable(sequence, sequence.num_computed, min(sequence.num_missing(), most))

    def _chunk(self, sequence: Sequence, most: int, unserved: list[Sequence], plan: StepPlan) -> None:
        """Schedule up to `most` next tokens of a running sequence, if need be by preempting some of `unserved`."""
        if most <= 0 or sequence.status is not Status.RUNNING or (count := self._count(sequence, most)) <= 0:
            return
        end = sequence.num_computed + count
        new_ids: list[list[int]] = []
        if end > sequence.num_slots:
            growth = self._preemption.grow(sequence, end, unserved, plan)
            if growth is None:
                return
            new_ids = growth.new_ids
        unserved.remove(sequence)
        _serve(sequence, end, new_ids, plan)


def _serve(sequence: Sequence, end: int, new_ids: list[list[int]], plan: StepPlan) -> None:
    """Let the step compute the tokens of a running sequence up to `end`; their blocks are allocated."""
    count = end - sequence.num_computed
    plan.entries.append(Continue(sequence.handle, count, new_ids))
    plan.serve(sequence, count)
