"""Measures how fast prompts are computed and blocks are moved: that decides whether preempted KV is swapped or computed
again, and how much of a prompt a step may compute while others wait for their next tokens.

The first rate is learned from the results of the steps. Steps run one after the other, so one that was sent while
another was under way has taken the time since that one's result; those of one message are answered, and timed, as one.
"""

from typing import NamedTuple

from vllm_lite.engine.scheduling.in_flight import StepMessage

MIN_PREFILL_TOKENS = 32
"""Messages with fewer prompt tokens do not show the rate at which prompts are computed."""
WEIGHT = 0.2
"""The share of the latest message in the mean."""


class Rates(NamedTuple):
    """The measured rates; each is 0 until it is known."""

    prefill_tokens_per_s: float = 0.0
    swap_blocks_per_s: float = 0.0

    def tokens_within(self, seconds: float, least: int, most: int) -> int:
        """How many tokens a step computes in `seconds`, which a chunk of a prompt is cut to: `least` to `most`.

        A step takes a time of its own and one for each token, so that the rate falls with the chunks. Cut to the rate,
        and measured again, they come to where the whole step takes `seconds`.
        """
        if not self.prefill_tokens_per_s:
            return most
        return min(most, max(least, int(seconds * self.prefill_tokens_per_s)))

    def prefer_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving the blocks out and in costs less than computing the tokens again."""
        if not self.prefill_tokens_per_s or not self.swap_blocks_per_s:
            return False
        return 2 * num_blocks / self.swap_blocks_per_s < num_tokens / self.prefill_tokens_per_s


class PrefillRate:
    """Keeps a moving mean of the rate over the messages that have been answered."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """The mean rate; it is 0 until a message was measured."""
        self._ended_s = 0.0

    def measure(self, message: StepMessage, now_s: float) -> bool:
        """Learn from a message, the oldest in flight, whose last step has its result now. True if the rate changed."""
        took_s = now_s - max(message.sent_s, self._ended_s)
        self._ended_s = now_s
        if message.num_prefill_tokens < MIN_PREFILL_TOKENS or took_s <= 0:
            return False
        token_s = took_s / message.num_tokens
        # The mean is of times, not of rates: a result that was taken late makes the next step look arbitrarily fast.
        mean_s = WEIGHT * token_s + (1 - WEIGHT) / self.tokens_per_s if self.tokens_per_s else token_s
        self.tokens_per_s = 1 / mean_s
        return True
