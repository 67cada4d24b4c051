"""How fast prompts are computed: what it costs to give KV up, against moving it to the host and back.

Learned from the results of the steps as they come. Steps run one after the other, so one that was sent while another
was under way has taken the time since that one's result; steps that travel in one message are answered together, and
are timed together.
"""

from collections import deque

from vllm_lite.protocol.step import Continue, NewRequest, Resume, SchedulerOutput

MIN_PREFILL_TOKENS = 32
"""Messages with fewer tokens of prompts say nothing of the rate at which prompts are computed."""
WEIGHT = 0.2
"""The share of the latest message in the mean."""


class _Message:
    """Steps that travel together."""

    __slots__ = ("num_left", "num_prefill_tokens", "num_tokens", "sent_s")

    def __init__(self) -> None:
        self.num_left = self.num_tokens = self.num_prefill_tokens = 0
        self.sent_s = 0.0


class PrefillRate:
    """It is told of every step that is scheduled, of every message sent, and of every result."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0 until something was measured."""
        self._making = _Message()
        self._sent: deque[_Message] = deque()
        self._ended_s = 0.0

    def scheduled(self, plan: SchedulerOutput, num_tokens: int, *, only_decodes: bool) -> None:
        """The next message carries this step, too."""
        message = self._making
        message.num_left += 1
        message.num_tokens += num_tokens
        if not only_decodes:
            message.num_prefill_tokens += num_prefill_tokens(plan)

    def sent(self, now_s: float) -> None:
        """The message is on its way."""
        self._making.sent_s = now_s
        self._sent.append(self._making)
        self._making = _Message()

    def ended(self, now_s: float) -> bool:
        """The oldest step has ended. True if that changed the rate."""
        message = self._sent[0]
        message.num_left -= 1
        if message.num_left:
            return False
        self._sent.popleft()
        took_s = now_s - max(message.sent_s, self._ended_s)
        self._ended_s = now_s
        if message.num_prefill_tokens < MIN_PREFILL_TOKENS or took_s <= 0:
            return False
        token_s = took_s / message.num_tokens
        # The mean is of times, not of rates: a result that was taken late makes the next step look arbitrarily fast.
        mean_s = WEIGHT * token_s + (1 - WEIGHT) / self.tokens_per_s if self.tokens_per_s else token_s
        self.tokens_per_s = 1 / mean_s
        return True


def num_prefill_tokens(plan: SchedulerOutput) -> int:
    """The tokens of a step that are not the one next token of a sequence, nor drafts at those behind it."""
    return sum(
        entry.num_tokens
        for entry in plan.entries
        if isinstance(entry, NewRequest | Resume) or (isinstance(entry, Continue) and entry.num_tokens > 1)
    )
