"""The stream of a request that another API server started, from what the engine knows of it."""

import msgspec

from vllm_lite.client.stream import RequestStream, StreamFactory
from vllm_lite.protocol.api import EndedRequest, RequestState, Tokens
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.server.openai.errors import ApiError


def restored(factory: StreamFactory, state: RequestState | EndedRequest, *, keep_stop: bool) -> RequestStream | None:
    """The stream as far as it has come; None if it has ended. Without `keep_stop` it has not met a stop string: a fork
    may have inherited one, which does not count. Raises ApiError if its logprobs are not known."""
    if not isinstance(state, RequestState) or state.content is None:
        return None
    name, content = state.request_id, state.content
    output, scored = unpack_tokens(content.output), content.logprobs
    if content.params.logprobs is not None and content.params.n == 1 and len(scored) < len(output):
        raise ApiError(409, f"request {name!r} has more logprobs than are kept for other API servers")
    params = content.params if keep_stop else msgspec.structs.replace(content.params, stop=())
    stream = factory.make(unpack_tokens(content.prompt), params, name)
    stream.apply(Tokens(name, 0, output, scored or None))
    return stream
