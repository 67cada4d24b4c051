"""Measures how fast prompts are computed, blocks moved and rows decoded. That decides whether preempted KV is swapped
or computed again, how much of a prompt a step may compute while others wait for next tokens, and how much is drafted.

The first rate is learned from the results of the steps. Steps run one after the other, so one that was sent while
another was under way has taken the time since that one's result; those of one message are answered, and timed, as one.
The time that media took of it, as the workers say, is not that of its tokens.
"""

from bisect import bisect_left
from typing import NamedTuple

from vllm_lite.engine.scheduling.in_flight import StepMessage

MIN_PREFILL_TOKENS = 32
"""Messages with fewer prompt tokens do not show the rate at which prompts are computed; and a step has as many where no
number of them keeps to a goal."""
SHARE_BESIDE = 0.5
"""What prompts have of the time that next tokens leave, where workers compute something else in it, too."""
MIN_CHUNK = 4
"""A step that can keep to a goal has as many tokens of prompts at least."""
WEIGHT = 0.2
"""The share of the latest message in the mean."""
MOST_GROWTH = 3.0
"""A step that something else delayed counts for no more than so many times the mean."""
CHANGE = 0.1
"""A smaller relative change of the time of next tokens is not worth a decision of its own."""
LEAST_SHARE = 0.02
"""The least of its time that a step with tokens of prompts owes to them: results may be taken late."""
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
    alone_s: float = 0.0
    """The time of the latest steps of next tokens alone."""
    token_s: float = 0.0
    """The time that each token of a prompt adds to it."""

    def decode_s(self, num_rows: int, most_drafts: int = 0) -> float:
        """The time of a decode step of so many rows, drafts included, of which no sequence has more than so many."""
        drafting_s = self.verify_s + self.draft_s * most_drafts if most_drafts else 0.0
        factor = self.row_factors[factor_place(num_rows, most_drafts)] if self.row_factors else 1.0
        return (self.step_s + self.row_s * num_rows + drafting_s) * factor

    def tokens_within(self, seconds: float, num_decoding: int, most: int, share: float = 1.0) -> int:
        """Number of tokens, at most `most`, that a step computes in `seconds`, next ones of `num_decoding` sequences
        among them: to that a chunk of a prompt is cut, but never to nothing. Of the time that next tokens leave prompts
        have a `share`.

        Each token of a prompt adds to what next tokens take alone, the less the fewer there are. Cut to what it added
        lately, and measured again, chunks come to where the whole step takes `seconds`. Where no step has had next
        tokens alone, chunks are cut to the rate at which prompts are computed, which comes to the same.
        """
        if not self.prefill_tokens_per_s:
            return most
        if self.alone_s:
            spare_s, token_s = share * (seconds - self.alone_s), self.token_s or 1 / self.prefill_tokens_per_s
            count = max(MIN_CHUNK, int(spare_s / token_s)) if spare_s > 0 else MIN_PREFILL_TOKENS
        else:
            count = max(MIN_PREFILL_TOKENS, int(seconds * self.prefill_tokens_per_s) - num_decoding)
        return min(most, num_decoding + count)

    def tokens_beside(self, growth: float, most: int, share: float = 1.0) -> int:
        """Number of tokens of prompts, at most `most`, that make a step longer than next tokens alone by so much of
        its time; few until it is known how long they take."""
        if not self.prefill_tokens_per_s:
            return min(most, MIN_PREFILL_TOKENS)
        return self.tokens_within((1 + growth) * self.alone_s, 0, most, share)

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
    """Keeps moving means over the messages that have been answered."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """The mean rate; it is 0 until a message was measured."""
        self.alone_s = self.token_s = 0.0
        """As in Rates."""
        self.took_s = 0.0
        """The time of the latest message, but for its media."""
        self._ended_s = self._told_s = 0.0

    def rates(self, rates: Rates) -> Rates:
        """`rates` with these numbers."""
        self._told_s = self.alone_s
        return rates._replace(prefill_tokens_per_s=self.tokens_per_s, alone_s=self.alone_s, token_s=self.token_s)

    def measure(self, message: StepMessage, now_s: float) -> bool:
        """Learn from a message, the oldest in flight, whose last step has its result now. True if what is known of
        prompts has changed, or much of what is known of next tokens."""
        self.took_s = took_s = now_s - max(message.sent_s, self._ended_s) - message.media_s
        self._ended_s = now_s
        if took_s <= 0:
            return False
        if message.is_plain:
            self.alone_s = _mean(self.alone_s, took_s / message.num_steps)
        if message.num_prefill_tokens and self.alone_s:
            if took_s < message.num_steps * self.alone_s:  # next tokens alone would not have taken longer
                self.alone_s = _mean(self.alone_s, took_s / message.num_steps)
            added_s = max(took_s - message.num_steps * self.alone_s, LEAST_SHARE * took_s)
            self.token_s = _mean(self.token_s, added_s / message.num_prefill_tokens)
        if message.num_prefill_tokens >= MIN_PREFILL_TOKENS:
            token_s = took_s / message.num_tokens
            # The mean is of times, not of rates: a result taken late makes the next step look arbitrarily fast.
            mean_s = WEIGHT * token_s + (1 - WEIGHT) / self.tokens_per_s if self.tokens_per_s else token_s
            self.tokens_per_s = 1 / mean_s
        return message.num_prefill_tokens > 0 or abs(self.alone_s - self._told_s) > CHANGE * self._told_s


def _mean(mean_s: float, latest_s: float) -> float:
    """A mean with its latest value; 0: there was none."""
    return mean_s + WEIGHT * (min(latest_s, MOST_GROWTH * mean_s) - mean_s) if mean_s else latest_s
