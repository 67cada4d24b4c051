"""The scheduler: what every step computes. Sockets, tensors and text may not enter here, nor a clock: time is given.

There are no phases. A sequence's `num_computed` chases its tokens, and a step gives each sequence a number of them:
a whole prompt, a chunk of it, one decode token, one and some drafts. Running sequences that lack one token get it
first, so that no stream stops for a prompt. Of what is left, the prompt that is under way longest has half, and also
what shorter prompts and newcomers leave of the other half. Drafts take what nobody else wants, in equal parts. When
blocks run out somebody gives way: to the host, or to be computed again.

Steps may be in flight while the next one is made: a sequence whose next token is unknown has it as `num_pending`.
"""

from collections.abc import Callable
from itertools import zip_longest

from vllm_lite.engine import branching, notes
from vllm_lite.engine.blocks.manager import Admission, Growth, KVCacheManager, Verdict
from vllm_lite.engine.in_flight import InFlight
from vllm_lite.engine.notes import Note
from vllm_lite.engine.observe.counters import Meter
from vllm_lite.engine.plan import Handles, Options, Plan, Produced, Rates, prefers_swap
from vllm_lite.engine.policy import Fcfs, GuardedPolicy, View
from vllm_lite.engine.prompt_scores import PromptScores
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.engine.stop import check_stop
from vllm_lite.engine.waiting_queue import WaitingQueue
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

MAX_PASSED = 32
"""So many may be admitted before a sequence that came earlier and does not fit yet; then nobody passes it any more."""
MAX_BLOCKED = 16
"""A step looks no further behind so many that do not fit, ..."""
MAX_LOOKED_UP_TOKENS = 32_768
"""... or once it has looked up so many tokens in the prefix cache in vain."""


