"""Streams of requests that another API server started, restored from the engine's state of them."""

import msgspec

from vllm_lite.client.streams.stream import RequestStream, StreamFactory
from vllm_lite.protocol.api import EndedRequest, RequestState, Tokens
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.server.openai.errors import ApiError


def restored(factory: StreamFactory, state: RequestState | EndedRequest, *, for_fork: bool) -> RequestStream | None:
    """Return the stream with its tokens so far, to continue it or, `for_fork`, to fork it; None if it has ended.

    A stream for forks is not ended by a stop string in its tokens, as an inherited stop string does not count. Raises
    ApiError if its logprobs are not known.
    """
    if not isinstance(state, RequestState) or state.content is None:
        return None
    name, content = state.request_id, state.content
    output, scored = unpack_tokens(content.output), content.logprobs
    if content.params.logprobs is not None and content.params.n == 1 and len(scored) < len(output):
        raise ApiError(409, f"request {name!r} has more logprobs than are kept for other API servers")
    params = content.params
    if for_fork:
        params = msgspec.structs.replace(params, stop=())
    elif state.deadline_in_s is not None:  # relative to now
        params = msgspec.structs.replace(params, deadline_ms=max(1, int(state.deadline_in_s * 1000)))
    stream = factory.make(unpack_tokens(content.prompt), params, name)
    stream.adapter = content.adapter
    stream.apply(Tokens(name, 0, output, scored or None))
    return stream
