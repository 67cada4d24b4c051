"""When a sequence ends, as far as tokens can tell. Stop strings are the client's business: it has the text."""

from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.api import FinishReason
from vllm_lite.protocol.params import SamplingParams


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Every token that ends the sequence."""
    return frozenset(params.stop_token_ids) if params.ignore_eos else eos_token_ids.union(params.stop_token_ids)


def check_stop(sequence: Sequence, token: int) -> FinishReason | None:
    """Whether `token`, the last one appended, ends `sequence`. A stop token wins over the length."""
    if token in sequence.stop_ids and sequence.num_output >= sequence.request.params.min_tokens:
        return "stop"
    return "length" if sequence.num_tokens >= sequence.max_len else None
