"""Describes the state of live requests in the engine's own numbers.

It changes no state: no block is touched and no token hashed, so traces need not record it.
"""

from collections.abc import Iterable
from typing import Any

from vllm_lite.engine.blocks.pool import NULL_BLOCK
from vllm_lite.engine.blocks.swapping import num_held
from vllm_lite.engine.blocks.verdict import Admission, Verdict
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol import api


def describe(
    scheduler: Scheduler, requests: Iterable[Request], now_s: float, *, with_content: bool = False
) -> list[api.RequestState]:
    """Describe live requests. For a single one, `with_content` adds its parameters, tokens and logprobs for a fork."""
    known = [request for request in requests if request.sequences]
    waiting = any(sequence.status is not Status.RUNNING for request in known for sequence in request.sequences)
    queued = [*scheduler.waiting, *scheduler.queues.held] if waiting else []
    places = {id(sequence): place for place, sequence in enumerate(queued)}
    with_content = with_content and len(known) == 1
    return [_state(scheduler, request, places, now_s, with_content) for request in known]


def _content(request: Request) -> api.RequestContent:
    tokens, num_prompt = request.sequences[0].tokens, request.num_prompt
    prompt, output = tokens[:num_prompt].tobytes(), tokens[num_prompt:].tobytes()
    adapter = "" if request.adapter is None else request.adapter.name
    return api.RequestContent(request.params, prompt, output, request.logprobs, adapter)


def _state(
    scheduler: Scheduler, request: Request, places: dict[int, int], now_s: float, with_content: bool
) -> api.RequestState:
    first = next((each for each in request.sequences if each.status is not Status.RUNNING), request.sequences[0])
    return api.RequestState(
        request_id=request.request_id,
        admission=_admission(scheduler, first, places),
        samples=[_sample(sequence, places) for sequence in request.sequences],
        num_unforked=len(request.unforked),
        num_prompt=request.num_prompt,
        num_cached=request.num_cached_at_start or 0,
        num_preemptions=request.num_preemptions,
        priority=request.params.priority,
        age_s=now_s - request.queued_s,
        deadline_in_s=None if request.deadline_s is None else request.deadline_s - now_s,
        num_ended_output=request.num_generated,
        context=request.context,
        content=_content(request) if with_content else None,
    )


def _sample(sequence: Sequence, places: dict[int, int]) -> api.SampleState:
    return api.SampleState(
        index=sequence.index,
        status=sequence.status.value,  # type: ignore[arg-type]  # a live one is not finished
        place=places.get(id(sequence)),
        num_computed=sequence.num_surely_computed,
        num_output=sequence.num_output,
        num_blocks=num_held(sequence),
        num_host_blocks=sum(len(ids) - ids.count(NULL_BLOCK) for ids in sequence.host_ids or ()),
    )


def _admission(scheduler: Scheduler, sequence: Sequence, places: dict[int, int]) -> api.AdmissionState:
    kv = scheduler.kv
    if sequence.status is Status.RUNNING:
        pool = kv.pool
        held = num_held(sequence)
        return api.AdmissionState("OK", None, held, pool.num_free, kv.watermark_blocks, pool.num_usable)
    place = places[id(sequence)]
    found = _found(scheduler, sequence, place)
    required, free, watermark, total = found[1:5]
    name: Any = found.verdict.name
    reason = _reason(scheduler, sequence, found, place)
    return api.AdmissionState(name, reason, required, free, watermark, total)


def waiting_reason(scheduler: Scheduler, sequence: Sequence, place: int) -> str:
    """Reason why a sequence waits, with `place` others before it in the queue."""
    return _reason(scheduler, sequence, _found(scheduler, sequence, place), place)


def _found(scheduler: Scheduler, sequence: Sequence, place: int) -> Admission:
    kv, chunk = scheduler.kv, scheduler.options.max_num_batched_tokens
    if sequence.host_ids is not None:
        return kv.swap_in_admission(sequence, chunk)
    # Only the head of the queue is looked up: a lookup takes milliseconds for a long prompt.
    hit = kv.find_cached(sequence) if not place and kv.is_hashed(sequence) else kv.no_hit()
    return kv.admission(sequence, hit, chunk)


def _reason(scheduler: Scheduler, sequence: Sequence, found: Admission, place: int) -> str:
    """Reason why a sequence waits, tested in the scheduler's order."""
    options, queues = scheduler.options, scheduler.queues
    if scheduler.is_paused or queues.is_newcomer(sequence.request):
        return "waits_for_resume"
    if not scheduler.has_workers:
        return "waits_for_workers"
    if sequence in queues.held:
        return "waits_for_trial"
    if sequence.num_pending:
        return "waits_for_result"
    if place:
        return "waits_for_turn"
    if len(scheduler.running) >= options.max_num_seqs:
        return "waits_for_row"
    if not scheduler.queues.adapters.of_step(scheduler.running).could_take(sequence.request.adapter):
        return "waits_for_adapter"
    if found.verdict is not Verdict.OK:
        return f"waits_for_{found.lacks}"
    if sequence.num_demoting or (sequence.host_ids is not None and num_held(sequence)):
        return "waits_for_swap"
    count = 1 if options.chunked_prefill else sequence.num_tokens
    is_full = scheduler.num_scheduled_tokens + count > scheduler.step_budget
    return "waits_for_budget" if scheduler.in_flight and is_full else "waits_for_step"
