"""Admission of waiting sequences: decides which start to run in a step, with how many tokens, and which pass others.

Admission preempts no running sequence. A sequence may pass an earlier one that does not fit yet, within two limits: one
that waits for blocks is passed by MAX_PASSED at most, and a step examines only a bounded part of the queue.
"""

from vllm_lite.engine.adapters import StepAdapters
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.verdict import Admission, Verdict
from vllm_lite.engine.scheduling.queues import Queues
from vllm_lite.engine.scheduling.step_plan import StepPlan
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.step import NewRequest, Resume

MAX_PASSED = 32
"""Maximum later sequences that are admitted before one that waits for blocks."""
MAX_BLOCKED = 16
"""A step stops examining the queue after more than this many sequences that do not fit."""
MAX_LOOKED_UP_TOKENS = 32_768
"""A step also stops after looking up more than this many tokens in the prefix cache."""


class Admitter:
    """Moves sequences from the waiting queue to the running ones."""

    def __init__(self, queues: Queues, kv: KVCacheManager) -> None:
        self._queues = queues
        self._policy = queues.policy
        self._kv = kv
        self._options = queues.options

    def schedule_waiting(self, plan: StepPlan) -> None:
        """Admit waiting sequences while the step has budget, the batch has rows and the pool has blocks.

        A prompt that does not fit whole, because shorter prompts run, loses nothing to sequences that pass it.
        """
        running, max_num_seqs = self._queues.running, self._options.max_num_seqs
        blocked: list[Sequence] = []
        passed: list[Sequence] = []  # those of `blocked` that wait for something which passing sequences take
        present = self._queues.adapters.of_step(running)
        for sequence in self._policy.waiting(plan.view):
            if plan.room <= 0:
                plan.decide("waits_for_budget", sequence, budget=plan.room)
                break
            if len(running) >= max_num_seqs:
                plan.decide("waits_for_row", sequence, rows=max_num_seqs)
                break
            if sequence.num_pending:
                continue
            if blocked and not self._policy.may_pass(sequence, blocked[0]):
                break
            is_in = False
            if _has_adapter(sequence, present, plan):
                is_in = self._admit_or_reclaim(sequence, plan, is_first=not blocked, in_parts=not passed)
            if is_in:
                present.add(sequence)
                for other in passed:
                    other.num_passed += 1
                if any(other.num_passed >= MAX_PASSED for other in passed):
                    break
                continue
            blocked.append(sequence)
            if not (plan.is_cut and self._options.chunked_prefill):
                passed.append(sequence)
                # A preempted sequence is never passed: its stream has stopped in the middle.
                if sequence.status is not Status.WAITING or sequence.num_passed >= MAX_PASSED:
                    break
            if len(blocked) > MAX_BLOCKED or plan.num_looked_up > MAX_LOOKED_UP_TOKENS:
                break

    def _admit_or_reclaim(self, sequence: Sequence, plan: StepPlan, *, is_first: bool, in_parts: bool) -> bool:
        """Call `_admit`. If nothing runs and nothing is in transfer, parked sequences behind the first waiting one lose
        their device blocks, one after the other, until it is admitted."""
        kv, running = self._kv, self._queues.running
        is_in = self._admit(sequence, plan, in_parts=in_parts)
        while is_first and not (is_in or running or kv.is_moving or plan.is_arriving) and kv.reclaim(keep=sequence):
            is_in = self._admit(sequence, plan, in_parts=True)
        return is_in

    def _admit(self, sequence: Sequence, plan: StepPlan, *, in_parts: bool) -> bool:
        """Admit a waiting sequence. False: it does not fit into this step's budget or into the free blocks.

        `in_parts` lets the step swap in only some of the sequence's host blocks. It is False behind a sequence that
        lacks blocks: a partly loaded one would hold blocks that the other needs.
        """
        kv, queues, chunk = self._kv, self._queues, self._options.max_num_batched_tokens
        known = kv.recall(sequence)
        if known is not None and not self._fits(sequence, known.num_cached, known.admission, plan):
            return False
        is_swapped = sequence.status is Status.SWAPPED
        hit = kv.find_cached(sequence) if sequence.host_ids is None else None
        if hit is None:
            computed = sequence.num_computed
            admission = kv.swap_in_admission(sequence, chunk)
        else:
            computed = min(hit.num_tokens, sequence.num_tokens - 1)
            admission = kv.admission(sequence, hit, chunk)
            plan.num_looked_up += sequence.num_tokens
        if not self._fits(sequence, computed, admission, plan):
            if hit is not None:
                kv.remember(sequence, hit, admission)
            return False
        count = min(sequence.without_last(sequence.num_tokens - computed), plan.room)
        if hit is not None and not kv.may_admit(sequence, hit, computed + count, in_parts=in_parts):
            _waits(plan, sequence, admission)
            return False
        count = kv.reachable(sequence, computed, count)
        if not count:
            plan.decide("waits_for_encoder", sequence)
            return False
        if hit is None:
            is_in = kv.swap_in(sequence, computed + count, in_parts=in_parts)
        else:
            is_in = kv.admit(sequence, hit, computed + count)
            if is_in or sequence.host_ids is not None:
                queues.meter.admitted(sequence, hit)
                for code, numbers in kv.note_admission(hit):
                    plan.decide(code, sequence, **numbers)
        if not is_in:
            parked = sequence.host_ids is not None
            plan.is_arriving = parked and kv.swap_in_admission(sequence, chunk).is_arriving
            _waits(plan, sequence, admission)
            return False
        queues.waiting.remove(sequence)
        queues.run(sequence)
        plan.entries.append(self._arrival(sequence, count))
        plan.entries += kv.arrival_entries(sequence)
        plan.decide(
            "swapped_in" if is_swapped else "admitted",
            sequence,
            tokens=count,
            cached=sequence.num_cached,
            blocks=admission.required,
        )
        # This step cannot preempt the sequence any more, so its blocks can be shared at once: each layer writes the KV
        # of the whole batch before it reads any of it.
        kv.cache_blocks(sequence, sequence.num_computed + count)
        plan.serve(sequence, count)
        return True

    def _fits(self, sequence: Sequence, num_computed: int, admission: Admission, plan: StepPlan) -> bool:
        """Whether the budget and the free blocks suffice to admit `sequence`, of which `num_computed` tokens are
        cached."""
        count = sequence.num_tokens - num_computed
        plan.is_arriving = admission.is_arriving
        plan.is_cut = count > plan.room
        if plan.is_cut and not (self._options.chunked_prefill and (plan.shortest is None or count < plan.shortest)):
            plan.decide("waits_for_budget", sequence, budget=plan.room)
            return False
        plan.is_cut = False
        if admission.verdict is not Verdict.OK:
            _waits(plan, sequence, admission)
            return False
        return True

    def _arrival(self, sequence: Sequence, num_tokens: int) -> NewRequest | Resume:
        """The entry that makes the workers run `sequence` and compute `num_tokens` of it."""
        block_ids = [list(table.ids) for table in sequence.tables]
        request = sequence.request
        if request.num_cached_at_start is None:
            request.num_cached_at_start = min(sequence.num_cached, request.num_prompt - 1)
            self._kv.counters.cached_tokens += request.num_cached_at_start
            self._kv.counters.prompt_tokens += request.num_prompt
        computed, cached = sequence.num_computed, sequence.num_cached
        if sequence.seen_by_workers:
            return Resume(sequence.handle, computed, cached, num_tokens, block_ids)
        self._queues.introduce(sequence)
        tokens, sampling = sequence.tokens.tobytes(), sequence.sampling()
        adapter = 0 if request.adapter is None else request.adapter.number
        return NewRequest(
            sequence.handle,
            tokens,
            sequence.num_prompt,
            sampling,
            computed,
            cached,
            num_tokens,
            block_ids,
            request.pooling,
            adapter,
            request.draft_group if self._queues.options.shares_answers else b"",
            request.media,
        )


def _has_adapter(sequence: Sequence, present: StepAdapters, plan: StepPlan) -> bool:
    """Whether the step can take the sequence's adapter. A sequence that waits for an adapter counts as passed, like one
    that waits for blocks: those that pass it may take the adapter's place."""
    if present.has_room_for(sequence):
        return True
    plan.is_cut = False
    plan.decide("waits_for_adapter", sequence)
    return False


def _waits(plan: StepPlan, sequence: Sequence, admission: Admission) -> None:
    """Report why a sequence is not admitted: it lacks blocks, or the step has reached its limit of swapped blocks."""
    if plan.on_decision is not None:  # called for many sequences in every step
        need, free, watermark = admission.required, admission.free, admission.watermark
        has_blocks = admission.lacks == "blocks" and free - need >= watermark
        code = "waits_for_swap" if has_blocks else f"waits_for_{admission.lacks}"
        plan.on_decision(code, sequence, {"need": need, "free": free, "watermark": watermark})
