"""Where one sequence becomes several: samples of one prompt, forks of a live request, beams. All share blocks.

Works on the scheduler's queues; kept apart so that a plain request never meets it.
"""

from array import array
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from vllm_lite.engine.beam import Beam
from vllm_lite.engine.plan import Produced
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import FinishReason, TokenLogprobs
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import Entry, Fork, SetToken

if TYPE_CHECKING:
    from vllm_lite.engine.scheduler import Scheduler


MAX_BEAM_EXCESS = 2
"""Beams share most of what they have, so a search may take this many times the pool if they shared nothing but the
prompt. Beyond that it would live on preemption: every token of one beam would compute the others again."""


def check_beams(scheduler: "Scheduler", request: Request) -> None:
    """Raise RequestError, with the numbers, if the beams of `request` can hardly be there at the same time."""
    if request.beam is None:
        return
    width, kv, options = request.beam.width, scheduler.kv, scheduler.options
    if width > options.max_num_seqs:
        raise RequestError(f"beam search over {width} beams, but max_num_seqs is {options.max_num_seqs}")
    shared = request.num_prompt // kv.block_size * len(kv.groups)
    each = kv.num_blocks(request.max_len, options.max_num_batched_tokens)
    required = each + (width - 1) * max(0, each - shared)
    room = kv.pool.num_usable - kv.watermark_blocks
    if kv.groups and required > MAX_BEAM_EXCESS * room:
        raise RequestError(
            f"beam search over {width} beams of up to {request.max_len} tokens, {request.num_prompt} of them shared, "
            f"takes up to {required} KV blocks, but {room} can be had ({kv.pool.num_usable} of {kv.block_size} tokens, "
            f"{kv.watermark_blocks} kept free); ask for fewer beams or a smaller max_tokens"
        )


def fork_samples(scheduler: "Scheduler", first: Sequence, entries: list[Entry]) -> list[Sequence]:
    """The step whose `entries` these are completes the prompt of `first`: its other samples come into being, and share
    its blocks. Returns them; some may have to wait for a seat."""
    request = first.request
    born = []
    unforked, request.unforked = request.unforked, []
    for index in unforked:
        child = Sequence(request, index, first.tokens[: request.num_prompt])
        request.sequences.append(child)
        born.append(child)
        spawn(scheduler, first, child, entries)
    return born


def end_samples(
    scheduler: "Scheduler", request: Request, samples: Seq[int], reason: FinishReason
) -> list[tuple[int, int]]:
    """End those of `samples` that are open, and with the last one the request; none means all. Returns those that have
    ended, with the number of output tokens of each. Beams end together only."""
    still_open = request.open_samples()
    ended = [item for item in still_open if not samples or item[0] in samples]
    if len(ended) == len(still_open):
        scheduler.abort(request.request_id, reason)
        return ended
    if request.beam is not None:
        return []
    request.unforked = [index for index in request.unforked if index not in samples]
    prompt = request.sequences[0].tokens[: request.num_prompt]
    for sequence in [sequence for sequence in request.sequences if sequence.index in samples]:
        scheduler.leave_queue(sequence)
        scheduler.finish(sequence)
        request.sequences.remove(sequence)
    if not request.sequences:  # it was to compute the prompt for those to come: the next one does, and finds its blocks
        heir = Sequence(request, request.unforked.pop(0), prompt)
        request.sequences.append(heir)
        scheduler.kv.register(heir, request.extra_keys)
        scheduler.wait(heir)
    return ended


def fork_request(scheduler: "Scheduler", request: Request, child: Request) -> None:
    """Add `child`, whose tokens are a beginning of `request`'s; it shares its blocks if it can."""
    parent, sequence = request.sequences[0], child.sequences[0]
    child.num_cached_at_start = request.num_prompt
    scheduler.enter(child)
    spawn(scheduler, parent, sequence, scheduler.changes)
    if sequence.status is Status.RUNNING:
        child.admitted_s = child.queued_s


