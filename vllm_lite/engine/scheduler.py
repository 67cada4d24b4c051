"""The scheduler: what every step computes. Sockets, tensors and text may not enter here, nor a clock: time is given.

There are no phases. A sequence's `num_computed` chases its tokens, and a step gives each sequence a number of them:
a whole prompt, a chunk of it, one decode token, one and some drafts. Running sequences come first, then waiting ones
while the token budget lasts. When blocks run out somebody gives way: to the host, or to be computed again.

Steps may be in flight while the next one is made: a sequence whose next token is unknown has it as `num_pending`.
"""

from collections import deque

from vllm_lite.engine import branching, notes
from vllm_lite.engine.kv_cache_manager import Growth, KVCacheManager, Verdict
from vllm_lite.engine.meter import Meter
from vllm_lite.engine.notes import Note
from vllm_lite.engine.plan import Counters, Handles, Options, Plan, Produced, Rates, Sent, checked_tokens, prefers_swap
from vllm_lite.engine.policy import Fcfs, GuardedPolicy, View
from vllm_lite.engine.prompt_scores import PromptScores
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.engine.stop import check_stop
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import FinishReason
from vllm_lite.protocol.step import (
    Continue,
    Draft,
    Entry,
    Finish,
    Fork,
    ModelOutput,
    NewRequest,
    Preempt,
    ReplaceBlock,
    Resume,
    SchedulerOutput,
)


