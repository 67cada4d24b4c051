"""The scheduler decides what every step computes. No socket, tensor, text or clock may enter here: time is an argument.

There are no phases. A sequence's `num_computed` grows until it reaches its tokens; a step gives each a number of them:
a whole prompt, a chunk of it, one decode token, one and some drafts. Running sequences that lack one token get it
first, so that no stream stops for a prompt. Of what is left, the prompt that has been running longest gets half, and
also what shorter prompts and newly admitted ones leave of the other half. Drafts take the tokens that are left over,
in equal parts. When blocks run out, a running sequence is preempted: its KV is swapped to the host or computed again.

Steps may be in flight while the next one is made: a sequence whose next token is unknown has it as `num_pending`. So
are its drafts, as if all of them were right; what proves wrong is taken back with the step's result.
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
        """Whether a user has paused the engine, so that schedule() is not called; `describe` reads it."""
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

    def fork(self, parent: Request, child: Request) -> None:
        """Queue a request that begins with the tokens of a live one, and shares its KV if it can."""
        self.branching.fork_request(parent, child)

    def abort(self, request: Request, samples: abc.Sequence[int], reason: FinishReason) -> list[tuple[int, int]]:
        """End a request, or those of its `samples`. Returns (sample, number of its output tokens) of all that end."""
        return self.branching.end_samples(request, samples, reason)

    def fail(self, request: Request, error: str) -> Produced:
        """End a request that cannot go on."""
        return self._end_request(request, error)

    def withdraw(self, request: Request, *, is_replaced: bool) -> None:
        """Take out a request whose client has sent it again; see Queues.withdraw."""
        self.queues.withdraw(request, is_replaced=is_replaced)

    def expire(self, now_s: float) -> list[Produced]:
        """End the requests whose deadline has passed."""
        late = self.queues.late(now_s)
        return [self._end_request(each, f"the deadline of {each.params.deadline_ms} ms passed") for each in late]

    def _end_request(self, request: Request, error: str) -> Produced:
        sample, start = request.open_samples()[0]
        self.queues.end(request, "error")
        return Produced(request, sample, start, [], reason="error", error=error)

    def reset_prefix_cache(self, *, stored: bool = False) -> PrefixCacheReset:
        """Forget every cached block in memory, and with `stored` what is kept on disk; requests that are live go on
        unharmed. It decides what later steps find, so it belongs into a trace."""
        return self.kv.reset_cache(self.queues.unfinished(), stored=stored)

    def hold_newcomers(self, *, are_held: bool) -> None:
        """Let no request run that comes from now on, or let all of them run again."""
        self.queues.hold_newcomers(are_held=are_held)

    # ---- workers come and go

    def lose_workers(self, cause: str, now_s: float, *, are_ended: bool = False) -> list[Produced]:  # noqa: ARG002
        """All workers died of `cause`, or `are_ended` by us (a trace alone records which): drop the steps in flight,
        and let every sequence wait with its tokens.

        Until resume() nothing may be scheduled; requests come and go as ever. Returns the requests that end by it.
        """
        self.has_workers = False
        convicted = self.quarantine.on_death(now_s)
        self.in_flight.drop()
        self.queues.lose_workers()
        return [] if convicted is None else [self._convict(*convicted, cause)]

    def _convict(self, request: Request, num_deaths: int, cause: str) -> Produced:
        """End a request that has killed the workers again and again, so that the others may go on."""
        if self.on_decision is not None:
            self.on_decision("convicted", request.sequences[0], {"deaths": num_deaths})
        self.counters.poisoned_requests += 1
        return self._end_request(
            request,
            f"request {request.request_id!r} was ended because the workers died {num_deaths} times in a row while they "
            f"computed it, at last it alone ({cause}); the other requests go on",
        )

    def resume(self, generation: int, swap_blocks_per_s: float) -> None:
        """Go on with new workers, which know nothing yet. Raises ValueError for a generation that is not newer."""
        if generation <= self.generation:
            raise ValueError(f"generation {generation} cannot follow {self.generation}: what is stale must look stale")
        self.generation = generation
        self.has_workers = True
        self.rates = self.rates._replace(swap_blocks_per_s=swap_blocks_per_s)

    def measured(self, rates: Rates) -> None:
        """Decide by these rates from now on."""
        self.rates = rates
        self.kv.measured(rates.prefill_tokens_per_s, rates.load_blocks_per_s)

    # ---- transfers between the pools and a tier that is not memory

    def stored_keys(self, added: abc.Sequence[bytes], removed: abc.Sequence[bytes]) -> None:
        """The tier has these contents from now on, and those no more."""
        self.kv.storing.learn(added, removed)

    def transferred(self, ticket: int, failed: abc.Sequence[int]) -> None:
        """A transfer has ended, but for the contents at the places `failed`."""
        self.kv.storing.ended(ticket, failed)

    def transfer_late(self, ticket: int) -> None:
        """Let nobody wait any longer for a load."""
        self.kv.storing.give_up(ticket)

    # ---- schedule

    def schedule(self, now_s: float = 0.0) -> SchedulerOutput | None:
        """Make the next step. None: there is nothing to compute."""
        self.meter.time_results(now_s, idle=not self.in_flight)
        while self.quarantine.lets_schedule(self.on_decision):
            step = self._make_step(now_s)
            if step is not None or self.in_flight or not self.kv.is_freeing:
                return step
        return None

    def _make_step(self, now_s: float) -> SchedulerOutput | None:
        """Make a step of what can be had now. None: there is nothing to compute, or an empty step has freed something
        that the next one can use."""
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
            add_drafts(plan, self.kv, self._lengths.choose(drafting, num_rows, self.rates, queues.step))
        while plan.budget == budget and not (self.in_flight or self.kv.is_moving) and queues.running and queues.waiting:
            # Beams that wait for another beam of their request hold the blocks it needs to come in.
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
        """The most tokens of the next step: as the policy says, and no more than max_itl_s has time for while anybody
        waits for a next token. There is always room for one token of each such sequence, for as many prompt tokens as
        measure their rate, and for an image that cannot be split."""
        options, budget = self.options, view.max_num_batched_tokens
        if not options.chunked_prefill:  # prompts cannot be cut to it
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
            if pending and (end >= sequence.max_len or sequence.request.beam or not sequence.grammar_is_ready):
                continue  # its last token may be on its way, or what comes next depends on it
            if end - sequence.num_computed > 1 or end <= sequence.prompt_end:
                plan.prompts.append(sequence)
                continue
            if budget == 0:
                continue
            entry: Entry = sequence.decode_entry  # type: ignore[assignment]
            if end > sequence.num_slots:
                growth = self._preemption.grow(sequence, end, running[index - 1 :], plan)
                if growth is None:
                    index -= 1  # it is gone; the next sequence has its index now
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
        """Apply what the workers sampled in the oldest step sent. Raises ProtocolError if it is of another step."""
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
            raise RuntimeError("there are no workers, but something runs or is on its way to them")
