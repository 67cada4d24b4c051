"""Conversations: groups prompts that continue earlier ones, and counts their cached tokens.

A prompt continues another if it begins with all full blocks of it. The block hashes show that at once, since each
covers all tokens before it. Nothing is hashed for this, and no decision depends on it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.view import MAX_CONVERSATIONS, ConversationRow

MAX_KNOWN = 512
"""Maximum conversations kept; the least recently active one is dropped first."""


@dataclass(slots=True)
class _Conversation:
    number: int
    request_id: str = ""
    external_id: str = ""
    seen_s: float = 0.0
    num_requests: int = 0
    num_prompt: int = 0
    num_cached: int = 0


class Conversations:
    """The conversations of the latest prompts."""

    def __init__(self) -> None:
        self._by_end: OrderedDict[bytes, _Conversation] = OrderedDict()
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
            found = _Conversation(self._num_begun)
        found.request_id, found.external_id, found.seen_s = request.request_id, request.external_id, now_s
        found.num_requests += 1
        found.num_prompt += request.num_prompt
        found.num_cached += num_cached
        known[hashes[-1]] = found
        if len(known) > MAX_KNOWN:
            known.popitem(last=False)

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
