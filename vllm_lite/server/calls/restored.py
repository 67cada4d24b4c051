"""The stream of a request that another API server started, from what the engine knows of it."""

import msgspec

from vllm_lite.client.streams.stream import RequestStream, StreamFactory
from vllm_lite.protocol.api import EndedRequest, RequestState, Tokens
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.server.openai.errors import ApiError


def restored(factory: StreamFactory, state: RequestState | EndedRequest, *, for_fork: bool) -> RequestStream | None:
    """The stream as far as it has come, to go on with it itself or `for_fork`s; None if it has ended.

    For forks it has not met a stop string, as one that it has inherited would not count. Raises ApiError if its
    logprobs are not known.
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
    elif state.deadline_in_s is not None:  # counts from now
        params = msgspec.structs.replace(params, deadline_ms=max(1, int(state.deadline_in_s * 1000)))
    stream = factory.make(unpack_tokens(content.prompt), params, name)
    stream.adapter = content.adapter
    stream.apply(Tokens(name, 0, output, scored or None))
    return stream
