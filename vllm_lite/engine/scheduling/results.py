"""Results: applies the tokens, scores and errors of a step's ModelOutput to its sequences."""

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.request import Produced
from vllm_lite.engine.scheduling.branching import Branching
from vllm_lite.engine.scheduling.drafts import DraftLengths
from vllm_lite.engine.scheduling.in_flight import StepInFlight
from vllm_lite.engine.scheduling.queues import Queues
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.stats import FinishReason
from vllm_lite.protocol.step import NOT_FINITE, ModelOutput


class Results:
    """Appends sampled tokens, and ends sequences and requests that are complete or failed."""

    def __init__(self, queues: Queues, kv: KVCacheManager, branching: Branching, lengths: DraftLengths) -> None:
        self._queues = queues
        self._kv = kv
        self._branching = branching
        self._lengths = lengths
        self._counters = kv.counters
        self._block_size = kv.block_size

    def apply(self, step: StepInFlight, result: ModelOutput) -> list[Produced]:
        """Apply the result of `step`. Raises ProtocolError if `result` is of another step."""
        queues = self._queues
        tokens = step.tokens_of(result)
        for sequence, count in step.drafted:
            sequence.roll_back_drafts(count)
            sequence.drafts_hold = False  # learn() sets it again if all of its drafts were right
        self._lengths.learn_share(sum(count for _, count in step.drafted), sum(result.drafted or ()))
        if result.drafted is not None:
            counts = result.counts or [1] * len(step.sampling)
            for each in zip(step.sampling, result.drafted, counts, strict=False):
                self._lengths.learn(*each)
        produced = queues.handles.scores(result) if result.prompts else []
        num_running, num_entries = len(queues.running), len(queues.entries)
        silent: list[Sequence] = []  # sequences whose tokens go to no stream
        pooled = dict(result.pooled or ())
        for sequence, new, logprobs, error in step.results_of(result, tokens):
            if sequence.status is Status.FINISHED:  # ended while the step ran
                silent.append(sequence)
            elif error is not None:
                silent.append(sequence)
                produced.append(self._fail(sequence, error))
            elif sequence.request.beam is not None:
                silent.append(sequence)
                produced += self._branching.advance_beams(sequence, new[0], logprobs)
            elif not new:
                silent.append(sequence)
                if sequence.request.pooling is not None:
                    produced.append(self._end_pooled(sequence, pooled.get(sequence.handle, b"")))
                else:
                    self._withhold(sequence)
            else:
                start = sequence.num_tokens - sequence.num_prompt
                reason = self._accept(sequence, new)
                kept = [item for item in logprobs[: len(new)] if item is not None] if logprobs is not None else None
                produced.append(Produced(sequence.request, sequence.index, start, new, kept or None, reason))
                if reason is not None:
                    self._end(sequence, reason)
        queues.meter.stepped(step.sampling, silent, result)
        if len(queues.entries) != num_entries or len(queues.running) != num_running:
            queues.running = [sequence for sequence in queues.running if sequence.status is Status.RUNNING]
        return produced

    def _accept(self, sequence: Sequence, tokens: list[int]) -> FinishReason | None:
        """Append the tokens that a step sampled for `sequence`. If one of them ends it, delete those after it from
        `tokens` and return the reason. Called once per sequence and step."""
        sequence.num_pending -= 1
        sequence.grammar_is_ready = True
        num_before = num_tokens = sequence.num_tokens
        reason: FinishReason | None = None
        for token in tokens:
            sequence.tokens.append(token)
            sequence.num_tokens = num_tokens = num_tokens + 1
            if token in sequence.stop_ids or num_tokens >= sequence.max_len:
                reason = sequence.finish_reason(token)
                if reason is not None:
                    sequence.discard_sampled(len(tokens) - (num_tokens - num_before))
                    del tokens[num_tokens - num_before :]
                    break
        count = num_tokens - num_before
        if (count > 1 or (num_tokens - 1) % self._block_size == 0) and sequence.status is Status.RUNNING:
            sequence.num_computed += count - 1  # accepted drafts were computed in the same step
            self._kv.cache_blocks(sequence, num_tokens - 1)
        self._counters.generated_tokens += count
        return reason

    def _end_pooled(self, sequence: Sequence, pooled: bytes) -> Produced:
        """End a pooling request, whose prompt is computed, with its vector."""
        sequence.num_pending -= 1
        self._end(sequence, "stop")
        return Produced(sequence.request, sequence.index, 0, [], reason="stop", pooled=pooled)

    def _withhold(self, sequence: Sequence) -> None:
        """Handle a step that returned no token, because the grammar of `sequence` is still being compiled."""
        if sequence.status is Status.SWAPPED:  # maybe without blocks that its last position reads
            self._kv.release(sequence)
            sequence.status = Status.PREEMPTED
        sequence.withhold_token()

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a complete sample. It may be waiting, if it was preempted while its last token was computed."""
        if sequence.status is not Status.RUNNING:  # apply() removes the running ones from their queue together
            self._queues.leave(sequence)
        self._queues.finish(sequence)
        request = sequence.request
        request.sequences.remove(sequence)
        if not request.sequences and not request.unforked:
            self._queues.close(request, reason)

    def _fail(self, sequence: Sequence, error: str) -> Produced:
        """End the whole request. If the model's logits were not finite, its cached blocks are dropped as well."""
        request, is_corrupted = sequence.request, error == NOT_FINITE
        sample, start = (0, 0) if request.beam is not None else (sequence.index, sequence.num_output)
        self._queues.end(request, "error", forget=is_corrupted)
        self._counters.corrupted_requests += is_corrupted
        return Produced(request, sample, start, [], reason="error", error=error)
