"""Queues: every unfinished request, and where each of its sequences is: waiting, in the policy's order, or running.

The scheduler, admission and branching move sequences through these methods alone. What the workers must know before
they get the next step's own entries is collected in `entries`.
"""

from typing import NamedTuple

from vllm_lite.engine.adapters import AdapterQuota, AdapterTable
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.observe.counters import Meter
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.external import ExternalRequests
from vllm_lite.engine.scheduling.handles import Handles
from vllm_lite.engine.scheduling.policy import GuardedPolicy
from vllm_lite.engine.scheduling.waiting_queue import WaitingQueue
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.stats import FinishReason
from vllm_lite.protocol.step import Entry, Finish, Preempt


class Options(NamedTuple):
    """The limits of a step, and the choices that the configuration leaves to the scheduler."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 10**9
    chunked_prefill: bool = True
    preemption: str = "recompute"
    num_drafts: int = 0
    """The most drafts of a sequence in a step, of every sequence."""
    num_forced: int = 0
    """The same, of those that follow a grammar, where others draft nothing."""
    draft_method: str = ""
    """What drafts, if not grammars alone."""
    adaptive_drafts: bool = True
    """Whether fewer are drafted where more do not pay."""
    shares_answers: bool = False
    """Whether drafts are looked for in the answers of other requests, too."""
    generation: int = 0
    max_itl_s: float = 0.0
    """How long a step may take in which sequences wait for their next tokens, as far as prompts make it longer. 0: any
    time."""
    media_aside: bool = False
    """Whether media are computed beside steps where sequences decode, also without such a goal."""
    max_loras: int = 0
    max_cpu_loras: int = 0


class Queues:
    """A sequence of an unfinished request is in one of the two queues, and its status says in which. The status is set
    here, but for a parked sequence whose blocks the KV manager takes: that one goes from SWAPPED to PREEMPTED there.
    Without workers all of them wait. Sequences in `held` are not scheduled either: because requests under suspicion
    run first, or because the engine is about to pause."""

    def __init__(self, kv: KVCacheManager, policy: GuardedPolicy, meter: Meter, options: Options) -> None:
        self.options = options
        self.policy = policy
        self.meter = meter
        self.step = 0
        """The number of the latest step."""
        self.requests: dict[str, Request] = {}
        self.external = ExternalRequests()
        self.adapters = AdapterTable(AdapterQuota(options.max_loras, options.max_cpu_loras))
        self.running: list[Sequence] = []
        self.held: dict[Sequence, None] = {}
        """Sequences that no step may compute now. They go on from the waiting queue."""
        self._only: set[Request] | None = None
        """The requests that may run; None: all."""
        self._first_held: float = float("inf")
        """The arrival of the first request that may not run because newcomers are held."""
        self.entries: list[Entry] = []
        """What the next step begins with, in the order in which it happened."""
        self.num_arrived = 0
        self._num_guided = 0  # requests that follow a grammar
        self._kv = kv
        self._with_deadline: dict[str, Request] = {}
        self.handles = Handles()

    @property
    def waiting(self) -> WaitingQueue:
        return self.policy.queue

    @property
    def num_waiting(self) -> int:
        """Number of sequences that do not run."""
        return len(self.waiting) + len(self.held)

    @property
    def may_draft(self) -> bool:
        """Whether there are sequences that may draft."""
        return self.options.num_drafts > 0 or (self.options.num_forced > 0 and self._num_guided > 0)

    def has_row_for(self, sequence: Sequence) -> bool:
        """Whether a new sequence may run at once."""
        return len(self.running) < self.options.max_num_seqs and self._may_run(sequence)

    def any_decodes(self) -> bool:
        """Whether a running sequence has tokens of output and lacks the next one alone."""
        return any(
            each.num_tokens + each.num_pending > each.num_prompt
            and each.num_tokens + each.num_pending - each.num_computed <= 1
            for each in self.running
        )

    def unfinished(self) -> list[Sequence]:
        """All sequences, wherever they are."""
        return [*self.running, *self.waiting, *self.held]

    # ---- requests

    def enter(self, request: Request) -> None:
        """Add a request. The caller queues its sequences."""
        request.arrival = self.num_arrived
        self.num_arrived += 1
        request.queued_s = self.meter.now_s
        self.requests[request.request_id] = request
        self._num_guided += request.is_guided
        if request.adapter is not None:
            request.adapter.num_requests += 1
        self.external.add(request)
        if request.deadline_s is not None:
            self._with_deadline[request.request_id] = request

    def end(self, request: Request, reason: FinishReason, *, forget: bool = False) -> None:
        """End a request and all its sequences. `forget` drops their contents from the prefix cache, as in finish()."""
        self._finish_all(request, forget=forget)
        self.close(request, reason)

    def close(self, request: Request, reason: FinishReason) -> None:
        """Remove a request whose last sample has ended."""
        request.unforked = []
        self.meter.ended(request, reason)
        self.external.end(request)
        self._remove(request)

    def withdraw(self, request: Request, *, is_replaced: bool) -> None:
        """Take out a request whose client has sent it again. It goes on, or its client lacked nothing but its ends and
        has them, so no end is counted. `is_replaced`: another one with its id enters next."""
        self._finish_all(request)
        request.unforked = []
        self.external.end(request, is_replaced=is_replaced)
        self._remove(request)

    def _finish_all(self, request: Request, *, forget: bool = False) -> None:
        for sequence in list(request.sequences):
            self.leave(sequence)
            self.finish(sequence, forget=forget)

    def _remove(self, request: Request) -> None:
        if self.requests.pop(request.request_id, None) is not None:
            self._num_guided -= request.is_guided
            if request.adapter is not None:
                request.adapter.num_requests -= 1
        self._with_deadline.pop(request.request_id, None)

    def late(self, now_s: float) -> list[Request]:
        """The requests whose deadline has passed."""
        return [r for r in self._with_deadline.values() if r.deadline_s is not None and r.deadline_s <= now_s]

    # ---- sequences

    def wait(self, sequence: Sequence, status: Status = Status.WAITING) -> None:
        """Queue a sequence where the policy sorts it in: a preempted one comes before later arrivals."""
        sequence.status = status
        sequence.num_passed = 0
        self._queue(sequence)

    def run(self, sequence: Sequence) -> None:
        """Add a sequence that is in no queue to those that run. The caller sends its entry."""
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue, if it is in one."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.held:
            del self.held[sequence]
        elif sequence.status is not Status.FINISHED:
            self.waiting.remove(sequence)

    def finish(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Release everything that `sequence` holds, and with `forget` drop its contents from the prefix cache, too. The
        caller takes it out of its queue."""
        sequence.status = Status.FINISHED
        self.meter.left(sequence)
        self._kv.release(sequence, forget=forget)
        if sequence.seen_by_workers:
            self.entries.append(Finish(sequence.handle))
            self.handles.give_back(sequence)  # these entries precede those of arrivals, so reuse is safe

    def lose_workers(self) -> None:
        """The workers have died: every sequence waits for others, with the tokens it has and nothing else. The policy
        sorts those that ran in among those that wait; like preempted ones, they are passed by no others."""
        running, self.running = self.running, []
        self.entries = []
        self.handles = Handles()
        self.adapters.lose_workers()
        self._kv.lose_contents([*running, *self.waiting, *self.held])
        for request in self.requests.values():
            request.lose_workers()
        for sequence in [*self.waiting, *self.held]:
            if sequence.status is Status.SWAPPED:
                sequence.status = Status.PREEMPTED
        for sequence in running:
            self.wait(sequence, Status.PREEMPTED)

    def introduce(self, sequence: Sequence) -> None:
        """Give `sequence` a handle: the step being scheduled, or the next one, shows it to the workers."""
        self.handles.introduce(sequence, self.step + 1)

    def take_entries(self) -> list[Entry]:
        entries, self.entries = self.entries, []
        return entries

    # ---- some run, others are held

    def run_only(self, requests: set[Request] | None) -> None:
        """Hold the sequences of all but these requests, from now on; None holds none. No step may be in flight."""
        self._only = requests
        for sequence in [each for each in self.running if not self._may_run(each)]:
            self.running.remove(sequence)
            sequence.lose_blocks()
            self._kv.release(sequence)
            self.entries.append(Preempt(sequence.handle))
            self.wait(sequence, Status.PREEMPTED)
        for sequence in [each for each in self.waiting if not self._may_run(each)]:
            self.waiting.remove(sequence)
            self._queue(sequence)
        self._let_go()

    def hold_newcomers(self, *, are_held: bool) -> None:
        """Hold the sequences of all requests that arrive from now on, or no longer."""
        self._first_held = self.num_arrived if are_held else float("inf")
        self._let_go()

    def is_newcomer(self, request: Request) -> bool:
        """Whether it came while newcomers are held."""
        return request.arrival >= self._first_held

    def _let_go(self) -> None:
        """Queue those that need not be held any more."""
        held, self.held = self.held, {}
        for sequence in held:
            self._queue(sequence)

    def _may_run(self, sequence: Sequence) -> bool:
        request = sequence.request
        return not self.is_newcomer(request) and (self._only is None or request in self._only)

    def _queue(self, sequence: Sequence) -> None:
        if self._may_run(sequence):
            self.policy.enqueue(sequence)
        else:
            self.held[sequence] = None

    def check_integrity(self) -> None:
        """Raise RuntimeError if queues, requests and blocks disagree."""
        queued = self.unfinished()
        members = [sequence for request in self.requests.values() for sequence in request.sequences]
        if sorted(map(id, queued)) != sorted(map(id, members)):
            raise RuntimeError("queues and requests differ")
        off_device = [each for each in queued[len(self.running) :] if each.host_ids is None]
        if any(table.ids for sequence in off_device for table in sequence.tables):
            raise RuntimeError("a waiting sequence holds device blocks")
        if not all(map(self._may_run, [*self.running, *self.waiting])) or any(map(self._may_run, self.held)):
            raise RuntimeError("a sequence is held that may run, or the reverse")
        if self._num_guided != sum(request.is_guided for request in self.requests.values()):
            raise RuntimeError(f"{self._num_guided} requests are said to follow a grammar")
        self._check_adapters()
        self._kv.check_integrity(members)

    def _check_adapters(self) -> None:
        self.adapters.check_integrity()
        having = [request.adapter for request in self.requests.values() if request.adapter is not None]
        for adapter in {*having, *self.adapters.by_number.values()}:
            if adapter.num_requests != having.count(adapter) or adapter.number not in self.adapters.by_number:
                raise RuntimeError(f"{adapter} is said to have {adapter.num_requests} requests")
        running = {sequence.request.adapter for sequence in self.running} - {None}
        if len(running) > self.adapters.limits.in_step or not all(each.is_loaded for each in running if each):
            raise RuntimeError(f"the running sequences have {running}")
