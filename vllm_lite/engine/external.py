"""ExternalRequests: requests by the id under which users know them, so that any client can ask for any of them."""

from vllm_lite.engine.request import Request
from vllm_lite.protocol.api import EndedRequest


class ExternalRequests:
    """Finds requests by external id. Several may share one: the prompts of one HTTP body do.

    One that has ended is remembered as long as another one with its id is live.
    """

    def __init__(self) -> None:
        self._live: dict[str, dict[str, Request]] = {}
        self._ended: dict[str, list[EndedRequest]] = {}

    def add(self, request: Request) -> None:
        if request.external_id:
            self._live.setdefault(request.external_id, {})[request.request_id] = request

    def end(self, request: Request) -> None:
        """`request` has ended, and its tokens are counted."""
        name = request.external_id
        live = self._live.get(name, {})
        if live.pop(request.request_id, None) is None:
            return
        if live:
            num_output = request.num_generated + request.num_inherited
            ended = EndedRequest(request.context, request.num_prompt, num_output, request.params.priority)
            self._ended.setdefault(name, []).append(ended)
        else:
            del self._live[name]
            self._ended.pop(name, None)

    def live(self, external_id: str) -> list[Request]:
        return list(self._live.get(external_id, {}).values())

    def ended(self, external_id: str) -> list[EndedRequest]:
        return self._ended.get(external_id, [])
