"""Measures how fast prompts are computed, blocks moved and rows decoded. That decides whether preempted KV is swapped
or computed again, how much of a prompt a step may compute while others wait for next tokens, and how much is drafted.

The first rate is learned from the results of the steps. Steps run one after the other, so one that was sent while
another was under way has taken the time since that one's result; those of one message are answered, and timed, as one.
"""

from bisect import bisect_left
from typing import NamedTuple

from vllm_lite.engine.scheduling.in_flight import StepMessage

MIN_PREFILL_TOKENS = 32
"""Messages with fewer prompt tokens do not show the rate at which prompts are computed."""
WEIGHT = 0.2
"""The share of the latest message in the mean."""
ROWS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128
"""The most rows of the steps that share a factor; those with more share the last one."""


class Rates(NamedTuple):
    """The measured rates; each is 0 until it is known."""

    prefill_tokens_per_s: float = 0.0
    swap_blocks_per_s: float = 0.0
    step_s: float = 0.0
    """The time of a decode step of no rows, as step_cost.py has it."""
    row_s: float = 0.0
    """The time that each row adds to it."""
    load_blocks_per_s: float = 0.0
    """Blocks, or states, that are loaded from a tier that is not memory."""
    verify_s: float = 0.0
    """The time that drafts add to it, however many there are."""
    draft_s: float = 0.0
    """The time that it takes to draft a token of all sequences."""
    row_factors: tuple[float, ...] = ()
    """What steps have taken, as a multiple of what the other numbers say: by `factor_place`; empty: not known."""

    def decode_s(self, num_rows: int, most_drafts: int = 0) -> float:
        """The time of a decode step of so many rows, drafts included, of which no sequence has more than so many."""
        drafting_s = self.verify_s + self.draft_s * most_drafts if most_drafts else 0.0
        factor = self.row_factors[factor_place(num_rows, most_drafts)] if self.row_factors else 1.0
        return (self.step_s + self.row_s * num_rows + drafting_s) * factor

    def tokens_within(self, seconds: float, least: int, most: int) -> int:
        """Number of tokens that a step computes in `seconds`, to which a chunk of a prompt is cut: `least` to `most`.

        A step takes a time of its own and one for each token, so that the rate falls with the chunks. Cut to the rate,
        and measured again, they come to where the whole step takes `seconds`.
        """
        if not self.prefill_tokens_per_s:
            return most
        return min(most, max(least, int(seconds * self.prefill_tokens_per_s)))

    def prefer_swap(self, num_tokens: int, num_blocks: int, num_stored: int = 0) -> bool:
        """Whether moving the blocks out and in costs less than computing the tokens again, or loading the first
        `num_stored` of them from the disk, where that takes less time."""
        if not self.prefill_tokens_per_s or not self.swap_blocks_per_s:
            return False
        again_s = num_tokens / self.prefill_tokens_per_s
        if num_stored and self.load_blocks_per_s:
            load_s = num_blocks * num_stored / num_tokens / self.load_blocks_per_s
            again_s -= max(0.0, num_stored / self.prefill_tokens_per_s - load_s)
        return 2 * num_blocks / self.swap_blocks_per_s < again_s


def factor_place(num_rows: int, most_drafts: int) -> int:
    """Index of a step's factor: those of steps with drafts stand behind those of the others."""
    return min(bisect_left(ROWS, num_rows), len(ROWS) - 1) + (len(ROWS) if most_drafts else 0)


class PrefillRate:
    """Keeps a moving mean of the rate over the messages that have been answered."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """The mean rate; it is 0 until a message was measured."""
        self.took_s = 0.0
        """The time of the latest message."""
        self._ended_s = 0.0

    def measure(self, message: StepMessage, now_s: float) -> bool:
        """Learn from a message, the oldest in flight, whose last step has its result now. True if the rate changed."""
        self.took_s = took_s = now_s - max(message.sent_s, self._ended_s)
        self._ended_s = now_s
        if message.num_prefill_tokens < MIN_PREFILL_TOKENS or took_s <= 0:
            return False
        token_s = took_s / message.num_tokens
        # The mean is of times, not of rates: a result that was taken late makes the next step look arbitrarily fast.
        mean_s = WEIGHT * token_s + (1 - WEIGHT) / self.tokens_per_s if self.tokens_per_s else token_s
        self.tokens_per_s = 1 / mean_s
        return True
