"""The scheduler decides what every step computes. No socket, tensor, text or clock may enter here: time is an argument.

There are no phases. A sequence's `num_computed` chases its tokens, and a step gives each sequence a number of them:
a whole prompt, a chunk of it, one decode token, one and some drafts. Running sequences that lack one token get it
first, so that no stream stops for a prompt. Of what is left, the prompt that has been running longest gets half, and
also what shorter prompts and newly admitted ones leave of the other half. Drafts take the tokens that are left over,
in equal parts. When blocks run out, a running sequence is preempted: its KV is swapped to the host or computed again.

Steps may be in flight while the next one is made: a sequence whose next token is unknown has it as `num_pending`. So
are its drafts, as if all of them were right; what proves wrong is taken back with the step's result.
"""

from collections.abc import Callable
from itertools import zip_longest

from vllm_lite.engine.admission import Admitter
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import Growth
from vllm_lite.engine.branching import Branching
from vllm_lite.engine.in_flight import InFlight
from vllm_lite.engine.observe.counters import Meter
from vllm_lite.engine.policy import Fcfs, GuardedPolicy, View
from vllm_lite.engine.quarantine import Quarantine
from vllm_lite.engine.queues import Options, Queues
from vllm_lite.engine.rates import MIN_PREFILL_TOKENS, Rates
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.engine.step_plan import OnDecision, StepPlan
from vllm_lite.engine.waiting_queue import WaitingQueue
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import FinishReason, PrefixCacheReset
from vllm_lite.protocol.step import (
    NOT_FINITE,
    Continue,
    Draft,
    Entry,
    Fork,
    ModelOutput,
    Preempt,
    SchedulerOutput,
)


