"""ExternalRequests: live and ended requests by the id that users know, so that any client can find any of them.

It also keeps contexts of ended requests, and logprobs with which a fork by another client begins. Both are bounded,
whatever clients send.
"""

from collections.abc import Sequence

from vllm_lite.engine.request import Request
from vllm_lite.protocol.api import EndedRequest, TokenLogprobs

MAX_ENDED = 1 << 16
"""Ended requests that are kept for all external ids together. With the HTTP server's contexts about 20 MB."""
MAX_ENDED_BYTES = 64 * 1024 * 1024
"""Total size of the contexts of ended requests."""
MAX_LOGPROBS = 1 << 20
"""Candidates kept for all live requests together: about 120 MB here, and 16 MB in a message."""


class ExternalRequests:
    """Finds requests by external id. Several may share one, such as the prompts of one HTTP body.

    A request that has ended is remembered as long as another one with its external id is live.
    """

    def __init__(self) -> None:
        self._live: dict[str, dict[str, Request]] = {}
        self._ended: dict[str, list[EndedRequest]] = {}
        self._num_ended = self._num_ended_bytes = self.num_logprobs = 0

    def add(self, request: Request) -> None:
        inherited, request.logprobs = request.logprobs, []
        if request.external_id:
            self._live.setdefault(request.external_id, {})[request.request_id] = request
            self.keep_logprobs(request, inherited)

    def keep_logprobs(self, request: Request, entries: Sequence[TokenLogprobs]) -> None:
        """Keep the logprobs of a request's new tokens. Above MAX_LOGPROBS all logprobs of this request are dropped."""
        is_live = self._live.get(request.external_id, {}).get(request.request_id) is request
        if not is_live or request.num_samples > 1:
            return
        request.logprobs += entries
        self.num_logprobs += _num_candidates(entries)
        if self.num_logprobs > MAX_LOGPROBS:
            self._forget_logprobs(request)

    def end(self, request: Request, *, is_replaced: bool = False) -> None:
        """Record the end of `request`, whose output tokens are counted by now. With `is_replaced` a new request with
        its id is added next: then neither this end is remembered nor any other forgotten."""
        name = request.external_id
        live = self._live.get(name, {})
        if live.pop(request.request_id, None) is None:
            return
        self._forget_logprobs(request)
        if is_replaced:
            return
        if not live:
            del self._live[name]
            for ended in self._ended.pop(name, ()):
                self._count(ended, -1)
        elif self._has_room(request.context):
            num_output = request.num_generated + request.num_inherited
            ended = EndedRequest(request.context, request.num_prompt, num_output, request.params.priority)
            self._ended.setdefault(name, []).append(ended)
            self._count(ended, 1)

    def is_live(self, external_id: str) -> bool:
        return external_id in self._live

    def live(self, external_id: str) -> list[Request]:
        return list(self._live.get(external_id, {}).values())

    def ended(self, external_id: str) -> list[EndedRequest]:
        return self._ended.get(external_id, [])

    def _has_room(self, context: bytes) -> bool:
        return self._num_ended < MAX_ENDED and self._num_ended_bytes + len(context) <= MAX_ENDED_BYTES

    def _count(self, ended: EndedRequest, times: int) -> None:
        self._num_ended += times
        self._num_ended_bytes += times * len(ended.context)

    def _forget_logprobs(self, request: Request) -> None:
        self.num_logprobs -= _num_candidates(request.logprobs)
        request.logprobs = []


def _num_candidates(entries: Sequence[TokenLogprobs]) -> int:
    return sum(len(entry.top) + 1 for entry in entries)
