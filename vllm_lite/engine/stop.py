"""When a sequence ends, as far as tokens can tell. Stop strings are the client's business: it has the text."""

from vllm_lite.engine.request import Request
from vllm_lite.protocol.api import FinishReason
from vllm_lite.protocol.params import SamplingParams


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Every token that ends the sequence."""
    return frozenset(params.stop_token_ids) if params.ignore_eos else eos_token_ids.union(params.stop_token_ids)


def check_stop(request: Request, token: int) -> FinishReason | None:
    """Whether `token`, the last one appended, ends `request`. A stop token wins over the length."""
    if token in request.stop_ids and request.num_output >= request.params.min_tokens:
        return "stop"
    return "length" if request.num_tokens >= request.max_len else None
