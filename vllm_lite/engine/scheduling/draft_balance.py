"""The balance of drafts: the time that they have saved lately, by the clock, whatever was expected of them.

Times, odds and shares are estimates, and those that chance makes look good are the ones that are acted on. So each
step with drafts is compared with the time that its tokens take without, and what it saves is added to a balance, or
what it loses subtracted. Without credit nothing is drafted but probes, until a small share of the time has refilled it.
"""

from vllm_lite.engine.scheduling.rates import Rates, factor_place

FIRST_STEPS = 2.0
"""Credit at the start, in steps without drafts: what drafts may lose before they have ever gained."""
MOST_STEPS = 3.0
"""Maximum credit, and debt: neither gains nor losses of long ago decide."""
RESUME_STEPS = 1.0
"""Credit with which drafts begin again after they had none."""
SHARE = 0.004
"""Share of the time that is added to the credit: what drafts may lose in the long run."""
WEIGHT = 0.2
"""Weight of the latest step in the mean time of those without drafts."""
MOST_LOSS = 1.0
"""Maximum loss that a step counts for, in steps without drafts: something else may have delayed it."""


class DraftBalance:
    """Adds up, in steps without drafts, the time that steps with drafts save."""

    def __init__(self) -> None:
        self.is_spent = False
        """Whether drafts have lost their credit and not got it back."""
        self._credit = FIRST_STEPS
        self._plain_s: dict[int, float] = {}
        """Moving mean of the time of steps without drafts, by `factor_place`."""

    def rates(self, rates: Rates) -> Rates:
        """`rates` with what is decided here."""
        return rates._replace(only_probes=self.is_spent)

    def measure(self, num_seqs: int, num_tokens: int, took_s: float, *, is_drafting: bool) -> bool:
        """Learn from a step that took `took_s` and gave `num_seqs` sequences `num_tokens` tokens. Returns whether
        `is_spent` has changed."""
        if num_seqs == 0 or took_s <= 0:
            return False
        place = factor_place(num_seqs, 0)
        plain_s = self._plain_s.get(place, 0.0 if is_drafting else took_s)
        if plain_s <= 0:
            return False
        took, saved = min(took_s / plain_s, MOST_STEPS), 0.0
        if is_drafting:
            saved = max(num_tokens / num_seqs - took, -MOST_LOSS)
        else:
            self._plain_s[place] = plain_s * (1 + WEIGHT * (took - 1))
        self._credit = max(min(self._credit + SHARE * took + saved, MOST_STEPS), -MOST_STEPS)
        was_spent, least = self.is_spent, RESUME_STEPS if self.is_spent else 0.0
        self.is_spent = self._credit < least
        return self.is_spent != was_spent
