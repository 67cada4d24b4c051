"""Mapping of Dynamo's requests to SamplingParams, and of the engine's outputs to Dynamo's chunks.

A request is a dict of plain values that Dynamo's frontend makes from an HTTP body: tokenized, without stop strings,
which the frontend handles. A chunk is a dict, too, whose tokens the frontend detokenizes. Nothing here imports Dynamo.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_lite.client.outputs import CompletionOutput, Logprob, RequestOutput
from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import MAX_SEED, RequestOutputKind, SamplingParams
from vllm_lite.protocol.stats import FinishReason

SAMPLING = (
    *("n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "use_beam_search", "length_penalty"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "bad_words_token_ids"),
)
"""Sampling options with the names and meanings of SamplingParams. Of the others, `guided_decoding` is read below;
`include_stop_str_in_output` and `detokenize` concern the frontend."""
STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
"""All of them end the output; the frontend decides which are shown."""
FORMS = ("json", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern")
ELSEWHERE = {
    "prefill_result": "prefill and decode run in one worker here",
    "bootstrap_info": "prefill and decode run in one worker here",
    "multi_modal_data": "the model reads text",
    "encoder_result": "the model reads text",
}
"""Parts of a request that are refused, with the reason, as they would otherwise be ignored."""
FINISH_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "abort": "cancelled", "error": "error"}

Request = Mapping[str, Any]
Chunk = dict[str, Any]


def sampling_params(request: Request, defaults: Mapping[str, Any]) -> SamplingParams:
    """The params of a request; `defaults` are the model's, for fields that the request does not set. Without max_tokens
    the output may fill the context. Raises RequestError."""
    for name, why in ELSEWHERE.items():
        if request.get(name):
            raise RequestError(f"{name} cannot be served: {why}")
    sampling, stopping = _given(request, "sampling_options"), _given(request, "stop_conditions")
    shown, routing = _given(request, "output_options"), _given(request, "routing")
    fields: dict[str, Any] = {"max_tokens": None, **defaults}
    fields |= {name: value for name, value in sampling.items() if name in SAMPLING}
    fields |= {name: value for name, value in stopping.items() if name in STOPPING}
    fields["stop_token_ids"] = tuple(dict.fromkeys(token for name in STOP_IDS for token in stopping.get(name, ())))
    fields["thinking_token_budget"] = stopping.get("max_thinking_tokens")
    if form := {name: value for name, value in _given(sampling, "guided_decoding").items() if name in FORMS}:
        fields["structured_outputs"] = form
    fields |= {name: shown.get(name) for name in ("logprobs", "prompt_logprobs")}
    fields |= {"cache_salt": routing.get("cache_salt"), "priority": -routing.get("priority", 0)}  # high is urgent there
    if fields.get("n", 1) > 1:
        raise RequestError(f"n must be 1, got {fields['n']}: Dynamo's frontend ends a stream with its first choice")
    if isinstance(seed := fields.get("seed"), int):
        fields["seed"] = seed % (MAX_SEED + 1)  # OpenAI's seeds are signed
    try:
        return SamplingParams(**fields, detokenize=False, output_kind=RequestOutputKind.DELTA)
    except (ValueError, TypeError) as error:
        raise RequestError(str(error)) from error


def _given(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The entries of a part of a request that are not None."""
    return {key: value for key, value in (part.get(name) or {}).items() if value is not None}


class Chunks:
    """Makes the chunks of one request from its outputs, which are deltas."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def of(self, output: RequestOutput) -> Iterator[Chunk]:
        """One chunk for each sample with new tokens; the last one of the request has the usage."""
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        for place, sample in enumerate(output.outputs, 1):
            chunk = _chunk(sample)
            if output.finished and place == len(output.outputs):
                chunk["completion_usage"] = self._usage(output)
                if self._prompt_logprobs is not None:
                    chunk["engine_data"] = {"prompt_logprobs": list(map(_by_text, self._prompt_logprobs))}
            yield chunk

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        num_prompt = len(output.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
        }


def _chunk(sample: CompletionOutput) -> Chunk:
    chunk: Chunk = {"token_ids": sample.token_ids, "index": sample.index}
    if sample.logprobs is not None:
        pairs = zip(sample.token_ids, sample.logprobs, strict=True)
        chunk["log_probs"] = [candidates[token].logprob for token, candidates in pairs]
        chunk["top_logprobs"] = [list(map(_candidate, found.items())) for found in sample.logprobs]
    if sample.finish_reason is not None:
        chunk["finish_reason"] = FINISH_REASONS[sample.finish_reason]
        if sample.stop_reason is not None:
            chunk["stop_reason"] = sample.stop_reason
    return chunk


def _candidate(pair: tuple[int, Logprob]) -> dict[str, Any]:
    token, found = pair
    return {"rank": found.rank, "token_id": token, "token": found.decoded_token, "logprob": found.logprob}


def _by_text(candidates: dict[int, Logprob] | None) -> dict[str, Any] | None:
    """The candidates for one token of a prompt; ids are strings, as keys of JSON."""
    if candidates is None:
        return None
    return {
        str(token): {"logprob": found.logprob, "rank": found.rank, "decoded_token": found.decoded_token}
        for token, found in candidates.items()
    }
