"""Rates of prefill, block moves and decoding. The scheduler uses them to choose between swapping and recomputing, to
size prompt chunks beside sequences that decode, and to choose the number of drafts.

The prefill rate is learned from step results. Steps run one after the other, so a step that was sent while another ran
took the time since that one's result; the steps of one message are answered, and timed, together. Time that the workers
report for media and recordings does not count.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from vllm_lite.engine.scheduling.in_flight import StepMessage
from vllm_lite.protocol.control import STEP_ROWS

MIN_PREFILL_TOKENS = 32
"""Minimum prompt tokens of a message from which the prefill rate is learned; also the prompt tokens of a step where
decoding alone already takes the allowed time."""
SHARE_BESIDE = 0.5
"""Prompts' share of the time that decoding leaves, where the workers compute media in that time, too."""
MIN_CHUNK = 4
"""Minimum prompt tokens of a step whose allowed time is longer than that of decoding alone."""
WEIGHT = 0.2
"""Weight of the latest message in the moving means."""
MOST_GROWTH = 3.0
"""Limit of a new value, as a multiple of the mean: something else may have delayed the step."""
CHANGE = 0.1
"""Relative change of the decode time below which the scheduler gets no new rates."""
PLACES = tuple(bisect_left(STEP_ROWS, num_rows) for num_rows in range(STEP_ROWS[-1]))
"""Place of each number of rows below the last bound of STEP_ROWS: looked up often."""
LEAST_SHARE = 0.02
"""Minimum share of a step's time that counts as its prompt tokens': a late result hides their true share."""


class Rates(NamedTuple):
    """Measured rates; each is 0 until it is known. step_cost.py has the formula of a decode step's time."""

    prefill_tokens_per_s: float = 0.0
    swap_blocks_per_s: float = 0.0
    step_s: float = 0.0
    """Constant part of a decode step's time."""
    row_s: float = 0.0
    """Time that each row adds to a decode step."""
    load_blocks_per_s: float = 0.0
    """Rate at which blocks, or states, are loaded from the disk tier."""
    verify_s: float = 0.0
    """Time that drafts add to a decode step, whatever their number."""
    draft_s: float = 0.0
    """Time to draft one token for all sequences."""
    row_factors: tuple[float, ...] = ()
    """Measured time of decode steps as a multiple of the formula's, indexed by factor_place(); empty: not known."""
    alone_s: float = 0.0
    """Moving mean of the time of steps that only decode."""
    token_s: float = 0.0
    """Time that each prompt token adds to a step that decodes."""
    known_rows: int = 0
    """Most rows of a served step with drafts: times of more are known from steps of one sequence at best."""

    def decode_s(self, num_rows: int, most_drafts: int = 0) -> float:
        """Time of a decode step of `num_rows` rows, drafts included, with at most `most_drafts` per sequence."""
        drafting_s = self.verify_s + self.draft_s * most_drafts if most_drafts else 0.0
        factor = self.row_factors[factor_place(num_rows, most_drafts)] if self.row_factors else 1.0
        return (self.step_s + self.row_s * num_rows + drafting_s) * factor

    def next_rows(self) -> int:
        """Most rows of a step with drafts that has not many more than those that were served."""
        return STEP_ROWS[min(bisect_right(STEP_ROWS, self.known_rows), len(STEP_ROWS) - 1)]

    def tokens_within(self, seconds: float, num_decoding: int, most: int, share: float = 1.0) -> int:
        """Number of tokens, at most `most`, that a step can compute in `seconds`: one of each of `num_decoding`
        sequences, and prompt tokens, which get `share` of the time that decoding leaves and are never none.

        The time per prompt token depends on their number. Chunks are sized by its latest measurement and measured
        again, so that they converge to steps of `seconds`. Until a step has only decoded, the prefill rate is used
        instead.
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
        """Number of prompt tokens, at most `most`, that lengthen a decode step by the share `growth` of its time; few
        until the prefill rate is known."""
        if not self.prefill_tokens_per_s:
            return min(most, MIN_PREFILL_TOKENS)
        return self.tokens_within((1 + growth) * self.alone_s, 0, most, share)

    def prefer_swap(self, num_tokens: int, num_blocks: int, num_stored: int = 0) -> bool:
        """Whether swapping `num_blocks` out and in takes less time than computing `num_tokens` again, or loading the
        first `num_stored` of them from disk where that is faster."""
        if not self.prefill_tokens_per_s or not self.swap_blocks_per_s:
            return False
        again_s = num_tokens / self.prefill_tokens_per_s
        if num_stored and self.load_blocks_per_s:
            load_s = num_blocks * num_stored / num_tokens / self.load_blocks_per_s
            again_s -= max(0.0, num_stored / self.prefill_tokens_per_s - load_s)
        return 2 * num_blocks / self.swap_blocks_per_s < again_s


def factor_place(num_rows: int, most_drafts: int) -> int:
    """Index of a step's factor in `row_factors`: the second half of the list is for steps with drafts."""
    place = PLACES[num_rows] if num_rows < len(PLACES) else len(STEP_ROWS) - 1
    return place + (len(STEP_ROWS) if most_drafts else 0)


class PrefillRate:
    """Keeps moving means of the times of answered messages."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """Mean prefill rate; 0 until a message was measured."""
        self.alone_s = self.token_s = 0.0
        """As in Rates."""
        self.took_s = 0.0
        """Time of the latest message, without that of its media and recordings."""
        self._ended_s = self._told_s = 0.0

    def rates(self, rates: Rates) -> Rates:
        """`rates` with the numbers learned here."""
        self._told_s = self.alone_s
        return rates._replace(prefill_tokens_per_s=self.tokens_per_s, alone_s=self.alone_s, token_s=self.token_s)

    def measure(self, message: StepMessage, now_s: float) -> bool:
        """Learn from the oldest message in flight, whose last step has its result now. Returns whether the scheduler
        should get new rates: the message had prompt tokens, or the decode time changed by more than CHANGE."""
        self.took_s = took_s = now_s - max(message.sent_s, self._ended_s) - message.other_s
        self._ended_s = now_s
        if took_s <= 0:
            return False
        if message.is_plain:
            self.alone_s = _mean(self.alone_s, took_s / message.num_steps)
        if message.num_prefill_tokens and self.alone_s:
            if took_s < message.num_steps * self.alone_s:  # steps that only decode cannot take longer than this one
                self.alone_s = _mean(self.alone_s, took_s / message.num_steps)
            added_s = max(took_s - message.num_steps * self.alone_s, LEAST_SHARE * took_s)
            self.token_s = _mean(self.token_s, added_s / message.num_prefill_tokens)
        if message.num_prefill_tokens >= MIN_PREFILL_TOKENS:
            token_s = took_s / message.num_tokens
            # Times are averaged, not rates: after a result that was read late the next step looks arbitrarily fast.
            mean_s = WEIGHT * token_s + (1 - WEIGHT) / self.tokens_per_s if self.tokens_per_s else token_s
            self.tokens_per_s = 1 / mean_s
        return message.num_prefill_tokens > 0 or abs(self.alone_s - self._told_s) > CHANGE * self._told_s


def _mean(mean_s: float, latest_s: float) -> float:
    """The moving mean after `latest_s`; a `mean_s` of 0 means that there was no value yet."""
    return mean_s + WEIGHT * (min(latest_s, MOST_GROWTH * mean_s) - mean_s) if mean_s else latest_s
