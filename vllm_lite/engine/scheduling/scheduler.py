"""The scheduler decides what every step computes. No socket, tensor, text or clock may enter here: time is an argument.

There are no phases. Each sequence's `num_computed` chases its `num_tokens`; a step gives it a whole prompt, a chunk of
a prompt, one decode token, or one decode token and drafts. Decodes come first, so that no stream stops for a prompt. Of
the remaining budget the prompt that has been running longest gets half, and also what shorter prompts and newly
admitted ones leave of the other half. Drafts share in equal parts what is still left. When blocks run out, a running
sequence is preempted: its KV is swapped to the host or computed again.

Steps may be in flight while the next one is made: `num_pending` counts the tokens of a sequence that they will sample,
drafts included as if all were right. update() rolls back the rejected ones.
"""

from collections import abc
from collections.abc import Callable
from itertools import islice

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.observe.counters import Meter
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.scheduling.admission import Admitter
from vllm_lite.engine.scheduling.branching import Branching
from vllm_lite.engine.scheduling.drafts import DraftLengths, add_drafts
from vllm_lite.engine.scheduling.in_flight import InFlight
from vllm_lite.engine.scheduling.policy import Fcfs, GuardedPolicy, View
from vllm_lite.engine.scheduling.preemption import Preemption
from vllm_lite.engine.scheduling.prompts import Prompts
from vllm_lite.engine.scheduling.queues import Options, Queues
from vllm_lite.engine.scheduling.rates import SHARE_BESIDE, Rates
from vllm_lite.engine.scheduling.results import Results
from vllm_lite.engine.scheduling.step_plan import OnDecision, StepPlan
from vllm_lite.engine.scheduling.waiting_queue import WaitingQueue
from vllm_lite.engine.sequence import Sequence
from vllm_lite.engine.workers.quarantine import Quarantine
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import PrefixCacheReset
from vllm_lite.protocol.stats import FinishReason
from vllm_lite.protocol.step import Continue, Entry, ModelOutput, SchedulerOutput


