"""Preemption: allocates blocks for a running sequence, if need be by taking those of another one, which waits again.

The victim's KV is swapped to the host, or released; then it is later loaded from disk, as far as it is stored there,
or computed again.
"""

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import Growth
from vllm_lite.engine.scheduling.queues import Queues
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.scheduling.step_plan import StepPlan
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.step import Fork, Preempt


class Preemption:
    """Moves sequences from the running ones to the waiting queue."""

    def __init__(self, queues: Queues, kv: KVCacheManager) -> None:
        self._queues = queues
        self._policy = queues.policy
        self._kv = kv

    def grow(self, sequence: Sequence, num_tokens: int, candidates: list[Sequence], plan: StepPlan) -> Growth | None:
        """Allocate blocks for `num_tokens` of `sequence`, if need be by preempting some of `candidates`: the sequences
        that this step has not served yet, among them `sequence`. None: `sequence` itself was preempted."""
        while (growth := self._kv.grow(sequence, num_tokens)) is None:
            if self._kv.reclaim():
                continue
            victim = (
                candidates[-1] if self._policy.choose_victim is None else self._policy.victim(candidates, plan.view)
            )
            candidates.remove(victim)
            running = self._queues.running
            running.remove(victim) if victim is not running[-1] else running.pop()
            self.preempt(victim, sequence, plan)
            if victim is sequence:
                return None
        plan.entries += growth.entries
        return growth

    def preempt(self, victim: Sequence, winner: Sequence, plan: StepPlan) -> None:
        """Take all device blocks of `victim`, which has left `running` already, and let it wait again."""
        victim.lose_blocks()
        # Blocks that a new fork shares may be written by this very step, after the block ops that would move them.
        is_new = any(isinstance(entry, Fork) and entry.child == victim.handle for entry in plan.entries)
        how = "recompute"
        if not is_new and self._prefers_swap(victim, plan.rates) and self._kv.swap_out(victim):
            how = "swap"
        else:
            self._kv.release(victim)
            if self._kv.num_stored(victim):
                how = "disk"
        swapped = how == "swap"
        self._queues.wait(victim, Status.SWAPPED if swapped else Status.PREEMPTED)
        plan.num_preempted += 1
        plan.entries.append(Preempt(victim.handle))
        self._kv.counters.swaps += swapped
        self._kv.counters.preemptions += 1
        victim.request.num_preemptions += 1
        plan.decide("preempted", victim, **{"for": winner.request.request_id, "by": how})

    def _prefers_swap(self, victim: Sequence, rates: Rates) -> bool:
        """Whether to swap the victim's blocks to the host instead of computing their tokens again."""
        if self._queues.options.preemption != "auto":
            return self._queues.options.preemption == "swap"
        num_tokens = victim.num_computed
        return rates.prefer_swap(num_tokens, self._kv.num_moved(num_tokens), self._kv.num_stored(victim))
