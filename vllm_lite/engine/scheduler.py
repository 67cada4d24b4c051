"""The scheduler: what every step computes. Time, sockets, tensors and text may not enter here.

There are no phases. A request's `num_computed` chases its `num_tokens`, and a step gives each request a number of
tokens: a whole prompt, a chunk of it, one decode token. Running requests come first, then waiting ones while the
token budget lasts. When blocks run out, the request that came last is preempted and computed again later.
"""

from collections import deque
from typing import NamedTuple

from vllm_lite.engine.kv_cache_manager import KVCacheManager, Verdict
from vllm_lite.engine.request import Request, Status
from vllm_lite.engine.stop import check_stop
from vllm_lite.errors import ProtocolError, RequestError
from vllm_lite.protocol.api import FinishReason, TokenLogprobs
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.step import Continue, Entry, Finish, ModelOutput, NewRequest, Preempt, Resume, SchedulerOutput
from vllm_lite.protocol.step import Sampling as WireSampling


class Produced(NamedTuple):
    """What one step gave one request. `reason` is None while it goes on."""

    request: Request
    start: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    reason: FinishReason | None
    error: str | None


class Sent(NamedTuple):
    """A step the workers have been given: which requests get a token from it, in the order of its entries."""

    step: int
    sampling: list[Request]


class Counters:
    """Totals since the start."""

    __slots__ = ("cached_tokens", "generated_tokens", "preemptions", "prompt_tokens", "steps")

    def __init__(self) -> None:
        self.steps = self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.preemptions = 0


