"""Requests and chunks of a worker of Dynamo, as its frontend of version 1.6.1 sends and takes them."""

import sys
from typing import Any

import pytest

from vllm_lite.client.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from vllm_lite.dynamo.__main__ import main
from vllm_lite.dynamo.mapping import Chunks, sampling_params
from vllm_lite.errors import ConfigError, RequestError
from vllm_lite.protocol.params import MAX_SEED, RequestOutputKind, SamplingParams
from vllm_lite.protocol.structured import StructuredOutputsParams

NOTHING = dict.fromkeys(("n", "temperature", "top_p", "top_k", "seed", "guided_decoding", "include_stop_str_in_output"))


def request(**parts: Any) -> dict[str, Any]:
    """A request as Dynamo sends it: with all keys, and None for unset ones."""
    stop = {"max_tokens": None, "min_tokens": None, "ignore_eos": None, "stop": None, "stop_token_ids": None}
    return {
        "model": "demo",
        "token_ids": [5, 6, 7],
        "sampling_options": NOTHING | parts.pop("sampling", {}),
        "stop_conditions": stop | parts.pop("stop", {}),
        "output_options": {"logprobs": None, "prompt_logprobs": None} | parts.pop("shown", {}),
        "routing": {"dp_rank": 0} | parts.pop("routing", {}),
        **parts,
    }


def params(defaults: dict[str, Any] | None = None, **parts: Any) -> SamplingParams:
    return sampling_params(request(**parts), defaults or {})


def test_omitted_params_are_the_models_defaults() -> None:
    assert params() == SamplingParams(max_tokens=None, detokenize=False, output_kind=RequestOutputKind.DELTA)
    found = params({"temperature": 0.6, "top_k": 20, "max_tokens": 50}, sampling={"top_k": 5})
    assert (found.temperature, found.top_k, found.max_tokens) == (0.6, 5, 50)
    assert sampling_params({"token_ids": [1]}, {}) == params()


def test_sampling_options_are_taken_by_their_names() -> None:
    asked = {"temperature": 0.5, "top_p": 0.75, "top_k": 9, "min_p": 0.25, "seed": 3, "presence_penalty": 1.5}
    more = {"frequency_penalty": -0.5, "repetition_penalty": 1.25, "allowed_token_ids": [4, 9]}
    found = params(sampling=asked | more)
    assert {name: getattr(found, name) for name in asked} == asked
    assert (found.frequency_penalty, found.repetition_penalty, found.allowed_token_ids) == (-0.5, 1.25, (4, 9))


def test_a_negative_seed_is_converted_as_by_the_server() -> None:
    assert params(sampling={"seed": -5}).seed == MAX_SEED - 4


def test_all_stop_ids_end_the_output_and_stop_texts_are_the_frontends() -> None:
    ids = {"stop_token_ids": [8, 2], "stop_token_ids_visible": [9], "stop_token_ids_hidden": [2, 1]}
    found = params(stop={**ids, "stop": ["\n"], "max_tokens": 7, "min_tokens": 2, "ignore_eos": True})
    assert (found.stop_token_ids, found.stop) == ((8, 2, 9, 1), ())
    assert (found.max_tokens, found.min_tokens, found.ignore_eos) == (7, 2, True)


def test_forms_logprobs_salt_and_priority() -> None:
    guided = {"json": {"type": "object"}, "backend": "xgrammar", "regex": None, "whitespace_pattern": None}
    found = params(
        sampling={"guided_decoding": guided},
        shown={"logprobs": 0, "prompt_logprobs": 2},
        routing={"cache_salt": "tenant", "priority": 3},
    )
    assert found.structured_outputs == StructuredOutputsParams(json={"type": "object"})
    assert (found.logprobs, found.prompt_logprobs, found.cache_salt, found.priority) == (0, 2, "tenant", -3)
    assert params(stop={"max_thinking_tokens": 4}).thinking_token_budget == 4


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"sampling": {"temperature": -1.0}}, "temperature must be between 0.0 and 100.0, got -1.0"),
        ({"sampling": {"n": 2}}, "n must be 1, got 2"),
        ({"sampling": {"guided_decoding": {"json": "{}", "regex": "a"}}}, "exactly one of"),
        ({"prefill_result": {"x": 1}}, "prefill_result cannot be served"),
        ({"multi_modal_data": {"image_url": ["x"]}}, "the model reads text"),
    ],
)
def test_unsupported_params_are_refused_in_a_sentence(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        params(**parts)


# ---- answers


def output(*samples: CompletionOutput, finished: bool = False, **more: Any) -> RequestOutput:
    fields: dict[str, Any] = {"prompt": None, "prompt_token_ids": [5, 6, 7], "prompt_logprobs": None} | more
    return RequestOutput("r", outputs=list(samples), finished=finished, metrics=RequestMetrics(0.0), **fields)


def test_a_chunk_has_the_new_tokens_and_the_last_one_the_usage() -> None:
    chunks = Chunks()
    assert list(chunks.of(output(CompletionOutput(0, "", [11, 12])))) == [{"token_ids": [11, 12], "index": 0}]
    last = CompletionOutput(0, "", [13], finish_reason="stop", stop_reason=13)
    (found,) = chunks.of(output(last, finished=True, num_cached_tokens=2))
    assert found["finish_reason"] == "stop"
    assert found["stop_reason"] == 13
    assert found["completion_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(("reason", "name"), [("stop", "stop"), ("length", "length"), ("abort", "cancelled")])
def test_finish_reasons(reason: Any, name: str) -> None:
    (found,) = Chunks().of(output(CompletionOutput(0, "", [], finish_reason=reason), finished=True))
    assert found["finish_reason"] == name


def test_logprobs_stand_beside_the_tokens() -> None:
    candidates = {11: Logprob(-0.5, 2, "a"), 4: Logprob(-0.25, 1, "b")}
    (found,) = Chunks().of(output(CompletionOutput(0, "", [11], logprobs=[candidates])))
    assert found["log_probs"] == [-0.5]
    assert found["top_logprobs"] == [
        [
            {"rank": 2, "token_id": 11, "token": "a", "logprob": -0.5},
            {"rank": 1, "token_id": 4, "token": "b", "logprob": -0.25},
        ]
    ]


def test_logprobs_of_the_prompt_come_with_the_end() -> None:
    """Only the first output has them."""
    chunks, scores = Chunks(), [None, {6: Logprob(-1.0, 1, "x")}]
    (first,) = chunks.of(output(CompletionOutput(0, "", [11]), prompt_logprobs=scores))
    (last,) = chunks.of(output(CompletionOutput(0, "", [12], finish_reason="length"), finished=True))
    assert "engine_data" not in first
    found = last["engine_data"]["prompt_logprobs"]
    assert found == [None, {"6": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}]


def test_without_the_package_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)
    with pytest.raises(ConfigError, match=r"vllm-lite\[dynamo\]"):
        main()