def spawn(scheduler: "Scheduler", parent: Sequence, child: Sequence, entries: list[Entry]) -> None:
    """Start `child` behind the blocks of `parent`; without a seat, or a parent on the device, it waits like a new one
    and finds what is cached."""
    seat = len(scheduler.running) < scheduler.options.max_num_seqs
    if not seat or parent.status is not Status.RUNNING or not scheduler.kv.can_fork(parent, child):
        scheduler.kv.register(child)
        child.hash_root = parent.hash_root
        scheduler.wait(child)
        return
    scheduler.introduce(child)
    scheduler.kv.fork(parent, child)
    child.status = Status.RUNNING
    scheduler.running.append(child)
    sampling = wire_sampling(child)
    entries.append(Fork(parent.handle, child.handle, sampling, child.num_tokens, child.num_computed, child.num_cached))


def advance_beams(
    scheduler: "Scheduler", sequence: Sequence, token: int, logprobs: list[TokenLogprobs | None] | None
) -> list[Produced]:
    """A beam has its candidates. Once all beams of the request have, the search goes on; until then they wait."""
    request = sequence.request
    search = request.beam
    candidates = logprobs[0].top if logprobs and logprobs[0] is not None else ((token, 0.0),)
    if search is None:
        raise RuntimeError(f"{sequence} is no beam")
    request.candidates[sequence.index] = candidates
    if len(request.candidates) < len(request.sequences):
        return []  # num_pending stays, so that it is not scheduled
    parents = request.sequences
    beams = [
        Beam(beam.tokens[beam.num_prompt :].tolist(), request.beam_logprobs[beam.index], request.candidates[beam.index])
        for beam in parents
    ]
    request.candidates = {}
    continuations = search.advance(beams)
    if continuations is None:
        return _finish_search(scheduler, request)
    _go_on(scheduler, request, [(parents[parent], token_id, score) for parent, token_id, score in continuations])
    return []


def _go_on(scheduler: "Scheduler", request: Request, chosen: list[tuple[Sequence, int, float]]) -> None:
    """Make the request's sequences the chosen continuations: a parent's first one keeps its place, others fork."""
    parents, kept = request.sequences, dict[int, tuple[Sequence, int, float]]()
    forks = []
    for parent, token, logprob in chosen:
        if id(parent) in kept:
            forks.append((parent, token, logprob))
        else:
            kept[id(parent)] = (parent, token, logprob)
    for parent in parents:
        if id(parent) not in kept:
            scheduler.leave_queue(parent)
            scheduler.finish(parent)
    free = sorted(set(range(len(chosen))) - {parent.index for parent, _, _ in kept.values()})
    scores, children = {}, []
    for (parent, token, logprob), index in zip(forks, free, strict=False):
        child = Sequence(request, index, array("I", [*parent.tokens, token]))
        parent.num_pending = 0
        children.append(child)
        scores[index] = logprob
        spawn(scheduler, parent, child, scheduler.changes)
        if child.seen_by_workers:
            scheduler.changes.append(SetToken(child.handle, token))
    for parent, token, logprob in kept.values():
        parent.num_pending = 0
        parent.tokens.append(token)
        parent.num_tokens += 1
        scores[parent.index] = logprob
        scheduler.changes.append(SetToken(parent.handle, token))
    request.sequences = [parent for parent, _, _ in kept.values()] + children
    request.beam_logprobs = scores


def _finish_search(scheduler: "Scheduler", request: Request) -> list[Produced]:
    search = request.beam
    if search is None:
        raise RuntimeError(f"{request} has no search")
    best = search.hypotheses
    scheduler.counters.generated_tokens += sum(len(hypothesis.token_ids) for hypothesis in best)
    scheduler.abort(request.request_id, "stop" if best and best[0].stopped else "length")
    return [
        Produced(request, index, 0, one.token_ids, None, "stop" if one.stopped else "length", None, one.logprob)
        for index, one in enumerate(best)
    ]


def wire_sampling(sequence: Sequence) -> Sampling:
    """What workers need to know to sample `sequence`."""
    request = sequence.request
    num_candidates = None if request.beam is None else request.beam.num_candidates
    return request.params.for_worker(
        sequence.index, sequence.num_prompt, sequence.stop_ids, num_candidates, unscored=sequence.unscored
    )