class Scheduler:
    """Owns every unfinished request and, through the KV manager, every block."""

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        epoch: int = 0,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.epoch = epoch
        self.step = 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.counters = Counters()
        self._sent: deque[Sent] = deque()
        self._departures: list[Entry] = []
        self._free_handles: list[int] = []
        self._num_handles = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, with the numbers, if it can never be served."""
        longest = self.kv.max_tokens
        if request.num_tokens + 1 > longest:
            raise RequestError(
                f"the prompt has {request.num_tokens} tokens; with at least one of output the KV cache holds "
                f"{longest} ({self.kv.pool.num_usable} blocks of {self.kv.block_size}, "
                f"{self.kv.watermark_blocks} kept free)"
            )
        self.kv.register(request)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.counters.prompt_tokens += request.num_prompt

    def abort(self, request_id: str) -> Request | None:
        """Drop an unfinished request and its blocks at once; what is still being computed for it is ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._leave_queue(request)
            self._finish(request)
        return request

    def has_requests(self) -> bool:
        return bool(self.requests)

    # ---- schedule

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if there is nothing to compute."""
        entries: list[Entry] = []
        sampling: list[Request] = []
        num_preempted = self.counters.preemptions
        budget = self._schedule_running(entries, sampling)
        if self.counters.preemptions == num_preempted:
            self._schedule_waiting(entries, sampling, budget)
        if not entries:
            return None
        self.step += 1
        self.counters.steps += 1
        self._sent.append(Sent(self.step, sampling))
        departures, self._departures = self._departures, []
        return SchedulerOutput(self.epoch, self.step, [], departures + entries)

    def _schedule_running(self, entries: list[Entry], sampling: list[Request]) -> int:
        """Give every running request its tokens; returns what is left of the budget.

        This loop runs once per sequence and step: it allocates nothing for a decode that needs no block.
        """
        budget = self.max_num_batched_tokens
        running = self.running
        prefilled = []
        index = 0
        while index < len(running) and budget > 0:  # preemption shortens `running` from its end
            request = running[index]
            index += 1
            computed = request.num_computed
            count = request.num_tokens - computed
            if count > budget:
                count = budget
            end = computed + count
            new: list[int] | None = None
            if end > request.num_slots:
                new = self._grow_or_preempt(request, end)
                if new is None:
                    break
            if count == 1 and not new:
                entries.append(request.decode_entry)  # type: ignore[arg-type]
            else:
                entries.append(Continue(request.handle, count, [new] if new else []))
                if count > 1:
                    prefilled.append(request)
            request.num_computed = end
            if end == request.num_tokens:
                sampling.append(request)
            budget -= count
        for request in prefilled:  # after the last preemption, so that no block is cached whose step is not sent
            self.kv.cache_blocks(request, request.num_computed)
        return budget

    def _grow_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for `request`, taken if need be from those that came last. None: it had to give up its own."""
        while (new := self.kv.grow(request, num_tokens)) is None:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None
        return new

    def _schedule_waiting(self, entries: list[Entry], sampling: list[Request], budget: int) -> None:
        """Admit waiting requests in order while budget, seats and blocks last. Nobody is preempted for them."""
        kv, waiting = self.kv, self.waiting
        while waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = waiting[0]
            hit = kv.find_cached(request)
            count = request.num_tokens - min(hit.num_tokens, request.num_tokens - 1)
            if count > budget:
                if not self.chunked_prefill:
                    break
                count = budget
            if kv.admission(request, hit).verdict is not Verdict.OK:
                break
            waiting.popleft()
            kv.admit(request, hit)
            entries.append(self._arrival(request, count))
            request.num_computed += count
            if request.num_computed == request.num_tokens:
                sampling.append(request)
            budget -= count
            self.running.append(request)
            # No preemption can come any more in this step, so its blocks may be shared at once: a layer writes the KV
            # of the whole batch before it reads any of it.
            kv.cache_blocks(request, request.num_computed)

    def _arrival(self, request: Request, num_tokens: int) -> NewRequest | Resume:
        request.status = Status.RUNNING
        block_ids = [list(request.table.ids)]  # type: ignore[union-attr]
        if request.num_cached_at_start is None:
            request.num_cached_at_start = min(request.num_cached, request.num_prompt - 1)
            self.counters.cached_tokens += request.num_cached_at_start
        if request.seen_by_workers:
            return Resume(request.handle, request.num_computed, request.num_cached, num_tokens, block_ids)
        request.seen_by_workers = True
        request.handle = self._free_handles.pop() if self._free_handles else self._new_handle()
        request.decode_entry = Continue(request.handle, 1, [])
        return NewRequest(
            request.handle,
            request.tokens.tobytes(),
            request.num_prompt,
            _wire_sampling(request),
            request.num_computed,
            request.num_cached,
            num_tokens,
            block_ids,
        )

    def _preempt(self, request: Request) -> None:
        """Take all blocks; the request, already out of `running`, waits at the head of the queue to be recomputed."""
        self.kv.release(request)
        request.status = Status.PREEMPTED
        self.waiting.appendleft(request)
        self._departures.append(Preempt(request.handle))
        self.counters.preemptions += 1

    # ---- update

    def update(self, output: ModelOutput) -> list[Produced]:
        """Apply what the workers sampled in the oldest step sent. Raises ProtocolError if it is of another step."""
        sent = self._sent.popleft()
        if (output.epoch, output.step) != (self.epoch, sent.step):
            raise ProtocolError(
                f"expected the output of step {sent.step} of epoch {self.epoch}, "
                f"got step {output.step} of epoch {output.epoch}"
            )
        tokens = unpack_tokens(output.tokens)
        if len(tokens) != len(sent.sampling):
            raise ProtocolError(f"step {sent.step} samples {len(sent.sampling)} tokens, got {len(tokens)}")
        failed = dict(output.failed) if output.failed else {}
        produced = []
        num_finished = 0
        block_size = self.kv.block_size
        for index, request in enumerate(sent.sampling):
            if request.status is not Status.RUNNING:
                continue  # aborted while the step ran
            if failed and request.handle in failed:
                produced.append(Produced(request, request.num_output, [], None, "error", failed[request.handle]))
                self._finish(request, forget=True)
                num_finished += 1
                continue
            token = tokens[index]
            request.tokens.append(token)
            request.num_tokens += 1
            if request.num_computed % block_size == 0:
                self.kv.cache_blocks(request, request.num_computed)
            reason = None
            if token in request.stop_ids or request.num_tokens >= request.max_len:
                reason = check_stop(request, token)
            logprobs = output.logprobs and output.logprobs[index]
            produced.append(
                Produced(request, request.num_output - 1, [token], [logprobs] if logprobs else None, reason, None)
            )
            if reason is not None:
                self._finish(request)
                num_finished += 1
        self.counters.generated_tokens += len(produced)
        if num_finished:
            self.running = [request for request in self.running if request.status is Status.RUNNING]
        return produced

    # ---- the end of a request

    def _finish(self, request: Request, *, forget: bool = False) -> None:
        """Release everything `request` holds. The caller takes it out of its queue."""
        request.status = Status.FINISHED
        self.kv.release(request, forget=forget)
        del self.requests[request.request_id]
        if request.seen_by_workers:
            self._departures.append(Finish(request.handle))
            self._free_handles.append(request.handle)  # departures precede arrivals in a step, so reuse is safe

    def _leave_queue(self, request: Request) -> None:
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)

    def _new_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles - 1

    def check_integrity(self) -> None:
        """Raise RuntimeError if queues, requests and blocks disagree."""
        queued = [*self.running, *self.waiting]
        if {id(request) for request in queued} != {id(request) for request in self.requests.values()}:
            raise RuntimeError("queues and requests differ")
        if len(queued) != len(self.requests):
            raise RuntimeError("a request is queued twice")
        if any(request.num_slots for request in self.waiting):
            raise RuntimeError("a waiting request holds blocks")
        self.kv.check_integrity(self.requests.values())


def _wire_sampling(request: Request) -> WireSampling:
    params = request.params
    banned = params.min_tokens > 0 and request.stop_ids
    return WireSampling(
        temperature=0.0 if params.greedy else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed or 0,
        logprobs=params.logprobs,
        min_tokens_until=request.num_prompt + params.min_tokens if banned else 0,
        stop_ids=tuple(sorted(request.stop_ids)) if banned else (),
    )