class Scheduler:
    """Makes one step at a time from the queues, and applies its result to them. update() follows schedule() in order,
    with as many steps in flight between them as the caller likes."""

    def __init__(self, kv: KVCacheManager, options: Options, policy: object | None = None) -> None:
        self.kv = kv
        self.options = options
        self.policy = GuardedPolicy(policy or Fcfs(), self._policy_fault)
        self.on_decision: OnDecision | None = None
        self.on_policy_fault: Callable[[str], None] | None = None
        """Called once, with what was wrong, when the policy is replaced by first come, first served."""
        self.num_scheduled_tokens = 0
        """The tokens of the latest step, drafts included."""
        self.step_budget = options.max_num_batched_tokens
        """The most that it might have had."""
        longest = options.max_model_len
        if not options.chunked_prefill:  # a sequence comes in whole, however often it is preempted
            longest = min(longest, options.max_num_batched_tokens)
        self.max_len = kv.max_tokens(longest, options.max_num_batched_tokens)
        self.generation = options.generation
        """The life of the workers that compute the steps, or of the last ones if there are none."""
        self.has_workers = True
        self.is_paused = False
        """Whether schedule() is not to be called, since somebody wants that; kept here for those who describe."""
        self.counters = kv.counters
        self.meter = Meter(kv, self.max_len, max(options.num_drafts, options.num_forced))
        self.rates = Rates()
        self.in_flight = InFlight()
        self.queues = Queues(kv, self.policy, self.meter, options)
        self.branching = Branching(self.queues, kv)
        self.quarantine = Quarantine(self.queues, self.in_flight)
        self._admitter = Admitter(self.queues, kv)

    @property
    def step(self) -> int:
        """The number of the latest step."""
        return self.queues.step

    @property
    def requests(self) -> dict[str, Request]:
        """The unfinished requests by their ids."""
        return self.queues.requests

    @property
    def running(self) -> list[Sequence]:
        return self.queues.running

    @property
    def waiting(self) -> WaitingQueue:
        return self.queues.waiting

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, with the numbers, if it can never be served."""
        num_tokens = max(sequence.num_tokens for sequence in request.sequences)
        if num_tokens + (request.pooling is None) > self.max_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; with at least one of output the KV cache holds "
                f"{self.max_len} ({self.kv.pool.num_usable} blocks of {self.kv.block_size}, "
                f"{self.kv.watermark_blocks} kept free)"
            )
        self.branching.check_beams(request)
        for sequence in request.sequences:
            self.kv.register(sequence, request.extra_keys)
        self.queues.enter(request)
        for sequence in request.sequences:
            self.queues.wait(sequence)

    def expire(self, now_s: float) -> list[Produced]:
        """End the requests whose deadline has passed."""
        produced = []
        for request in self.queues.late(now_s):
            error = f"the deadline of {request.params.deadline_ms} ms passed"
            sample, start = request.open_samples()[0]
            produced.append(Produced(request, sample, start, [], reason="error", error=error))
            self.queues.end(request, "error")
        return produced

    def reset_prefix_cache(self) -> PrefixCacheReset:
        """Forget every cached block of both tiers; requests that are live go on unharmed. It decides what later steps
        find, so it belongs into a trace."""
        return self.kv.reset_cache(self.queues.unfinished())

    def hold_newcomers(self, *, are_held: bool) -> None:
        """Let no request run that comes from now on, or let all of them run again."""
        self.queues.hold_newcomers(are_held=are_held)

    # ---- workers come and go

    def lose_workers(self, cause: str, now_s: float) -> list[Produced]:
        """All workers have died of `cause`, or were ended: drop the steps in flight, and let every sequence wait with
        its tokens.

        Until resume() nothing may be scheduled; requests come and go as ever. Returns the requests that end by it.
        """
        self.has_workers = False
        convicted = self.quarantine.on_death(now_s)
        self.in_flight.drop()
        self.queues.lose_workers()
        return [] if convicted is None else [self._convict(*convicted, cause)]

    def _convict(self, request: Request, num_deaths: int, cause: str) -> Produced:
        """End a request that has killed the workers again and again, so that the others may go on."""
        sample, start = request.open_samples()[0]
        if self.on_decision is not None:
            self.on_decision("convicted", request.sequences[0], {"deaths": num_deaths})
        self.queues.end(request, "error")
        self.counters.poisoned_requests += 1
        error = (
            f"request {request.request_id!r} was ended because the workers died {num_deaths} times in a row while they "
            f"computed it, at last it alone ({cause}); the other requests go on"
        )
        return Produced(request, sample, start, [], reason="error", error=error)

    def resume(self, generation: int, swap_blocks_per_s: float) -> None:
        """Go on with new workers, which know nothing yet. Raises ValueError for a generation that has been."""
        if generation <= self.generation:
            raise ValueError(f"generation {generation} cannot follow {self.generation}: what is stale must look stale")
        self.generation = generation
        self.has_workers = True
        self.rates = self.rates._replace(swap_blocks_per_s=swap_blocks_per_s)

    # ---- schedule

    def schedule(self, now_s: float = 0.0) -> SchedulerOutput | None:
        """Make the next step. None: there is nothing to compute."""
        self.meter.time_results(now_s, idle=not self.in_flight)
        if not self.quarantine.lets_schedule(self.on_decision):
            return None
        queues, max_tokens = self.queues, self.options.max_num_batched_tokens
        self.kv.begin_step()
        view = View(now_s, len(queues.running), len(queues.waiting), self.kv.pool.num_free, max_tokens)
        self.step_budget = budget = self._choose_budget(view)
        plan = StepPlan(budget, view, self.policy, self.branching, self.on_decision)
        queues.running = self.policy.sorted_running(queues.running, view)
        self._schedule_decodes(plan)
        self._schedule_prompts(plan)
        if plan.draftable:
            self._add_drafts(plan)
        while plan.budget == budget and not (self.in_flight or self.kv.is_moving) and queues.running and queues.waiting:
            # Beams that wait for another beam of their request hold the blocks it needs to come in.
            victim = queues.running.pop()
            self._preempt(victim, next(iter(queues.waiting)), plan)
            plan.room, plan.shortest = plan.budget, None
            self._admitter.schedule_waiting(plan)
        if plan.budget == budget and not self.kv.is_moving:
            queues.entries += plan.entries
            return self.schedule(now_s) if self.kv.is_freeing and not self.in_flight else None
        queues.step += 1
        self.num_scheduled_tokens = num_tokens = budget - plan.budget
        self.counters.steps += 1
        entries = queues.take_entries() + plan.entries
        output = SchedulerOutput(self.generation, queues.step, self.kv.take_ops(), entries)
        only_decodes = num_tokens <= len(queues.running)
        self.in_flight.add(output, plan.sampling, num_tokens, only_decodes=only_decodes, drafted=plan.drafted)
        return output

    def _choose_budget(self, view: View) -> int:
        """The most tokens of the next step: as the policy says, and no more than max_itl_s has time for while anybody
        waits for a next token. Every such sequence has room, and the prompts for what their rate is measured by."""
        options, budget = self.options, view.max_num_batched_tokens
        if not options.chunked_prefill:  # prompts cannot be cut to it
            return budget
        if self.policy.choose_budget is not None:
            budget = self.policy.budget(view)
        if options.max_itl_s and any(sequence.num_output for sequence in self.running):
            least = view.num_running + MIN_PREFILL_TOKENS
            budget = self.rates.tokens_within(options.max_itl_s, min(least, budget), budget)
        return budget

    def _schedule_decodes(self, plan: StepPlan) -> None:
        """Give one token to every running sequence that lacks one, and put those that lack more on `plan.prompts`.

        This loop runs once per sequence and step: it allocates nothing for a decode that needs no block.
        """
        budget, entries, sampling = plan.budget, plan.entries, plan.sampling
        running = self.queues.running
        may_draft = self.queues.may_draft
        index = 0
        while index < len(running):  # preemption takes from behind `index`, forking adds at the end
            sequence = running[index]
            index += 1
            pending = sequence.num_pending
            end = sequence.num_tokens + pending
            if pending and (end >= sequence.max_len or sequence.request.beam or not sequence.is_settled):
                continue  # its last token may be on its way, or what comes next depends on it
            if end - sequence.num_computed > 1:
                plan.prompts.append(sequence)
                continue
            if budget == 0:
                continue
            entry: Entry = sequence.decode_entry  # type: ignore[assignment]
            if end > sequence.num_slots:
                growth = self._grow_or_preempt(sequence, end, running[index - 1 :], plan)
                if growth is None:
                    index -= 1  # it is gone; what stood behind it has moved up
                    continue
                if growth.new_ids:
                    entry = Continue(sequence.handle, 1, growth.new_ids)
            if may_draft and sequence.may_draft(end) and (self.options.num_drafts or sequence.request.is_guided):
                plan.draftable.append((len(entries), sequence))
            entries.append(entry)
            sequence.num_computed = end
            budget -= 1
            sequence.num_pending = pending + 1
            sampling.append(sequence)
            if sequence.request.unforked:
                self.branching.fork_samples(sequence, entries, 1)
            if self.policy.charged is not None:
                self.policy.charge(sequence, 1)
        plan.budget = budget

    def _schedule_prompts(self, plan: StepPlan) -> None:
        """Share what decodes leave between the prompts that are running and those that wait.

        The first running prompt gets half of it, and what no other takes. The other half goes to the other running
        prompts that it completes, to waiting ones, and to the other running one that lacks least: a short prompt does
        not wait for long ones, and no prompt stands still for ever, since in time each becomes the first. The first
        takes blocks for its half before all others: served last, it would be preempted for those behind it, and each
        of them for it.
        """
        unserved = list(plan.prompts)
        plan.room = plan.budget
        growth: Growth | None = None
        if unserved and plan.budget:
            first = unserved[0]
            share = min(first.num_missing(), plan.budget - plan.budget // 2)
            plan.room -= share
            growth = self._grow_or_preempt(first, first.num_computed + share, unserved, plan)
            if growth is None:
                plan.room = plan.budget
            else:
                unserved.remove(first)
        others = sorted((each for each in unserved if each is not plan.prompts[0]), key=Sequence.num_missing)
        while others and others[0].num_missing() <= plan.room:
            self._schedule_chunk(others.pop(0), plan.room, unserved, plan)
            others = [sequence for sequence in others if sequence.status is Status.RUNNING]
        if self.queues.waiting and not plan.num_preempted:
            plan.shortest = others[0].num_missing() if others else None
            self._admitter.schedule_waiting(plan)
        for sequence in others:
            self._schedule_chunk(sequence, plan.room, unserved, plan)
        if growth is not None:
            first = plan.prompts[0]
            end = first.num_computed + min(first.num_missing(), plan.budget)
            more = self.kv.grow(first, end)  # for the tokens that are left over; no sequence is preempted for it
            if more is None:
                end, more = min(end, first.num_slots), Growth([])
            plan.entries += more.entries
            self._serve_chunk(first, end, _joined(growth.new_ids, more.new_ids), plan)
        unserved = list(plan.forked)
        for sequence in plan.forked:
            self._schedule_chunk(sequence, plan.budget, unserved, plan)
        for sequence in plan.prompts:  # after the last preemption: no block is cached whose step is not sent
            if sequence.status is Status.RUNNING:
                self.kv.cache_blocks(sequence, sequence.num_computed)

    def _schedule_chunk(self, sequence: Sequence, most: int, unserved: list[Sequence], plan: StepPlan) -> None:
        """Give a running sequence its next tokens, at most `most`. One of `unserved` is preempted if blocks run out."""
        count = min(sequence.num_missing(), most)
        if count <= 0 or sequence.status is not Status.RUNNING:
            return
        end = sequence.num_computed + count
        new_ids: list[list[int]] = []
        if end > sequence.num_slots:
            growth = self._grow_or_preempt(sequence, end, unserved, plan)
            if growth is None:
                return
            new_ids = growth.new_ids
        unserved.remove(sequence)
        self._serve_chunk(sequence, end, new_ids, plan)

    def _serve_chunk(self, sequence: Sequence, end: int, new_ids: list[list[int]], plan: StepPlan) -> None:
        """Have the step compute the tokens of a running sequence up to `end`; it has the blocks."""
        count = end - sequence.num_computed
        plan.entries.append(Continue(sequence.handle, count, new_ids))
        plan.serve(sequence, count)

    def _grow_or_preempt(
        self, sequence: Sequence, num_tokens: int, candidates: list[Sequence], plan: StepPlan
    ) -> Growth | None:
        """Get blocks for `num_tokens` of `sequence`, if need be by preempting `candidates`, which this step has not
        served yet and which include the sequence. None: it was preempted itself."""
        while (growth := self.kv.grow(sequence, num_tokens)) is None:
            if self.kv.reclaim():
                continue
            victim = candidates[-1] if self.policy.choose_victim is None else self.policy.victim(candidates, plan.view)
            candidates.remove(victim)
            self.running.remove(victim) if victim is not self.running[-1] else self.running.pop()
            self._preempt(victim, sequence, plan)
            if victim is sequence:
                return None
        plan.entries += growth.entries
        return growth

    def _add_drafts(self, plan: StepPlan) -> None:
        """Let decoding sequences draft with the tokens that are left. No sequence is preempted for drafts."""
        most = self.options.num_drafts or self.options.num_forced
        share = min(most, plan.budget // len(plan.draftable))
        for place, sequence in plan.draftable:
            end = sequence.num_tokens + sequence.num_pending  # with the token that this step samples
            count = self.kv.most_drafts(sequence, min(share, sequence.max_len - end))
            if count <= 0 or sequence.status is not Status.RUNNING:
                continue
            entry = plan.entries[place]
            new_ids = entry.new_block_ids if isinstance(entry, Continue) else []
            if end - 1 + count > sequence.num_slots:
                sequence.num_computed -= 1  # the step still reads what its one token needs
                growth = self.kv.grow(sequence, end - 1 + count)
                sequence.num_computed += 1
                if growth is None:
                    continue
                new_ids = _joined(new_ids, growth.new_ids)
                plan.entries += growth.entries
            plan.entries[place] = Draft(sequence.handle, count, new_ids)
            plan.drafted.append((sequence, count))
            sequence.drafts(count)
            plan.take(count)

    def _preempt(self, victim: Sequence, winner: Sequence, plan: StepPlan) -> None:
        """Take all device blocks of the victim, which has left `running` already, and let it wait again."""
        victim.lose_blocks()
        # What a new fork shares may be computed in this very step, behind the block program that would move it.
        is_new = any(isinstance(entry, Fork) and entry.child == victim.handle for entry in plan.entries)
        swapped = not is_new and self._prefers_swap(victim) and self.kv.swap_out(victim)
        if not swapped:
            self.kv.release(victim)
        self.queues.wait(victim, Status.SWAPPED if swapped else Status.PREEMPTED)
        plan.num_preempted += 1
        plan.entries.append(Preempt(victim.handle))
        self.counters.swaps += swapped
        self.counters.preemptions += 1
        victim.request.num_preemptions += 1
        how = "swap" if swapped else "recompute"
        plan.decide("preempted", victim, **{"for": winner.request.request_id, "by": how})

    def _prefers_swap(self, victim: Sequence) -> bool:
        """Whether to move the victim's blocks to the host instead of computing them again."""
        if self.options.preemption != "auto":
            return self.options.preemption == "swap"
        return self.rates.prefer_swap(victim.num_computed, self.kv.num_moved(victim.num_computed))

    # ---- update

    def update(self, result: ModelOutput) -> list[Produced]:
        """Apply what the workers sampled in the oldest step sent. Raises ProtocolError if it is of another step."""
        queues = self.queues
        step = self.in_flight.confirm()
        tokens = step.tokens_of(result)
        for sequence, count in step.drafted:
            sequence.take_back(count)
        produced = queues.handles.scores(result) if result.prompts else []
        num_running, num_entries = len(queues.running), len(queues.entries)
        silent: list[Sequence] = []  # sequences whose tokens go to no stream
        pooled = dict(result.pooled or ())
        for sequence, new, logprobs, error in step.results_of(result, tokens):
            if sequence.status is Status.FINISHED:  # it ended while the step ran
                silent.append(sequence)
            elif error is not None:
                silent.append(sequence)
                produced.append(self._fail(sequence, error))
            elif sequence.request.beam is not None:
                silent.append(sequence)
                produced += self.branching.advance_beams(sequence, new[0], logprobs)
            elif not new:
                silent.append(sequence)
                if sequence.request.pooling is not None:
                    produced.append(self._give(sequence, pooled.get(sequence.handle, b"")))
                else:
                    self._withhold(sequence)
            else:
                start = sequence.num_tokens - sequence.num_prompt
                reason = self._accept(sequence, new)
                kept = [item for item in logprobs[: len(new)] if item is not None] if logprobs is not None else None
                produced.append(Produced(sequence.request, sequence.index, start, new, kept or None, reason))
                if reason is not None:
                    self._end(sequence, reason)
        self.meter.stepped(step.sampling, silent, result)
        if len(queues.entries) != num_entries or len(queues.running) != num_running:
            queues.running = [sequence for sequence in queues.running if sequence.status is Status.RUNNING]
        return produced

    def _accept(self, sequence: Sequence, tokens: list[int]) -> FinishReason | None:
        """Append the tokens that a step sampled for `sequence`, and drop from `tokens` those behind its end, if one of
        them ends it. This runs once per sequence and step."""
        sequence.num_pending -= 1
        sequence.is_settled = True
        num_before = num_tokens = sequence.num_tokens
        reason: FinishReason | None = None
        for token in tokens:
            sequence.tokens.append(token)
            sequence.num_tokens = num_tokens = num_tokens + 1
            if token in sequence.stop_ids or num_tokens >= sequence.max_len:
                reason = sequence.finish_reason(token)
                if reason is not None:
                    sequence.ends_before(len(tokens) - (num_tokens - num_before))
                    del tokens[num_tokens - num_before :]
                    break
        count = num_tokens - num_before
        if (count > 1 or (num_tokens - 1) % self.kv.block_size == 0) and sequence.status is Status.RUNNING:
            sequence.num_computed += count - 1  # drafts that proved right were computed in the same step
            self.kv.cache_blocks(sequence, num_tokens - 1)
        self.counters.generated_tokens += count
        return reason

    def _give(self, sequence: Sequence, pooled: bytes) -> Produced:
        """A prompt that is pooled is computed: with what was made of it the request ends."""
        sequence.num_pending -= 1
        self._end(sequence, "stop")
        return Produced(sequence.request, sequence.index, 0, [], reason="stop", pooled=pooled)

    def _withhold(self, sequence: Sequence) -> None:
        """A step gave `sequence` no token, because its grammar is still being compiled."""
        if sequence.status is Status.SWAPPED:  # what its last position reads may have been left behind
            self.kv.release(sequence)
            sequence.status = Status.PREEMPTED
        sequence.get_nothing()

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sample is complete. It may be waiting, if it was preempted while its last token was computed."""
        if sequence.status is not Status.RUNNING:  # running ones leave their queue together, at the end of update()
            self.queues.leave(sequence)
        self.queues.finish(sequence)
        request = sequence.request
        request.sequences.remove(sequence)
        if not request.sequences and not request.unforked:
            self.queues.close(request, reason)

    def _fail(self, sequence: Sequence, error: str) -> Produced:
        """End the whole request. Where the model gave nonsense, what it has cached is not to be trusted either."""
        request, is_corrupted = sequence.request, error == NOT_FINITE
        sample, start = (0, 0) if request.beam is not None else (sequence.index, sequence.num_output)
        self.queues.end(request, "error", forget=is_corrupted)
        self.counters.corrupted_requests += is_corrupted
        return Produced(request, sample, start, [], reason="error", error=error)

    def _policy_fault(self, what: str) -> None:
        if self.on_policy_fault is not None:
            self.on_policy_fault(what)
        if self.on_decision is not None:
            self.on_decision("policy_fault", None, {"what": what})

    def check_integrity(self) -> None:
        """Raise RuntimeError if queues, requests and blocks disagree."""
        self.queues.check_integrity()
        if not self.has_workers and (self.running or self.in_flight or self.queues.entries):
            raise RuntimeError("there are no workers, but something runs or is on its way to them")


def _joined(first: list[list[int]], then: list[list[int]]) -> list[list[int]]:
    """The blocks of both, by group."""
    return [[*had, *more] for had, more in zip_longest(first, then, fillvalue=())]
