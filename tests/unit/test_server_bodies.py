"""What a request may say: what is passed on, refused, ignored, and how it is told."""

from typing import Any

import msgspec
import pytest

from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server import bodies
from vllm_lite.server.bodies import ChatBody, CompletionBody, GenerateBody, GenerateParams, Sampling
from vllm_lite.server.errors import ApiError, error_body


def completion(**fields: Any) -> tuple[CompletionBody, list[str]]:
    return bodies.read(msgspec.json.encode({"prompt": "x", **fields}), CompletionBody)


def test_every_sampling_field_can_be_passed_on_and_none_is_refused() -> None:
    assert set(Sampling.__struct_fields__) <= set(SamplingParams.__struct_fields__)
    for kind in (CompletionBody, ChatBody, GenerateParams):
        assert not bodies.REFUSED.keys() & set(kind.__struct_fields__)


def test_unknown_fields_are_ignored_and_named() -> None:
    body, ignored = completion(user="me", store=True, brand_new=[1])
    assert (body.user, ignored) == ("me", ["brand_new", "store"])


@pytest.mark.parametrize(
    ("name", "value"), [("tools", [{}]), ("suffix", "x"), ("chat_template", "x"), ("guided_json", {"a": 1})]
)
def test_what_would_change_the_answer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("name", sorted(bodies.REFUSED))
def test_what_changes_nothing_is_not(name: str) -> None:
    for value in (None, *bodies.REFUSED[name]):
        assert completion(**{name: value})[1] == []


def test_a_body_has_only_so_many_fields() -> None:
    most = {f"field_{number}": 1 for number in range(255)}
    assert len(completion(**most)[1]) == 255
    for data in (
        {"prompt": "x", **most, "one_more": 1},
        {"token_ids": [1], "sampling_params": {**most, "a": 1, "b": 1}},
    ):
        with pytest.raises(ApiError, match="object` of length <= 256"):
            bodies.read(msgspec.json.encode(data), GenerateBody if "token_ids" in data else CompletionBody)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [{}]}, "prompt"),
        ({"request_id": "mine\n"}, "request_id"),
        ({"request_id": "mi/ne"}, "request_id"),
    ],
)
def test_a_wrong_type_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_what_a_body_says_wins_over_the_models_defaults() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    params = bodies.sampling(completion(temperature=0.1)[0], defaults, {"logprobs": 2})
    assert (params.temperature, params.top_k, params.logprobs, params.max_tokens) == (0.1, 20, 2, 16)


def test_a_null_is_what_was_not_said() -> None:
    body = completion(**dict.fromkeys(Sampling.__struct_fields__))[0]
    assert bodies.sampling(body, {}, {}) == SamplingParams()


def test_a_negative_seed_is_a_seed() -> None:
    params = [bodies.sampling(completion(seed=seed)[0], {}, {}) for seed in (-1, -2)]
    assert params[0].seed != params[1].seed
    assert all(isinstance(param.seed, int) and param.seed >= 0 for param in params)


@pytest.mark.parametrize(("name", "value"), [("n", 0), ("n", 1000), ("top_p", 0.0), ("stop", ""), ("min_tokens", 99)])
def test_a_value_out_of_range_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        bodies.sampling(completion(**{name: value})[0], {}, {})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("n must be an integer", "n"),
        ("the prompt's 5 tokens and max_tokens=7 are too many", "max_tokens"),
        ("the prompt is empty; stop", "prompt"),
    ],
)
def test_the_field_that_a_message_is_about(message: str, field: str) -> None:
    assert bodies.field_of(message, "prompt") == field


def test_names_of_ignored_fields_cannot_forge_headers() -> None:
    header = bodies.warning(["a\r\nSet-Cookie: x", "ü" * 1000, *map(str, range(100))])["Warning"]
    assert header.isascii()
    assert header.isprintable()
    assert len(header) < 2000
    assert bodies.warning([]) == {}


def test_messages_are_bounded() -> None:
    with pytest.raises(ApiError) as caught:
        bodies.read(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}] * 5000}), ChatBody)
    assert caught.value.param == "messages"


def test_the_shape_of_an_error() -> None:
    assert msgspec.json.decode(error_body(429, "no", "n")) == {
        "error": {"message": "no", "type": "RateLimitError", "param": "n", "code": 429}
    }