class Scheduler:
    """Makes steps from the queues and applies their results. Results are applied by update() in the order of the
    schedule() calls; the caller decides how many steps are in flight between the two."""

    def __init__(self, kv: KVCacheManager, options: Options, policy: object | None = None) -> None:
        self.kv = kv
        self.options = options
        self.policy = GuardedPolicy(policy or Fcfs(), self._policy_fault)
        self.on_decision: OnDecision | None = None
        self.on_policy_fault: Callable[[str], None] | None = None
        """Called once, with the policy's fault, when first come, first served replaces it."""
        self.num_scheduled_tokens = 0
        """Tokens of the latest step, drafts included."""
        self.step_budget = options.max_num_batched_tokens
        """Token budget of the latest step."""
        longest = options.max_model_len
        if not options.chunked_prefill:  # a step computes a sequence whole, also after a preemption
            longest = min(longest, options.max_num_batched_tokens)
        self.max_len = kv.max_tokens(longest, options.max_num_batched_tokens)
        self.generation = options.generation
        """Generation of the current worker group, or of the last one while there are no workers."""
        self.has_workers = True
        self.is_paused = False
        """Whether the engine is paused or asleep. The core then does not call schedule(); `describe` reports it."""
        self.counters = kv.counters
        self.meter = Meter(kv, self.max_len, options.draft_method)
        self.rates = Rates()
        self.in_flight = InFlight()
        self.queues = Queues(kv, self.policy, self.meter, options)
        self.branching = Branching(self.queues, kv)
        self.quarantine = Quarantine(self.queues, self.in_flight)
        self._admitter = Admitter(self.queues, kv)
        self._preemption = Preemption(self.queues, kv)
        self._prompts = Prompts(self.queues, kv, self._preemption, self._admitter)
        self._lengths = DraftLengths(options)
        self._results = Results(self.queues, kv, self.branching, self._lengths)

    @property
    def step(self) -> int:
        """Number of the latest step."""
        return self.queues.step

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished requests by their ids."""
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

    def fork(self, parent: Request, child: Request) -> None:
        """Queue `child`, which begins with the tokens of the live request `parent` and shares its KV if possible."""
        self.branching.fork_request(parent, child)

    def abort(self, request: Request, samples: abc.Sequence[int], reason: FinishReason) -> list[tuple[int, int]]:
        """End a request, or only its `samples`. Returns (sample index, number of output tokens) of all that end."""
        return self.branching.end_samples(request, samples, reason)

    def fail(self, request: Request, error: str) -> Produced:
        """End a request with an error."""
        return self._end_request(request, error)

    def withdraw(self, request: Request, *, is_replaced: bool) -> None:
        """Remove a request that its client has sent again; see Queues.withdraw."""
        self.queues.withdraw(request, is_replaced=is_replaced)

    def expire(self, now_s: float) -> list[Produced]:
        """End the requests whose deadline has passed."""
        expired = self.queues.expired(now_s)
        return [self._end_request(each, f"the deadline of {each.params.deadline_ms} ms passed") for each in expired]

    def _end_request(self, request: Request, error: str) -> Produced:
        sample, start = request.open_samples()[0]
        self.queues.end(request, "error")
        return Produced(request, sample, start, [], reason="error", error=error)

    def reset_prefix_cache(self, *, stored: bool = False) -> PrefixCacheReset:
        """Drop all cached blocks in memory, and with `stored` those on disk. Live requests are not affected. Later
        steps depend on this, so traces record it."""
        return self.kv.reset_cache(self.queues.unfinished(), stored=stored)

    def hold_newcomers(self, *, are_held: bool) -> None:
        """Hold back all requests that arrive from now on, or release them."""
        self.queues.hold_newcomers(are_held=are_held)

    # ---- workers come and go

    def lose_workers(self, cause: str, now_s: float, *, are_ended: bool = False) -> list[Produced]:  # noqa: ARG002
        """Drop the steps in flight and let every sequence wait with its tokens: the workers died of `cause`, or the
        engine ended them (`are_ended`; only traces record the difference).

        Until resume() nothing may be scheduled; requests can still be added and ended. Returns the requests that end.
        """
        self.has_workers = False
        convicted = self.quarantine.on_death(now_s)
        self.in_flight.drop()
        self.queues.lose_workers()
        return [] if convicted is None else [self._convict(*convicted, cause)]

    def _convict(self, request: Request, num_deaths: int, cause: str) -> Produced:
        """End a request that has killed the workers repeatedly, so that the others can continue."""
        if self.on_decision is not None:
            self.on_decision("convicted", request.sequences[0], {"deaths": num_deaths})
        self.counters.poisoned_requests += 1
        return self._end_request(
            request,
            f"request {request.request_id!r} was ended because the workers died {num_deaths} times in a row while they "
            f"computed it, at last it alone ({cause}); the other requests continue",
        )

    def resume(self, generation: int, swap_blocks_per_s: float) -> None:
        """Continue with new workers, which know no sequence yet. Raises ValueError unless `generation` is larger."""
        if generation <= self.generation:
            raise ValueError(f"generation {generation} cannot follow {self.generation}: generations must increase")
        self.generation = generation
        self.has_workers = True
        self.rates = self.rates._replace(swap_blocks_per_s=swap_blocks_per_s)

    def measured(self, rates: Rates) -> None:
        """Use these measured rates from now on."""
        self.rates = rates
        self.kv.measured(rates.prefill_tokens_per_s, rates.load_blocks_per_s)

    # ---- transfers between the pools and a disk tier

    def stored_keys(self, added: abc.Sequence[bytes], removed: abc.Sequence[bytes]) -> None:
        """Update the index of the disk tier: keys that it has now, and keys that it has dropped."""
        self.kv.storing.learn(added, removed)

    def transferred(self, ticket: int, failed: abc.Sequence[int]) -> None:
        """Complete a transfer. `failed` are the indices of its items that could not be moved."""
        self.kv.storing.ended(ticket, failed)

    def transfer_late(self, ticket: int) -> None:
        """Stop waiting for a load that is late; sequences that waited for it compute instead."""
        self.kv.storing.give_up(ticket)

    # ---- schedule

    def schedule(self, now_s: float = 0.0) -> SchedulerOutput | None:
        """Make the next step. None: nothing can be computed now."""
        self.meter.time_results(now_s, idle=not self.in_flight)
        while self.quarantine.lets_schedule(self.on_decision):
            step = self._make_step(now_s)
            if step is not None or self.in_flight or not self.kv.is_freeing:
                return step
        return None

    def _make_step(self, now_s: float) -> SchedulerOutput | None:
        """Make one step. None: nothing can be computed, or this attempt only freed blocks that the next can use."""
        queues, max_tokens = self.queues, self.options.max_num_batched_tokens
        self.kv.begin_step()
        view = View(now_s, len(queues.running), len(queues.waiting), self.kv.pool.num_free, max_tokens)
        self.step_budget = budget = self._choose_budget(view)
        plan = StepPlan(budget, view, self.rates, self.policy, self.branching, self.on_decision)
        queues.running = self.policy.sorted_running(queues.running, view)
        self._schedule_decodes(plan)
        self._prompts.schedule(plan)
        if plan.draftable:
            drafting, num_rows = [sequence for _, sequence in plan.draftable], len(plan.sampling)
            lengths = self._lengths.choose(drafting, num_rows, self.rates, queues.step)
            add_drafts(plan, self.kv, lengths, self._lengths.price, self.options.max_samples - num_rows)
        while plan.budget == budget and not (self.in_flight or self.kv.is_moving) and queues.running and queues.waiting:
            # Running beams may wait for another beam of their request, and hold the blocks that it needs.
            victim = queues.running.pop()
            self._preemption.preempt(victim, next(iter(queues.waiting)), plan)
            plan.room, plan.shortest = plan.budget, None
            self._admitter.schedule_waiting(plan)
        if plan.budget == budget and not self.kv.is_moving:
            queues.entries += plan.entries
            return None
        queues.step += 1
        self.num_scheduled_tokens = num_tokens = budget - plan.budget
        self.counters.steps += 1
        entries = queues.take_entries() + self.kv.take_entries() + plan.entries
        output = SchedulerOutput(self.generation, queues.step, self.kv.take_ops(), entries)
        self.in_flight.add(
            output,
            plan.sampling,
            num_tokens,
            only_decodes=num_tokens <= len(plan.sampling),
            drafted=plan.drafted,
        )
        return output

    def _choose_budget(self, view: View) -> int:
        """Token budget of the next step: the policy's, limited to the time of max_itl_s while any stream waits for its
        next token. It always has room for one token of each of these, for enough prompt tokens to measure their rate,
        and for an image that must be computed whole."""
        options, budget = self.options, view.max_num_batched_tokens
        if not options.chunked_prefill:  # prompts cannot be cut to a smaller budget
            return budget
        if self.policy.choose_budget is not None:
            budget = self.policy.budget(view)
        if options.max_itl_s and any(sequence.num_output for sequence in self.running):
            num_decoding = sum(sequence.num_computed >= sequence.num_prompt for sequence in self.running)
            share = SHARE_BESIDE if self.kv.is_aside else 1.0
            budget = self.rates.tokens_within(options.max_itl_s, num_decoding, budget, share)
        if budget < view.max_num_batched_tokens:
            next_ones = [*self.running, *islice(self.queues.waiting, 1)]
            if uncut := self.kv.most_uncut(next_ones):
                budget = max(budget, min(view.num_running + uncut, view.max_num_batched_tokens))
        return budget

    def _schedule_decodes(self, plan: StepPlan) -> None:
        """Schedule one token of every running sequence that lacks one; append those that lack more to `plan.prompts`.

        This loop runs once per sequence and step: it creates no object for a decode that needs no new block.
        """
        budget, entries, sampling = plan.budget, plan.entries, plan.sampling
        running = self.queues.running
        may_draft = self.queues.may_draft
        index = 0
        while index < len(running):  # preemption removes sequences from `index` on, forking appends
            sequence = running[index]
            index += 1
            pending = sequence.num_pending
            end = sequence.num_tokens + pending
            if pending and (end >= sequence.max_len or sequence.request.beam or not sequence.grammar_is_ready):
                continue  # the pending token may be its last, or decides what comes next
            if end - sequence.num_computed > 1 or end <= sequence.prompt_end:
                plan.prompts.append(sequence)
                continue
            if budget == 0:
                continue
            entry: Entry = sequence.decode_entry  # type: ignore[assignment]
            if end > sequence.num_slots:
                growth = self._preemption.grow(sequence, end, running[index - 1 :], plan)
                if growth is None:
                    index -= 1  # the sequence was preempted; the next one has its index now
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

    # ---- update

    def update(self, result: ModelOutput) -> list[Produced]:
        """Apply the workers' result of the oldest step in flight. Raises ProtocolError if it is of another step."""
        self.kv.take_result(result)
        return self._results.apply(self.in_flight.confirm(), result)

    def _policy_fault(self, what: str) -> None:
        if self.on_policy_fault is not None:
            self.on_policy_fault(what)
        if self.on_decision is not None:
            self.on_decision("policy_fault", None, {"what": what})

    def check_integrity(self) -> None:
        """Raise RuntimeError if queues, requests and blocks disagree."""
        self.queues.check_integrity()
        if not self.has_workers and (self.running or self.in_flight or self.queues.entries):
            raise RuntimeError("there are no workers, but sequences run, or steps or entries are not dropped")
