"""Stats, the message of an engine's counts and measurements, and what it consists of."""

from bisect import bisect_left
from typing import Literal

import msgspec

from vllm_lite.protocol.transfers import TierUsage

FinishReason = Literal["stop", "length", "abort", "error"]
RestartCause = Literal["died", "failed", "unreachable", "silent", "stuck", "engine"]
"""What happened to a worker before its group was replaced; "engine": the engine itself was."""


class Counts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Not frozen: the engine counts in the very struct that it sends."""


class Histogram(Counts):
    """`counts[i]` values were at most `bounds[i]`, and more than the bound before; the last count is of all above."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> "Histogram":
        """An empty histogram. `bounds` ascend."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class DraftCounts(Counts):
    """The drafts of one method: how many times some were made, how many `tokens`, and how many of these were right.
    `accepted_at[i]` of the `accepted` were draft i of the method in their sequence's step."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    accepted_at: list[int] = msgspec.field(default_factory=list)

    def count(self, num_drafted: int, num_right: int) -> None:
        """A sequence had so many drafts in a step."""
        self.drafts += 1
        self.tokens += num_drafted
        self.accepted += num_right
        self.accepted_at += [0] * (num_right - len(self.accepted_at))
        for place in range(num_right):
            self.accepted_at[place] += 1


def bounds(text: str) -> tuple[float, ...]:
    """The bounds of a histogram, from numbers with spaces between them."""
    return tuple(map(float, text.split()))


class RequestHistograms(Counts):
    """Measured on requests that have ended, and on steps. A request is one, however many samples it has.

    `first_token_s` runs from the arrival, `token_gap_s` is the time between two tokens of a sample, `mean_token_s` a
    request's mean of it. `longest_output` counts the tokens of its longest sample, `computed_prompt_tokens` those of
    its prompt that were in no cache. `whole_s` is a request from arrival to end: `queue_s` until it was first
    scheduled, then `inference_s`, which is `prefill_s` until its first token and `decode_s` from there. `step_tokens`
    are those that each step computed, `gained_tokens` those that it generated, with the prompts of requests that got
    their first.
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
    """Measured on a sample of the device's KV blocks, with --kv-cache-metrics.

    `lifetime_s` runs from a block's allocation to its eviction, `idle_before_evict_s` from its last use to its
    eviction, `reuse_gap_s` from one use to the next.
    """

    lifetime_s: Histogram
    idle_before_evict_s: Histogram
    reuse_gap_s: Histogram


class Stats(Counts, tag="stats"):
    """The engine's gauges and counters; counters run from its start. Blocks exclude the null block.

    `cached_tokens` of the `prompt_tokens` were in the cache, `host_hits` of them on the host only. Of `cache_queries`
    tokens looked up on the device, `host_queries` were not there and looked up on the host. `ended_by` counts requests
    by the reason for which their last sample ended. `blocks` is None unless the engine follows some of its blocks.
    `life` counts the engines at this address, `generation` the worker groups of this one. `recovering` says why a group
    is being replaced, and is empty while one serves. `lost_s` is the time without workers, of all `restarts` together;
    by these `recovered_requests` went on, `poisoned_requests` were ended because they had killed workers. State slots
    are those of recurrent layers: sequences hold some, others have states that can be found. `state_missing_tokens` had
    their KV in the cache, but no state that they could be gone on from. `expert_tokens` has for each layer how many
    tokens each of its experts got, up to half a second ago; None unless that is counted. `is_paused` as by
    PauseGeneration; `sleep_level` as by Sleep, None if awake; `model` is the folder whose weights are served, or will
    be after the sleep. `running_adapters` and `waiting_adapters` are the names of the LoRA adapters of such requests.
    `num_deferred` of those that wait do not wait for room: for their adapter, for workers, for the end of a pause, or
    for others that are tried first. `drafts_by` has the drafts of each method, and `forced` ones of grammars.
    `num_stored_keys` blocks and states can be found on disk; `num_writing_blocks` are on their way there, and so many
    chains were not (`dropped_writes`). `loaded_tokens` came from there; of blocks and states `failed_loads` could not.
    `disk` has what its workers count. `loaded_media` had their vectors from there, `encoded_media` from a tower.
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
        """Whether nothing is computed because somebody wants that."""
        return self.is_paused or self.sleep_level is not None
