"""Counts and measurements of an engine, as parts of the message Stats."""

from bisect import bisect_left

import msgspec


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
