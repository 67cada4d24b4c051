"""Stats, the message with an engine's counters and measurements, and its parts."""

from bisect import bisect_left
from typing import Literal

import msgspec

from vllm_lite.protocol.transfers import TierUsage

FinishReason = Literal["stop", "length", "abort", "error"]
RestartCause = Literal["died", "failed", "unreachable", "silent", "stuck", "engine"]
"""Failure of a worker after which its group was replaced; "engine": the engine itself was replaced."""


class Counts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base class of counters; not frozen, since the engine counts in the struct that it sends."""


class Histogram(Counts):
    """`counts[i]` values were at most `bounds[i]` and above the previous bound; the last count is of larger values."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> "Histogram":
        """An empty histogram with these ascending bounds."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class DraftCounts(Counts):
    """Draft counts of one method: `drafts`: times that a sequence had drafts in a step; `tokens`: drafted tokens;
    `accepted`: accepted ones; `accepted_at[i]`: accepted ones at index i of the method's drafts in a step."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    accepted_at: list[int] = msgspec.field(default_factory=list)

    def count(self, num_drafted: int, num_right: int) -> None:
        """Count the drafts of one sequence in one step."""
        self.drafts += 1
        self.tokens += num_drafted
        self.accepted += num_right
        self.accepted_at += [0] * (num_right - len(self.accepted_at))
        for place in range(num_right):
            self.accepted_at[place] += 1


def bounds(text: str) -> tuple[float, ...]:
    """Parse the bounds of a histogram, separated by spaces."""
    return tuple(map(float, text.split()))


class RequestHistograms(Counts):
    """Measurements of ended requests, and of steps. A request counts once, whatever its number of samples.

    `first_token_s` is measured from the arrival; `token_gap_s` is the time between two tokens of a sample,
    `mean_token_s` a request's mean of it. `longest_output`: tokens of the longest sample. `computed_prompt_tokens`:
    prompt tokens that were not cached. `whole_s` is the time from arrival to end: `queue_s` until a request was first
    scheduled, then `inference_s`, which is `prefill_s` until its first token and `decode_s` after it. `step_tokens`:
    tokens that a step computed. `gained_tokens`: tokens that a step generated, plus the prompt tokens of requests that
    got their first token.
    """

    first_token_s: Histogram
    token_gap_s: Histogram
    mean_token_s: Histogram
    whole_s: Histogram
    queue_s: Histogram
    prefill_s: Histogram
    decode_s: Histogram
    inference_s: Histogram
    prompt_tokens: Histogram
    output_tokens: Histogram
    max_tokens: Histogram
    samples: Histogram
    longest_output: Histogram
    preemptions: Histogram
    computed_prompt_tokens: Histogram
    step_tokens: Histogram
    gained_tokens: Histogram


class BlockHistograms(Counts):
    """Measurements of a sample of the device's KV blocks, with --kv-cache-metrics.

    `lifetime_s`: time from a block's allocation to its eviction; `idle_before_evict_s`: from its last use to its
    eviction; `reuse_gap_s`: from one use to the next.
    """

    lifetime_s: Histogram
    idle_before_evict_s: Histogram
    reuse_gap_s: Histogram


class Stats(Counts, tag="stats"):
    """The engine's gauges and counters; counters start with the engine. Blocks exclude the null block.

    Of the `prompt_tokens`, `cached_tokens` were cached, `host_hits` of them only on the host. Of the `cache_queries`
    tokens looked up on the device, `host_queries` were not there and were looked up on the host. `ended_by` counts
    requests by the finish reason of their last sample. `blocks` is None unless the engine follows some blocks. `life`
    is the number of this engine at its address, `generation` that of its worker group. `recovering` is the reason why
    workers are being replaced, empty while they serve. `lost_s` is the total time without workers in all `restarts`,
    after which `recovered_requests` continued; `poisoned_requests` were ended because they had killed workers. State
    slots are those of recurrent layers: sequences hold some, others have saved states. `state_missing_tokens` had
    cached KV, but no saved state to continue from. `expert_tokens` has the tokens per layer and expert, at most half a
    second old; None unless counted. `is_paused` is set by PauseGeneration, `sleep_level` by Sleep (None: awake).
    `model` is the folder of the served weights, or of those after the sleep. `running_adapters` and `waiting_adapters`
    are names of LoRA adapters. `num_deferred` of the waiting samples lack something else than room: their adapter,
    workers, the end of a pause, or the end of a trial of others. `drafts_by` has draft counts by method, and `forced`
    ones of grammars. `num_stored_keys` blocks and states are on disk, `num_writing_blocks` are being written, and
    `dropped_writes` chains were not written. `loaded_tokens` were loaded from disk; `failed_loads` blocks and states
    could not be. `disk` has the workers' counts. The vectors of `loaded_media` media were loaded from disk, those of
    `encoded_media` computed.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    peak_used_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    cache_queries: int = 0
    host_queries: int = 0
    host_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    rejected_requests: int = 0
    corrupted_requests: int = 0
    malformed_messages: int = 0
    ended_by: dict[FinishReason, int] = msgspec.field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
    requests: RequestHistograms | None = None
    blocks: BlockHistograms | None = None
    life: int = 1
    generation: int = 1
    recovering: str = ""
    restarts: dict[RestartCause, int] = msgspec.field(default_factory=dict)
    recovered_requests: int = 0
    poisoned_requests: int = 0
    lost_s: float = 0.0
    num_state_slots: int = 0
    num_used_state_slots: int = 0
    num_cached_states: int = 0
    saved_states: int = 0
    evicted_states: int = 0
    state_missing_tokens: int = 0
    num_host_states: int = 0
    num_used_host_states: int = 0
    demoted_states: int = 0
    promoted_states: int = 0
    expert_tokens: list[list[int]] | None = None
    is_paused: bool = False
    sleep_level: int | None = None
    model: str = ""
    running_adapters: list[str] = msgspec.field(default_factory=list)
    waiting_adapters: list[str] = msgspec.field(default_factory=list)
    num_deferred: int = 0
    drafts_by: dict[str, DraftCounts] = msgspec.field(default_factory=dict)
    num_stored_keys: int = 0
    num_writing_blocks: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    dropped_writes: int = 0
    disk: TierUsage | None = None
    encoded_media: int = 0
    loaded_media: int = 0

    @property
    def rests(self) -> bool:
        """Whether the engine is paused or asleep."""
        return self.is_paused or self.sleep_level is not None