class Scheduler:
    """Owns every unfinished request and, through the KV manager, every block."""

    def __init__(
        self, kv: KVCacheManager, options: Options, policy: object | None = None, note: Note | None = None
    ) -> None:
        self.kv = kv
        self.options = options
        self.policy = GuardedPolicy(policy or Fcfs(), self._policy_fault)
        self.note = note
        self.step = 0
        self.num_scheduled_tokens = 0
        """Of the latest step, drafts included."""
        longest = options.max_model_len
        if not options.chunked_prefill:  # a sequence comes in whole, however often it is preempted
            longest = min(longest, options.max_num_batched_tokens)
        self.max_len = kv.max_tokens(longest, options.max_num_batched_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.requests: dict[str, Request] = {}
        self.counters = Counters()
        self.meter = Meter(kv, self.max_len)
        self.num_arrived = 0
        self.rates = Rates()
        self._sent: deque[Sent] = deque()
        self.changes: list[Entry] = []
        """What workers must hear before the next step's own entries, in the order in which it happened."""
        self._hurried: dict[str, Request] = {}  # those with a deadline
        self._prompt_scores = PromptScores()
        self._handles = Handles()

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, with the numbers, if it can never be served."""
        sequence = request.sequences[0]
        if sequence.num_tokens + 1 > self.max_len:
            raise RequestError(
                f"the prompt has {sequence.num_tokens} tokens; with at least one of output the KV cache holds "
                f"{self.max_len} ({self.kv.pool.num_usable} blocks of {self.kv.block_size}, "
                f"{self.kv.watermark_blocks} kept free)"
            )
        if request.beam is not None and request.beam.width > self.options.max_num_seqs:
            raise RequestError(
                f"beam search over {request.beam.width} beams, but max_num_seqs is {self.options.max_num_seqs}"
            )
        self.kv.register(sequence, request.extra_keys)
        self.enter(request)
        self.waiting.append(sequence)

    def enter(self, request: Request) -> None:
        """Put a request on the books; its sequences are queued by the caller."""
        request.arrival = self.num_arrived
        self.num_arrived += 1
        request.queued_s = self.meter.now_s
        self.requests[request.request_id] = request
        if request.deadline_s is not None:
            self._hurried[request.request_id] = request

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Request | None:
        """Drop an unfinished request and its blocks at once; what is still being computed for it is ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in list(request.sequences):
                self.leave_queue(sequence)
                self.finish(sequence)
            self._close(request, reason)
        return request

    def has_requests(self) -> bool:
        return bool(self.requests)

    @property
    def awaited(self) -> list[Sequence]:
        """The sequences that get a token from the oldest step in flight."""
        return self._sent[0].sampling if self._sent else []

    @property
    def step_awaited(self) -> int:
        """The oldest step in flight; 0 if there is none."""
        return self._sent[0].step if self._sent else 0

    def expire(self, now_s: float) -> list[Produced]:
        """End the requests whose deadline has passed."""
        late = [r for r in self._hurried.values() if r.deadline_s is not None and r.deadline_s <= now_s]
        produced = []
        for request in late:
            error = f"the deadline of {request.params.deadline_ms} ms passed"
            sample, start = request.open_samples()[0]
            produced.append(Produced(request, sample, start, [], reason="error", error=error))
            self.abort(request.request_id, "error")
        return produced

    # ---- schedule

    def schedule(self, now_s: float = 0.0) -> SchedulerOutput | None:
        """The next step, or None if there is nothing to compute."""
        self.meter.turn(now_s, idle=not self._sent)
        self.kv.begin_step()
        view = View(
            now_s, len(self.running), len(self.waiting), self.kv.pool.num_free, self.options.max_num_batched_tokens
        )
        budget = self.options.max_num_batched_tokens
        if self.policy.choose_budget is not None and self.options.chunked_prefill:  # else prompts cannot be cut to it
            budget = self.policy.budget(view)
        plan = Plan(budget)
        num_preempted = self.counters.preemptions
        if self.policy.order_by is not None and len(self.running) > 1:
            self.running = list(self.policy.order(self.running, view))
        self._schedule_running(plan, view)
        if self.waiting and self.counters.preemptions == num_preempted:
            self._schedule_waiting(plan, view)
        while plan.budget == budget and not self._sent and self.running and self.waiting:
            # Beams that wait for another of theirs hold the blocks it needs to come in.
            victim = self.running.pop()
            self._preempt(victim, self.waiting[0], plan)
            self._schedule_waiting(plan, view)
        if plan.budget == budget:
            self.changes += plan.entries
            return None
        self.step += 1
        self.num_scheduled_tokens = budget - plan.budget
        self.counters.steps += 1
        self._sent.append(Sent(self.step, plan.sampling))
        changes, self.changes = self.changes, []
        return SchedulerOutput(self.options.epoch, self.step, self.kv.take_block_ops(), changes + plan.entries)

    def _schedule_running(self, plan: Plan, view: View) -> None:
        """Give every running sequence its tokens.

        This loop runs once per sequence and step: it allocates nothing for a decode that needs no block.
        """
        budget, entries, sampling = plan.budget, plan.entries, plan.sampling
        running = self.running
        num_drafts = self.options.num_drafts
        index = 0
        while index < len(running) and budget > 0:  # preemption takes from behind `index`, forking adds at the end
            sequence = running[index]
            index += 1
            pending = sequence.num_pending
            future = sequence.num_tokens + pending
            if pending and (future >= sequence.max_len or num_drafts or sequence.request.beam):
                continue  # its last token is on its way, or what comes next depends on it
            computed = sequence.num_computed
            count = future - computed
            if count > budget:
                count = budget
            end = computed + count
            drafts = 0
            if num_drafts and count == 1 and end == future and sequence.may_draft(end):
                drafts = max(0, min(num_drafts, sequence.max_len - future - 1, budget - 1))
            new_ids: list[list[int]] = []
            if end + drafts > sequence.num_slots:
                growth = self.kv.grow(sequence, end + drafts)
                if growth is None:  # nobody gives way for guesses
                    drafts = 0
                    growth = self._grow_or_preempt(sequence, end, index - 1, plan, view)
                if growth is None:
                    index -= 1  # it is gone; what stood behind it has moved up
                    continue
                for group, place, block_id in growth.replaced:
                    entries.append(ReplaceBlock(sequence.handle, group, place, block_id))
                new_ids = growth.new_ids
            if drafts > 0:
                entries.append(Draft(sequence.handle, drafts, new_ids))
            elif count == 1 and not new_ids:
                entries.append(sequence.decode_entry)  # type: ignore[arg-type]
            else:
                entries.append(Continue(sequence.handle, count, new_ids))
                if count > 1:
                    plan.prefilled.append(sequence)
            sequence.num_computed = end
            budget -= count + drafts
            if end == future:
                sequence.num_pending = pending + 1
                sampling.append(sequence)
                if sequence.request.num_unborn:
                    branching.fork_samples(self, sequence, entries)
            elif self.note is not None:
                self.note("chunked", sequence, {"tokens": count, "left": future - end})
            if self.policy.charged is not None:
                self.policy.charge(sequence, count)
        plan.budget = budget
        for sequence in plan.prefilled:  # after the last preemption: no block is cached whose step is not sent
            self.kv.cache_blocks(sequence, min(sequence.num_computed, sequence.num_tokens))

    def _grow_or_preempt(
        self, sequence: Sequence, num_tokens: int, index: int, plan: Plan, view: View
    ) -> Growth | None:
        """Room for `sequence`, taken if need be from those this step has not served yet. None: it gave up its own."""
        while (growth := self.kv.grow(sequence, num_tokens)) is None:
            candidates = self.running[index:]
            victim = candidates[-1] if self.policy.choose_victim is None else self.policy.victim(candidates, view)
            self.running.remove(victim) if victim is not self.running[-1] else self.running.pop()
            self._preempt(victim, sequence, plan)
            if victim is sequence:
                return None
        return growth

    def _schedule_waiting(self, plan: Plan, view: View) -> None:
        """Admit waiting sequences in order while budget, seats and blocks last. Nobody is preempted for them."""
        if self.policy.order_by is not None and len(self.waiting) > 1:
            self.waiting = deque(self.policy.order(self.waiting, view))
        while plan.budget > 0 and len(self.running) < self.options.max_num_seqs:
            sequence = next((sequence for sequence in self.waiting if not sequence.num_pending), None)
            if sequence is None or not self._admit(sequence, plan):
                break
        else:
            notes.queue_waits(self.note, self.waiting, plan.budget, self.options.max_num_seqs)

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """Let a waiting sequence in. False: it has to wait, and everybody behind it."""
        kv = self.kv
        hit = None if sequence.status is Status.SWAPPED else kv.find_cached(sequence)
        if hit is None:
            computed = sequence.num_computed
            admission = kv.swap_in_admission(sequence, self.options.max_num_batched_tokens)
        else:
            computed = min(hit.num_tokens, sequence.num_tokens - 1)
            admission = kv.admission(sequence, hit, self.options.max_num_batched_tokens)
        count = sequence.num_tokens - computed
        if count > plan.budget:
            if not self.options.chunked_prefill:
                notes.waits_for_budget(self.note, sequence, plan.budget)
                return False
            count = plan.budget
        if admission.verdict is not Verdict.OK:
            notes.waits(self.note, sequence, admission)
            return False
        self.waiting.remove(sequence)
        if hit is None:
            kv.swap_in(sequence, computed + count)
        else:
            self.meter.admitted(sequence, hit)
            kv.admit(sequence, hit, computed + count)
        plan.entries.append(self._arrival(sequence, count))
        sequence.num_computed += count
        plan.budget -= count
        self.running.append(sequence)
        # No preemption can come any more in this step, so its blocks may be shared at once: a layer writes the KV
        # of the whole batch before it reads any of it.
        kv.cache_blocks(sequence, sequence.num_computed)
        if sequence.num_computed == sequence.num_tokens:
            sequence.num_pending = 1
            plan.sampling.append(sequence)
            if sequence.request.num_unborn:
                branching.fork_samples(self, sequence, plan.entries)
        if self.policy.charged is not None:
            self.policy.charge(sequence, count)
        notes.came_in(self.note, sequence, admission, count, swapped=hit is None)
        return True

    def _arrival(self, sequence: Sequence, num_tokens: int) -> NewRequest | Resume:
        sequence.status = Status.RUNNING
        block_ids = [list(table.ids) for table in sequence.tables]
        request = sequence.request
        if request.num_cached_at_start is None:
            request.num_cached_at_start = min(sequence.num_cached, request.num_prompt - 1)
            self.counters.cached_tokens += request.num_cached_at_start
            self.counters.prompt_tokens += request.num_prompt
        computed, cached = sequence.num_computed, sequence.num_cached
        if sequence.seen_by_workers:
            return Resume(sequence.handle, computed, cached, num_tokens, block_ids)
        self.introduce(sequence)
        tokens, sampling = sequence.tokens.tobytes(), branching.wire_sampling(sequence)
        return NewRequest(
            sequence.handle, tokens, sequence.num_prompt, sampling, computed, cached, num_tokens, block_ids
        )

    def _preempt(self, victim: Sequence, winner: Sequence, plan: Plan) -> None:
        """Take all device blocks; the victim, already out of `running`, waits at the head of the queue."""
        how = "recompute"
        victim.unscored = victim.unscored and victim.num_computed < victim.num_prompt - 1
        # What a new fork shares may be computed in this very step, behind the block program that would move it.
        is_new = any(isinstance(entry, Fork) and entry.child == victim.handle for entry in plan.entries)
        swap = not is_new and prefers_swap(self.options.preemption, self.rates, self.kv, victim)
        if swap and self.kv.swap_out(victim):
            how = "swap"
            self.counters.swaps += 1
        else:
            self.kv.release(victim)
        victim.status = Status.SWAPPED if how == "swap" else Status.PREEMPTED
        self.waiting.appendleft(victim)
        plan.entries.append(Preempt(victim.handle))
        self.counters.preemptions += 1
        victim.request.num_preemptions += 1
        if self.note is not None:
            self.note("preempted", victim, {"for": winner.request.request_id, "by": how})

    # ---- update

    def update(self, output: ModelOutput) -> list[Produced]:
        """Apply what the workers sampled in the oldest step sent. Raises ProtocolError if it is of another step."""
        sent = self._sent.popleft()
        tokens = checked_tokens(output, sent, self.options.epoch)
        failed = dict(output.failed) if output.failed else {}
        counts, all_logprobs = output.counts, output.logprobs
        produced = self._prompt_scores.take(output) if output.prompts else []
        block_size = self.kv.block_size
        num_running, num_changes = len(self.running), len(self.changes)
        silent: list[Sequence] = []
        at = 0
        for place, sequence in enumerate(sent.sampling):
            first = at
            at += 1 if counts is None else counts[place]
            if sequence.status is Status.FINISHED:  # it ended while the step ran
                silent.append(sequence)
                continue
            if failed and sequence.handle in failed:
                produced.append(self._fail(sequence, failed[sequence.handle]))
                silent.append(sequence)
                continue
            logprobs = all_logprobs[first:at] if all_logprobs is not None else None
            if sequence.request.beam is not None:
                produced += branching.advance_beams(self, sequence, tokens[first], logprobs)
                silent.append(sequence)
                continue
            sequence.num_pending -= 1
            start = sequence.num_tokens - sequence.num_prompt
            reason: FinishReason | None = None
            taken = tokens[first:at]
            for number, token in enumerate(taken, 1):
                sequence.tokens.append(token)
                sequence.num_tokens += 1
                if token in sequence.stop_ids or sequence.num_tokens >= sequence.max_len:
                    reason = check_stop(sequence, token)
                    if reason is not None:
                        del taken[number:]
                        break
            if sequence.status is Status.RUNNING:
                if len(taken) > 1:  # drafts that proved right were computed in the same step
                    sequence.num_computed += len(taken) - 1
                    self.kv.cache_blocks(sequence, sequence.num_tokens - 1)
                elif (sequence.num_tokens - 1) % block_size == 0:
                    self.kv.cache_blocks(sequence, sequence.num_tokens - 1)
            logs = [item for item in logprobs[: len(taken)] if item is not None] if logprobs is not None else None
            produced.append(Produced(sequence.request, sequence.index, start, taken, logs or None, reason))
            self.counters.generated_tokens += len(taken)
            if reason is not None:
                self._end(sequence, reason)
        self.meter.stepped(sent.sampling, silent, len(tokens), output.guessed)
        if len(self.changes) != num_changes or len(self.running) != num_running:
            self.running = [sequence for sequence in self.running if sequence.status is Status.RUNNING]
        return produced

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sample is complete. It may be waiting, if it was preempted while its last token was computed."""
        if sequence.status is not Status.RUNNING:
            self.waiting.remove(sequence)
        self.finish(sequence)
        request = sequence.request
        request.sequences.remove(sequence)
        if not request.sequences and not request.num_unborn:
            self._close(request, reason)

    def _fail(self, sequence: Sequence, error: str) -> Produced:
        """The model gave nonsense: the whole request ends, and what it has cached is not to be trusted."""
        request = sequence.request
        sample, start = (0, 0) if request.beam is not None else (sequence.index, sequence.num_output)
        for member in list(request.sequences):
            self.leave_queue(member)
            self.finish(member, forget=True)
        self._close(request, "error")
        self.meter.corrupted += 1
        return Produced(request, sample, start, [], reason="error", error=error)

    # ---- for branching, and the end of a sequence

    def introduce(self, sequence: Sequence) -> None:
        """Give a sequence the handle under which workers will know it."""
        sequence.seen_by_workers = True
        sequence.handle = self._handles.take()
        sequence.decode_entry = Continue(sequence.handle, 1, [])
        self._prompt_scores.begin(sequence, self.step + 1)

    def finish(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Release everything `sequence` holds. The caller takes it out of its queue."""
        sequence.status = Status.FINISHED
        self.meter.left(sequence)
        self.kv.release(sequence, forget=forget)
        self._prompt_scores.end(sequence)
        if sequence.seen_by_workers:
            self.changes.append(Finish(sequence.handle))
            self._handles.give_back(sequence.handle)  # changes precede arrivals in a step, so reuse is safe

    def leave_queue(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is not Status.FINISHED:
            self.waiting.remove(sequence)

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.num_unborn = 0
        self.meter.ended(request, reason)
        self.requests.pop(request.request_id, None)
        self._hurried.pop(request.request_id, None)

    def _policy_fault(self, what: str) -> None:
        if self.note is not None:
            self.note("policy_fault", None, {"what": what})

    def check_integrity(self) -> None:
        """Raise RuntimeError if queues, requests and blocks disagree."""
        queued = [*self.running, *self.waiting]
        members = [sequence for request in self.requests.values() for sequence in request.sequences]
        if sorted(map(id, queued)) != sorted(map(id, members)):
            raise RuntimeError("queues and requests differ")
        if any(table.ids for sequence in self.waiting for table in sequence.tables):
            raise RuntimeError("a waiting sequence holds device blocks")
        self.kv.check_integrity(members)