class Scheduler:
    """Owns every unfinished request and, through the KV manager, every block."""

    def __init__(
        self, kv: KVCacheManager, options: Options, policy: object | None = None, note: Note | None = None
    ) -> None:
        self.kv = kv
        self.options = options
        self.policy = GuardedPolicy(policy or Fcfs(), self._policy_fault)
        self.note = note
        self.on_policy_fault: Callable[[str], None] | None = None
        """Called once, with what was wrong, when the policy is replaced by first come, first served."""
        self.step = 0
        self.num_scheduled_tokens = 0
        """Of the latest step, drafts included."""
        longest = options.max_model_len
        if not options.chunked_prefill:  # a sequence comes in whole, however often it is preempted
            longest = min(longest, options.max_num_batched_tokens)
        self.max_len = kv.max_tokens(longest, options.max_num_batched_tokens)
        self.running: list[Sequence] = []
        self.requests: dict[str, Request] = {}
        self.counters = kv.counters
        self.meter = Meter(kv, self.max_len)
        self.num_arrived = 0
        self.rates = Rates()
        self.in_flight = InFlight()
        self.changes: list[Entry] = []
        """What workers must hear before the next step's own entries, in the order in which it happened."""
        self._hurried: dict[str, Request] = {}  # those with a deadline
        self._prompt_scores = PromptScores()
        self._handles = Handles()

    @property
    def waiting(self) -> WaitingQueue:
        return self.policy.queue

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
        if request.beam is not None:
            branching.check_beams(self, request)
        self.kv.register(sequence, request.extra_keys)
        self.enter(request)
        self.wait(sequence)

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
        self.meter.time_results(now_s, idle=not self.in_flight)
        self.kv.begin_step()
        view = View(
            now_s, len(self.running), len(self.waiting), self.kv.pool.num_free, self.options.max_num_batched_tokens
        )
        budget = self.options.max_num_batched_tokens
        if self.policy.choose_budget is not None and self.options.chunked_prefill:  # else prompts cannot be cut to it
            budget = self.policy.budget(view)
        plan = Plan(budget)
        self.running = self.policy.sorted_running(self.running, view)
        self._schedule_decodes(plan, view)
        self._schedule_prompts(plan, view)
        if plan.draftable:
            self._add_drafts(plan)
        while plan.budget == budget and not (self.in_flight or self.kv.is_moving) and self.running and self.waiting:
            # Beams that wait for another of theirs hold the blocks it needs to come in.
            victim = self.running.pop()
            self._preempt(victim, next(iter(self.waiting)), plan)
            plan.room, plan.shortest = plan.budget, None
            self._schedule_waiting(plan, view)
        if plan.budget == budget and not self.kv.is_moving:
            self.changes += plan.entries
            return None
        self.step += 1
        self.num_scheduled_tokens = budget - plan.budget
        self.counters.steps += 1
        changes, self.changes = self.changes, []
        output = SchedulerOutput(self.options.generation, self.step, self.kv.take_block_ops(), changes + plan.entries)
        num_tokens = self.num_scheduled_tokens
        self.in_flight.add(output, plan.sampling, num_tokens, only_decodes=num_tokens <= len(self.running))
        return output

    def _schedule_decodes(self, plan: Plan, view: View) -> None:
        """Give one token to every running sequence that lacks one, and put those that lack more on `plan.prompts`.

        This loop runs once per sequence and step: it allocates nothing for a decode that needs no block.
        """
        budget, entries, sampling = plan.budget, plan.entries, plan.sampling
        running = self.running
        num_drafts = self.options.num_drafts
        index = 0
        while index < len(running):  # preemption takes from behind `index`, forking adds at the end
            sequence = running[index]
            index += 1
            pending = sequence.num_pending
            end = sequence.num_tokens + pending
            if pending and (end >= sequence.max_len or num_drafts or sequence.request.beam):
                continue  # its last token is on its way, or what comes next depends on it
            if end - sequence.num_computed > 1:
                plan.prompts.append(sequence)
                continue
            if budget == 0:
                continue
            entry: Entry = sequence.decode_entry  # type: ignore[assignment]
            if end > sequence.num_slots:
                growth = self._grow_or_preempt(sequence, end, running[index - 1 :], plan, view)
                if growth is None:
                    index -= 1  # it is gone; what stood behind it has moved up
                    continue
                if growth.new_ids:
                    entry = Continue(sequence.handle, 1, growth.new_ids)
            if num_drafts and sequence.may_draft(end) and not sequence.request.unforked:
                plan.draftable.append((len(entries), sequence))
            entries.append(entry)
            sequence.num_computed = end
            budget -= 1
            sequence.num_pending = pending + 1
            sampling.append(sequence)
            if sequence.request.unforked:
                branching.fork_samples(self, sequence, entries)
            if self.policy.charged is not None:
                self.policy.charge(sequence, 1)
        plan.budget = budget

    def _schedule_prompts(self, plan: Plan, view: View) -> None:
        """Share what decodes leave among the prompts under way and newcomers.

        The first prompt has half of it, and what nobody else takes. The other half goes to the others under way that
        it completes, to newcomers, and to the other that lacks least: a short prompt does not wait for long ones, and
        no prompt stands still for ever, since in time each becomes the first. It takes blocks for its half before
        anybody: served last, it would give way to those behind it, and each of them to it in turn.
        """
        unserved = list(plan.prompts)
        plan.room = plan.budget
        growth: Growth | None = None
        if unserved and plan.budget:
            first = unserved[0]
            share = min(first.num_missing(), plan.budget - plan.budget // 2)
            plan.room -= share
            growth = self._grow_or_preempt(first, first.num_computed + share, unserved, plan, view)
            if growth is None:
                plan.room = plan.budget
            else:
                unserved.remove(first)
        others = sorted((each for each in unserved if each is not plan.prompts[0]), key=Sequence.num_missing)
        while others and others[0].num_missing() <= plan.room:
            self._schedule_chunk(others.pop(0), plan.room, unserved, plan, view)
            others = [sequence for sequence in others if sequence.status is Status.RUNNING]
        if self.waiting and not plan.num_preempted:
            plan.shortest = others[0].num_missing() if others else None
            self._schedule_waiting(plan, view)
        for sequence in others:
            self._schedule_chunk(sequence, plan.room, unserved, plan, view)
        if growth is not None:
            first = plan.prompts[0]
            end = first.num_computed + min(first.num_missing(), plan.budget)
            more = self.kv.grow(first, end)  # for what nobody wants; nobody gives way for it
            if more is None:
                end = min(end, first.num_slots)
            self._serve_chunk(first, end, _joined(growth.new_ids, more.new_ids if more is not None else []), plan)
        unserved = list(plan.born)
        for sequence in plan.born:
            self._schedule_chunk(sequence, plan.budget, unserved, plan, view)
        for sequence in plan.prompts:  # after the last preemption: no block is cached whose step is not sent
            if sequence.status is Status.RUNNING:
                self.kv.cache_blocks(sequence, sequence.num_computed)

    def _schedule_chunk(self, sequence: Sequence, most: int, unserved: list[Sequence], plan: Plan, view: View) -> None:
        """Give a running sequence its next tokens, at most `most`. If it lacks blocks, one of `unserved` gives way."""
        count = min(sequence.num_missing(), most)
        if count <= 0 or sequence.status is not Status.RUNNING:
            return
        end = sequence.num_computed + count
        new_ids: list[list[int]] = []
        if end > sequence.num_slots:
            growth = self._grow_or_preempt(sequence, end, unserved, plan, view)
            if growth is None:
                return
            new_ids = growth.new_ids
        unserved.remove(sequence)
        self._serve_chunk(sequence, end, new_ids, plan)

    def _serve_chunk(self, sequence: Sequence, end: int, new_ids: list[list[int]], plan: Plan) -> None:
        """Have the step compute the tokens of a running sequence up to `end`; it has the blocks."""
        count = end - sequence.num_computed
        plan.entries.append(Continue(sequence.handle, count, new_ids))
        plan.take(count)
        sequence.num_computed = end
        if end == sequence.num_tokens:
            self._completes_prompt(sequence, plan)
        elif self.note is not None:
            self.note("chunked", sequence, {"tokens": count, "left": sequence.num_tokens - end})
        if self.policy.charged is not None:
            self.policy.charge(sequence, count)

    def _completes_prompt(self, sequence: Sequence, plan: Plan) -> None:
        """The step computes the last of its known tokens, so it samples the next one."""
        sequence.num_pending = 1
        plan.sampling.append(sequence)
        if sequence.request.unforked:
            plan.born += branching.fork_samples(self, sequence, plan.entries)

    def _grow_or_preempt(
        self, sequence: Sequence, num_tokens: int, candidates: list[Sequence], plan: Plan, view: View
    ) -> Growth | None:
        """Room for `sequence`, taken if need be from `candidates`, which this step has not served yet, itself among
        them. None: it gave up its own."""
        while (growth := self.kv.grow(sequence, num_tokens)) is None:
            if self.kv.reclaim():
                continue
            victim = candidates[-1] if self.policy.choose_victim is None else self.policy.victim(candidates, view)
            candidates.remove(victim)
            self.running.remove(victim) if victim is not self.running[-1] else self.running.pop()
            self._preempt(victim, sequence, plan)
            if victim is sequence:
                return None
        plan.entries += (ReplaceBlock(sequence.handle, *replaced) for replaced in growth.replaced)
        return growth

    def _add_drafts(self, plan: Plan) -> None:
        """Have sequences that decode draft as well, with tokens that are left; nobody gives way for drafts."""
        share = min(self.options.num_drafts, plan.budget // len(plan.draftable))
        for place, sequence in plan.draftable:
            count = min(share, sequence.max_len - sequence.num_tokens - 1)
            if count <= 0 or sequence.status is not Status.RUNNING:
                continue
            entry = plan.entries[place]
            new_ids = entry.new_block_ids if isinstance(entry, Continue) else []
            if sequence.num_tokens + count > sequence.num_slots:
                sequence.num_computed -= 1  # the step still reads what its one token needs
                growth = self.kv.grow(sequence, sequence.num_tokens + count)
                sequence.num_computed += 1
                if growth is None:
                    continue
                new_ids = _joined(new_ids, growth.new_ids)
            plan.entries[place] = Draft(sequence.handle, count, new_ids)
            plan.take(count)

    def _schedule_waiting(self, plan: Plan, view: View) -> None:
        """Admit waiting sequences while room, seats and blocks last. Nobody is preempted for them.

        Those behind one that does not fit yet may pass it. At most MAX_PASSED pass one that waits for blocks, which
        they take from it. A prompt that waits behind shorter ones under way loses nothing to those that pass it.
        """
        blocked: list[Sequence] = []
        passed: list[Sequence] = []  # those of them that lose something to whoever passes them
        for sequence in self.policy.waiting(view):
            if plan.room <= 0 or len(self.running) >= self.options.max_num_seqs:
                notes.queue_waits(self.note, sequence, plan.room, self.options.max_num_seqs)
                break
            if sequence.num_pending:
                continue
            if blocked and not self.policy.may_pass(sequence, blocked[0]):
                break
            is_in = self._admit(sequence, plan, in_parts=not passed)
            # With nobody to wait for, the first may take the blocks that others hold and that wait behind it.
            while not (is_in or blocked or self.running or self.kv.is_moving) and self.kv.reclaim(keep=sequence):
                is_in = self._admit(sequence, plan, in_parts=True)
            if is_in:
                for other in passed:
                    other.num_passed += 1
            else:
                blocked.append(sequence)
                if not (plan.is_cut and self.options.chunked_prefill):
                    passed.append(sequence)
                    if sequence.status is not Status.WAITING:  # it would stand still meanwhile
                        break
                if len(blocked) > MAX_BLOCKED or plan.num_looked_up > MAX_LOOKED_UP_TOKENS:
                    break
            if any(other.num_passed >= MAX_PASSED for other in passed):
                break

    def _admit(self, sequence: Sequence, plan: Plan, *, in_parts: bool) -> bool:
        """Let a waiting sequence in. False: it does not fit into this step, or into the free blocks.

        `in_parts`: of what it has on the host, the step may load as much as it can. Not behind one that lacks blocks:
        it would only hold what that one needs.
        """
        kv = self.kv
        known = kv.recall(sequence)
        if known is not None and not self._fits(sequence, known.num_cached, known.admission, plan):
            return False
        is_swapped = sequence.status is Status.SWAPPED
        hit = kv.find_cached(sequence) if sequence.host_ids is None else None
        if hit is None:
            computed = sequence.num_computed
            admission = kv.swap_in_admission(sequence, self.options.max_num_batched_tokens)
        else:
            computed = min(hit.num_tokens, sequence.num_tokens - 1)
            admission = kv.admission(sequence, hit, self.options.max_num_batched_tokens)
            plan.num_looked_up += sequence.num_tokens
        if not self._fits(sequence, computed, admission, plan):
            if hit is not None:
                kv.remember(sequence, hit, admission)
            return False
        count = min(sequence.num_tokens - computed, plan.room)
        if hit is None:
            is_in = kv.swap_in(sequence, computed + count, in_parts=in_parts)
        else:
            is_in = kv.admit(sequence, hit, computed + count, in_parts=in_parts)
            if is_in or sequence.host_ids is not None:
                self.meter.admitted(sequence, hit)
        if not is_in:
            notes.waits(self.note, sequence, admission)
            return False
        self.waiting.remove(sequence)
        plan.entries.append(self._arrival(sequence, count))
        sequence.num_computed += count
        plan.take(count)
        self.running.append(sequence)
        # No preemption of it can come any more in this step, so its blocks may be shared at once: a layer writes the KV
        # of the whole batch before it reads any of it.
        kv.cache_blocks(sequence, sequence.num_computed)
        if sequence.num_computed == sequence.num_tokens:
            self._completes_prompt(sequence, plan)
        if self.policy.charged is not None:
            self.policy.charge(sequence, count)
        notes.came_in(self.note, sequence, admission, count, swapped=is_swapped)
        return True

    def _fits(self, sequence: Sequence, num_computed: int, admission: Admission, plan: Plan) -> bool:
        """Whether a waiting sequence of which so much is computed may come in, now that admission said so much."""
        count = sequence.num_tokens - num_computed
        plan.is_cut = count > plan.room
        if plan.is_cut and not (self.options.chunked_prefill and (plan.shortest is None or count < plan.shortest)):
            notes.waits_for_budget(self.note, sequence, plan.room)
            return False
        plan.is_cut = False
        if admission.verdict is not Verdict.OK:
            notes.waits(self.note, sequence, admission)
            return False
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
        """Take all device blocks; the victim, already out of `running`, waits again."""
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
        self.wait(victim)
        plan.num_preempted += 1
        plan.entries.append(Preempt(victim.handle))
        self.counters.preemptions += 1
        victim.request.num_preemptions += 1
        if self.note is not None:
            self.note("preempted", victim, {"for": winner.request.request_id, "by": how})

    # ---- update

    def update(self, output: ModelOutput) -> list[Produced]:
        """Apply what the workers sampled in the oldest step sent. Raises ProtocolError if it is of another step."""
        sent = self.in_flight.confirm()
        tokens = sent.tokens_of(output)
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
        self.meter.stepped(sent.sampling, silent, len(tokens), output.drafted)
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
        if not request.sequences and not request.unforked:
            self._close(request, reason)

    def _fail(self, sequence: Sequence, error: str) -> Produced:
        """The model gave nonsense: the whole request ends, and what it has cached is not to be trusted."""
        request = sequence.request
        sample, start = (0, 0) if request.beam is not None else (sequence.index, sequence.num_output)
        for member in list(request.sequences):
            self.leave_queue(member)
            self.finish(member, forget=True)
        self._close(request, "error")
        self.counters.corrupted_requests += 1
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

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence into the queue, where the policy sorts it in: a preempted one comes before later arrivals."""
        sequence.num_passed = 0
        self.policy.enqueue(sequence)

    def leave_queue(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is not Status.FINISHED:
            self.waiting.remove(sequence)

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.unforked = []
        self.meter.ended(request, reason)
        self.requests.pop(request.request_id, None)
        self._hurried.pop(request.request_id, None)

    def _policy_fault(self, what: str) -> None:
        if self.on_policy_fault is not None:
            self.on_policy_fault(what)
        if self.note is not None:
            self.note("policy_fault", None, {"what": what})

    def check_integrity(self) -> None:
        """Raise RuntimeError if queues, requests and blocks disagree."""
        queued = [*self.running, *self.waiting]
        members = [sequence for request in self.requests.values() for sequence in request.sequences]
        if sorted(map(id, queued)) != sorted(map(id, members)):
            raise RuntimeError("queues and requests differ")
        if any(table.ids for sequence in self.waiting if sequence.host_ids is None for table in sequence.tables):
            raise RuntimeError("a waiting sequence holds device blocks")
        self.kv.check_integrity(members)


def _joined(first: list[list[int]], then: list[list[int]]) -> list[list[int]]:
    """Per group, the blocks of both."""
    return [[*had, *more] for had, more in zip_longest(first, then, fillvalue=())]
