"""Queues: all unfinished requests, and the queue of each of their sequences: running, waiting or held.

The scheduler, admission and branching move sequences only through these methods. `entries` collects what the workers
have to apply before the entries of the next step.
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
    """Maximum drafts per sequence and step."""
    num_forced: int = 0
    """Maximum drafts of a sequence that follows a grammar, where num_drafts is 0."""
    max_samples: int = 10**9
    """Maximum tokens that a step samples: workers have memory for the logits of so many."""
    draft_method: str = ""
    """Name of the drafter; empty if only grammars draft."""
    adaptive_drafts: bool = True
    """Whether to draft fewer tokens where more do not pay."""
    shares_answers: bool = False
    """Whether drafts may come from the answers of other requests, too."""
    generation: int = 0
    max_itl_s: float = 0.0
    """Seconds that prompt tokens may stretch a step to while sequences decode. 0: no limit."""
    media_aside: bool = False
    """Whether media are computed beside steps that decode, also without max_itl_s."""
    max_loras: int = 0
    max_cpu_loras: int = 0


class Queues:
    """Every sequence of an unfinished request is in `running`, `waiting` or `held`. Its status is set here, except that
    SWAPPED becomes PREEMPTED where a parked sequence's blocks are released. Without workers nothing runs. Sequences in
    `held` are not scheduled: suspects are tried first, or the engine is about to pause."""

    def __init__(self, kv: KVCacheManager, policy: GuardedPolicy, meter: Meter, options: Options) -> None:
        self.options = options
        self.policy = policy
        self.meter = meter
        self.step = 0
        """Number of the latest step."""
        self.requests: dict[str, Request] = {}
        self.external = ExternalRequests()
        self.adapters = AdapterTable(AdapterQuota(options.max_loras, options.max_cpu_loras))
        self.running: list[Sequence] = []
        self.held: dict[Sequence, None] = {}
        """Sequences that may not be scheduled now; once released they enter the waiting queue."""
        self._only: set[Request] | None = None
        """Requests that may run; None: all."""
        self._first_held: float = float("inf")
        """Requests with this arrival number or a later one are held; infinity: none."""
        self.entries: list[Entry] = []
        """Entries with which the next step begins, in the order of the decisions."""
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
        """Number of waiting and held sequences."""
        return len(self.waiting) + len(self.held)

    @property
    def may_draft(self) -> bool:
        """Whether any sequence may draft."""
        return self.options.num_drafts > 0 or (self.options.num_forced > 0 and self._num_guided > 0)

    def has_row_for(self, sequence: Sequence) -> bool:
        """Whether the batch has a free row for `sequence` and it is not held."""
        return len(self.running) < self.options.max_num_seqs and self._may_run(sequence)

    def any_decodes(self) -> bool:
        """Whether any running sequence has output and lacks only its next token."""
        return any(
            each.num_tokens + each.num_pending > each.num_prompt
            and each.num_tokens + each.num_pending - each.num_computed <= 1
            for each in self.running
        )

    def unfinished(self) -> list[Sequence]:
        """All sequences: running, waiting and held."""
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
        """Remove a request that its client has sent again, without counting it as ended. `is_replaced`: a new request
        with its id enters next; otherwise the client lacked only the ends of its samples and has them now."""
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

    def expired(self, now_s: float) -> list[Request]:
        """Requests whose deadline has passed."""
        return [r for r in self._with_deadline.values() if r.deadline_s is not None and r.deadline_s <= now_s]

    # ---- sequences

    def wait(self, sequence: Sequence, status: Status = Status.WAITING) -> None:
        """Queue a sequence in the policy's order: a preempted one comes before later arrivals."""
        sequence.status = status
        sequence.num_passed = 0
        self._queue(sequence)

    def run(self, sequence: Sequence) -> None:
        """Append a sequence that is in no queue to `running`. The caller sends its entry to the workers."""
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue, if it is in one."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.held:
            del self.held[sequence]
        elif sequence.status is not Status.FINISHED:
            self.waiting.remove(sequence)

    def finish(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Release all blocks and the handle of `sequence`; `forget` also drops its contents from the prefix cache. The
        caller removes it from its queue."""
        sequence.status = Status.FINISHED
        self.meter.left(sequence)
        self._kv.release(sequence, forget=forget)
        if sequence.seen_by_workers:
            self.entries.append(Finish(sequence.handle))
            self.handles.give_back(sequence)  # Finish precedes the entries of new sequences, so reuse is safe

    def lose_workers(self) -> None:
        """After the workers died: let every sequence wait with its tokens and nothing else. Those that ran are queued
        in the policy's order, as preempted: none may pass them."""
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
        """Give `sequence` a handle. The workers learn it with the step being scheduled, or with the next one."""
        self.handles.introduce(sequence, self.step + 1)

    def take_entries(self) -> list[Entry]:
        entries, self.entries = self.entries, []
        return entries

    # ---- held sequences

    def run_only(self, requests: set[Request] | None) -> None:
        """Hold the sequences of all other requests from now on; None holds none. No step may be in flight."""
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
        self._release_held()

    def hold_newcomers(self, *, are_held: bool) -> None:
        """Hold the sequences of all requests that arrive from now on, or release them."""
        self._first_held = self.num_arrived if are_held else float("inf")
        self._release_held()

    def is_newcomer(self, request: Request) -> bool:
        """Whether `request` arrived after hold_newcomers()."""
        return request.arrival >= self._first_held

    def _release_held(self) -> None:
        """Move the held sequences that may run now to the waiting queue."""
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
