"""Branching: forks one sequence into several that share its blocks: samples of one prompt, forks of a request, beams.

Requests with a single sample never call it.
"""

from array import array
from collections import abc

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.scheduling.beam import Beam
from vllm_lite.engine.scheduling.queues import Queues
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import TokenLogprobs
from vllm_lite.protocol.stats import FinishReason
from vllm_lite.protocol.step import Entry, Fork, SetToken

MAX_BEAM_EXCESS = 2
"""A beam search is accepted if its beams need at most this many times the pool when they share only the prompt; most
share more. A larger one would preempt its own beams continually, and compute them again for every token."""


class Branching:
    """Starts and ends the sequences of requests that have several."""

    def __init__(self, queues: Queues, kv: KVCacheManager) -> None:
        self._queues = queues
        self._kv = kv

    def check_beams(self, request: Request) -> None:
        """Raise RequestError, with the numbers, if the rows or blocks for all beams of `request` are too few."""
        if request.beam is None:
            return
        width, kv, options = request.beam.width, self._kv, self._queues.options
        if width > options.max_num_seqs:
            raise RequestError(f"beam search over {width} beams, but max_num_seqs is {options.max_num_seqs}")
        shared = kv.num_full_blocks(request.num_prompt)
        each = kv.num_blocks(request.max_len, options.max_num_batched_tokens)
        required = each + (width - 1) * max(0, each - shared)
        room = kv.pool.num_usable - kv.watermark_blocks
        if required > MAX_BEAM_EXCESS * room:
            raise RequestError(
                f"beam search over {width} beams of up to {request.max_len} tokens, {request.num_prompt} of them "
                f"shared, takes up to {required} KV blocks, but {room} can be had ({kv.pool.num_usable} of "
                f"{kv.block_size} tokens, {kv.watermark_blocks} kept free); ask for fewer beams or a smaller max_tokens"
            )

    # ---- samples of one prompt

    def fork_samples(self, first: Sequence, entries: list[Entry], num_scheduled: int) -> list[Sequence]:
        """Fork the other samples of a request from `first`, whose prompt the step being scheduled completes with
        `num_scheduled` tokens. Returns the new sequences; some may have to wait for a row of the batch."""
        request = first.request
        children = []
        unforked, request.unforked = request.unforked, []
        for index in unforked:
            child = Sequence(request, index, first.tokens[: request.num_prompt])
            request.sequences.append(child)
            children.append(child)
            self._fork(first, child, entries, num_scheduled)
        return children

    def end_samples(self, request: Request, samples: abc.Sequence[int], reason: FinishReason) -> list[tuple[int, int]]:
        """End the open ones of `samples` (empty: all), and with the last open sample the request. Returns (sample
        index, number of output tokens) of each that ended. The beams of a request only end together."""
        still_open = request.open_samples()
        ended = [item for item in still_open if not samples or item[0] in samples]
        if len(ended) == len(still_open):
            self._queues.end(request, reason)
            return ended
        if request.beam is not None:
            return []
        request.unforked = [index for index in request.unforked if index not in samples]
        prompt = request.sequences[0].tokens[: request.num_prompt]
        for sequence in [sequence for sequence in request.sequences if sequence.index in samples]:
            self._queues.leave(sequence)
            self._queues.finish(sequence)
            request.sequences.remove(sequence)
        if not request.sequences:  # the next sample computes the prompt instead, from its cached blocks
            first = Sequence(request, request.unforked.pop(0), prompt)
            request.sequences.append(first)
            self._kv.register(first, request.extra_keys)
            self._queues.wait(first)
        return ended

    # ---- forks

    def fork_request(self, request: Request, child: Request) -> None:
        """Add `child`, whose tokens are a prefix of `request`'s; it shares their blocks if possible."""
        parent, sequence = request.sequences[0], child.sequences[0]
        child.num_cached_at_start = request.num_prompt
        self._queues.enter(child)
        self._fork(parent, sequence, self._queues.entries)
        if sequence.status is Status.RUNNING:
            child.admitted_s = child.queued_s

    def _fork(self, parent: Sequence, child: Sequence, entries: list[Entry], num_scheduled: int = 0) -> None:
        """Run `child` on the blocks of `parent`, of which the step being scheduled computes `num_scheduled` tokens.
        Without a free row, or if the parent does not run, the child waits instead and uses the prefix cache."""
        queues, kv = self._queues, self._kv
        if (
            not queues.has_row_for(child)
            or parent.status is not Status.RUNNING
            or not kv.can_fork(parent, child, num_scheduled)
        ):
            kv.register_fork(parent, child)
            queues.wait(child)
            return
        queues.introduce(child)
        entries += kv.fork(parent, child, num_scheduled)
        queues.run(child)
        positions = child.num_tokens, child.num_computed, child.num_cached
        entries.append(Fork(parent.handle, child.handle, child.sampling(), *positions))

    # ---- beams

    def advance_beams(
        self, sequence: Sequence, token: int, logprobs: list[TokenLogprobs | None] | None
    ) -> list[Produced]:
        """Store the candidates of a beam. Once all beams of the request have theirs, advance the search; until then the
        beams wait."""
        request = sequence.request
        search = request.beam
        if search is None:
            raise RuntimeError(f"{sequence} is not a beam")
        candidates = logprobs[0].top if logprobs and logprobs[0] is not None else ((token, 0.0),)
        request.candidates[sequence.index] = candidates
        if len(request.candidates) < len(request.sequences):
            return []  # num_pending stays, so that the beam is not scheduled
        parents = request.sequences
        logprobs_of, candidates_of = request.beam_logprobs, request.candidates
        continuations = search.advance(
            [
                Beam(each.tokens[each.num_prompt :].tolist(), logprobs_of[each.index], candidates_of[each.index])
                for each in parents
            ]
        )
        request.candidates = {}
        if continuations is not None:
            self._continue(request, [(parents[parent], token_id, score) for parent, token_id, score in continuations])
            return []
        best = search.hypotheses
        self._kv.counters.generated_tokens += sum(len(hypothesis.token_ids) for hypothesis in best)
        self._queues.end(request, "stop" if best and best[0].stopped else "length")
        return [
            Produced(request, index, 0, one.token_ids, None, "stop" if one.stopped else "length", None, one.logprob)
            for index, one in enumerate(best)
        ]

    def _continue(self, request: Request, chosen: list[tuple[Sequence, int, float]]) -> None:
        """Replace the request's sequences by the `chosen` continuations (parent, token, logprob): a parent's first one
        continues its sequence, the others fork from it."""
        queues = self._queues
        kept: dict[Sequence, tuple[int, float]] = {}
        forks = []
        for parent, token, logprob in chosen:
            if parent in kept:
                forks.append((parent, token, logprob))
            else:
                kept[parent] = token, logprob
        for parent in request.sequences:
            if parent not in kept:
                queues.leave(parent)
                queues.finish(parent)
        free = sorted(set(range(len(chosen))) - {parent.index for parent in kept})
        scores, children = {}, []
        for (parent, token, logprob), index in zip(forks, free, strict=False):
            child = Sequence(request, index, array("I", [*parent.tokens, token]))
            parent.num_pending = 0
            children.append(child)
            scores[index] = logprob
            self._fork(parent, child, queues.entries)
            if child.seen_by_workers:
                queues.entries.append(SetToken(child.handle, token))
        for parent, (token, logprob) in kept.items():
            parent.num_pending = 0
            parent.tokens.append(token)
            parent.num_tokens += 1
            scores[parent.index] = logprob
            queues.entries.append(SetToken(parent.handle, token))
        request.sequences = [*kept, *children]
        request.beam_logprobs = scores
