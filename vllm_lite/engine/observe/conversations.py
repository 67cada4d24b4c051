"""Conversations: groups prompts that continue earlier ones, and counts their cached tokens.

A prompt continues another if it begins with all full blocks of it. The block hashes show that at once, since each
covers all tokens before it. Nothing is hashed for this, and no decision depends on it. The tokens of the latest prompts
are kept, to explain misses of later ones.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.view import MAX_CONVERSATIONS, ConversationRow

MAX_KNOWN = 512
"""Maximum conversations kept; the least recently active one is dropped first."""
MAX_REMEMBERED, MAX_TOKENS = 64, 1 << 20
"""Maximum conversations whose tokens are kept, and maximum tokens of all of these: 4 MiB. One is always kept."""


@dataclass(slots=True)
class RecentConversation:
    """A conversation. Of its latest prompt `tokens` has the ids, also those of the output, which are added as long as
    the request lives; None: not kept, or the prompt has media."""

    number: int
    request_id: str = ""
    external_id: str = ""
    seen_s: float = 0.0
    num_requests: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    tokens: "array[int] | None" = None
    latest_prompt: int = 0
    """Number of prompt tokens in `tokens`."""
    extra_keys: tuple[str, ...] = ()
    num_resets: int = 0
    """Number of the pool's resets when the latest request was admitted."""


class Conversations:
    """The conversations of the latest prompts."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._by_end: OrderedDict[bytes, RecentConversation] = OrderedDict()
        """Hash of the last full block of the latest prompt -> conversation, the latest at the end."""
        self._num_begun = 0

    def admitted(self, sequence: Sequence, num_cached: int, block_size: int, now_s: float) -> None:
        """Record an admitted request with `num_cached` cached prompt tokens. A prompt without a full block, which can
        never be cached, is ignored."""
        request = sequence.request
        hashes = sequence.block_hashes[: request.num_prompt // block_size]
        if not hashes:
            return
        known = self._by_end
        found = next((known.pop(digest) for digest in reversed(hashes) if digest in known), None)
        if found is None:
            self._num_begun += 1
            found = RecentConversation(self._num_begun)
        found.request_id, found.external_id, found.seen_s = request.request_id, request.external_id, now_s
        found.num_requests += 1
        found.num_prompt += request.num_prompt
        found.num_cached += num_cached
        found.tokens = None if request.media else sequence.tokens
        found.latest_prompt, found.extra_keys = request.num_prompt, request.extra_keys
        found.num_resets = self.pool.num_resets
        known[hashes[-1]] = found
        if len(known) > MAX_KNOWN:
            known.popitem(last=False)
        self._forget_tokens()

    def remembered(self) -> Iterator[RecentConversation]:
        """The conversations whose tokens are kept, the latest first. Those behind the first one without were dropped,
        except where prompts have media."""
        return (each for each in reversed(self._by_end.values()) if each.tokens is not None)

    def _forget_tokens(self) -> None:
        """Drop the tokens of the oldest conversations beyond the limits."""
        room = MAX_TOKENS
        for place, each in enumerate(islice(reversed(self._by_end.values()), MAX_REMEMBERED + 1)):
            if each.tokens is not None:
                room -= len(each.tokens)
                if place and (room < 0 or place == MAX_REMEMBERED):
                    each.tokens = None

    def rows(self, now_s: float) -> list[ConversationRow]:
        """The latest conversations, for a view."""
        return [
            ConversationRow(
                number=each.number,
                request_id=each.request_id,
                external_id=each.external_id,
                num_requests=each.num_requests,
                num_prompt=each.num_prompt,
                num_cached=each.num_cached,
                age_s=now_s - each.seen_s,
            )
            for each in islice(reversed(self._by_end.values()), MAX_CONVERSATIONS)
        ]
