"""Fields of a request: passed on, refused or ignored, and the sentences that say so."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import TypeAdapter, ValidationError

from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.openai import bodies
from vllm_lite.server.openai.bodies import (
    ChatBody,
    CompletionBody,
    ForkBody,
    GenerateBody,
    GenerateParams,
    SamplingFields,
)
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.pooling.bodies import EmbeddingBody, ScoreBody
from vllm_lite.server.responses.bodies import ResponseBody


def completion(**fields: Any) -> tuple[CompletionBody, list[str]]:
    return bodies.read(msgspec.json.encode({"prompt": "x", **fields}), CompletionBody)


def test_every_sampling_field_can_be_passed_on_and_none_is_refused() -> None:
    assert set(SamplingFields.__struct_fields__) == set(SamplingParams.__struct_fields__) - bodies._NOT_PASSED_ON
    for kind in (CompletionBody, ChatBody, GenerateParams):
        assert not bodies.REFUSED.keys() & set(kind.__struct_fields__)


def test_unknown_fields_are_ignored_and_named() -> None:
    body, ignored = completion(user="me", store=True, brand_new=[1])
    assert (body.user, ignored) == ("me", ["brand_new", "store"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tools", [{}]), ("chat_template", "x"), ("functions", [{"a": 1}]), ("regex", "[ab]")),
        *(("return_hidden_states", True), ("trace_decode_token_ids", [5])),
        *(("tool_choice", "required"), ("function_call", "auto"), ("typical_p", 0.5)),
    ],
)
def test_unsupported_fields_that_would_change_the_answer_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)
    with pytest.raises(ApiError, match=f"^{name} is not supported"):
        bodies.read(msgspec.json.encode({"token_ids": [1], "sampling_params": {name: value}}), GenerateBody)


@pytest.mark.parametrize("name", sorted(bodies.REFUSED))
def test_unsupported_fields_without_effect_are_accepted(name: str) -> None:
    for value in (None, *bodies.REFUSED[name]):
        assert completion(**{name: value})[1] == []


def test_unsupported_fields_of_vectors_and_responses_are_refused() -> None:
    for fields, kind in (
        ({"padding": "max_length", "input": "x"}, EmbeddingBody),
        ({"padding": "max_length", "text_1": "a", "text_2": "b"}, ScoreBody),
        ({"previous_input_messages": [{"role": "user", "content": "a"}], "input": "x"}, ResponseBody),
    ):
        name = next(iter(fields))
        with pytest.raises(ApiError, match=f"^{name} is not supported by this server: "):
            bodies.read(msgspec.json.encode(fields), kind)
    assert bodies.read(b'{"padding": "do_not_pad", "input": "x"}', EmbeddingBody)[1] == []


def test_constraints_in_a_fork_are_refused() -> None:
    """A fork continues under its parent's constraints."""
    forms = {"response_format": {"type": "json_object"}, "json_schema": {"type": "object"}, "guided_regex": "a"}
    for name, value in (*forms.items(), ("tools", [{"a": 1}])):
        with pytest.raises(ApiError, match=f"^{name} is not supported here"):
            bodies.read(msgspec.json.encode({name: value}), ForkBody)
    assert bodies.read(b'{"response_format": {"type": "text"}, "tools": []}', ForkBody)[1] == []


def test_the_documentation_names_all_that_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    section = text[text.index("A field that would change the answer") : text.index("Any other field")]
    assert set(re.findall(r"`(\w+)`", section)) - {"left"} == bodies.REFUSED.keys()


def test_zero_is_refused_where_it_has_an_effect() -> None:
    assert completion(typical_p=1, tfs=1.0, mirostat=0, dry_multiplier=0.0, tool_choice="none")[1] == []
    for name, value in (("dry_multiplier", 1), ("typical_p", 0), ("tfs", True)):
        with pytest.raises(ApiError, match=f"^{name} is not supported"):
            completion(**{name: value})


def test_the_number_of_fields_in_a_body_is_limited() -> None:
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
        ({"max_tokens": "five"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stream_options": {"include_usage": 2}, "stream": True}, "stream_options"),
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


def test_a_long_value_is_shortened_in_an_error() -> None:
    with pytest.raises(ApiError) as caught:
        completion(truncation_side="a" * 1_000_000)
    assert len(caught.value.message) < 400
    assert caught.value.message.startswith("`truncation_side` must be one of left, right, got 'aaa")
    assert caught.value.param == "truncation_side"


NUMBERS = [
    *("16", "16.0", "1e1", '"16"', '"16.0"', '"-3"', '"0.5"', "0.5", "true", "false", "null"),
    *('"true"', '""', '"x"', '"nan"', "[]", "[16]", "{}", '{"a": 1}'),
]
FLAGS = [
    *("true", "false", "1", "0", "1.0", "0.0", '"true"', '"FALSE"', '"1"', '"0"', '"yes"', '"No"', '"on"', '"off"'),
    *('"t"', '"F"', '"y"', '"n"', "null", "2", "0.5", '"x"', '""', '"2"', "[]", "[true]", "{}"),
]
TEXTS = ['"a"', '"16"', '"null"', '"true"', "16", "1.0", "true", "null", "[]"]


@pytest.mark.parametrize(
    ("field", "kind", "value"),
    [
        *((field, int | None, value) for field in ("max_tokens", "logprobs") for value in NUMBERS),
        *(("temperature", float | None, value) for value in NUMBERS),
        *((field, bool | None, value) for field in ("stream", "ignore_eos", "echo") for value in FLAGS),
        *(("user", str | None, value) for value in TEXTS),
        *(("stop_token_ids", list[int] | None, value) for value in ("[1, 2.0]", '["1", 2]', '"1"', "[1.5]", '["x"]')),
        *(("logit_bias", dict[str, float] | None, value) for value in ('{"5": 1.0}', "[]")),
    ],
)
def test_values_are_taken_as_pydantic_takes_them(field: str, kind: Any, value: str) -> None:
    """Clients have been tried with servers built on pydantic."""
    body = f'{{"prompt": "x", "{field}": {value}}}'.encode()
    try:
        expected = TypeAdapter(kind).validate_json(value)
    except ValidationError:
        with pytest.raises(ApiError) as caught:
            bodies.read(body, CompletionBody)
        assert (caught.value.status, caught.value.param) == (400, field)
        return
    found = getattr(bodies.read(body, CompletionBody)[0], field)
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)  # NaN included


def test_values_inside_a_value_are_taken_so_too() -> None:
    data = b"""{"token_ids": [1, 2.0], "sampling_params": {"n": "2", "max_tokens": true, "ignore_eos": "on", "new": 1},
        "stream": "yes", "stream_options": {"include_usage": 1}}"""
    body, ignored = bodies.read(data, GenerateBody)
    assert ignored == ["new"]
    params: Any = body.sampling_params
    assert (params.n, params.max_tokens, params.ignore_eos, body.token_ids) == (2, 1, True, [1, 2])
    assert body.stream is True
    assert body.stream_options is not None
    assert body.stream_options.include_usage is True


def test_named_tokens_need_logprobs_and_output() -> None:
    for fields, has_logprobs in (
        ({"logprob_token_ids": [5]}, False),
        ({"logprob_token_ids": [5], "max_tokens": 0}, True),
    ):
        body, _ = completion(**fields)
        with pytest.raises(ApiError, match="logprob_token_ids needs") as caught:
            bodies.check_named(body, has_logprobs=has_logprobs)
        assert caught.value.param == "logprob_token_ids"
    body, _ = completion(logprob_token_ids=[5, 6, 5])
    bodies.check_named(body, has_logprobs=True)
    params = bodies.sampling(body, {}, {"logprobs": None})
    assert (params.logprobs, params.logprob_token_ids) == (2, (5, 6))
    assert params.for_worker(0, 3, (), None, unscored=False).logprob_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ({"5": "1", "6": 2, "7": "-1e1"}, ""),
        ({"5": 1, "x": 1}, "logit_bias must have token ids as keys, got 'x'"),
        ({"5": 1, "6": "much"}, "logit_bias of token 6 must be a number, got 'much'"),
        ({"5": None}, "logit_bias of token 5 must be a number, got None"),
        ({"5": [1]}, "logit_bias of token 5 must be a number, got [1]"),
        ({"5": 1, "6": "inf"}, "logit_bias of token 6 must be between -100.0 and 100.0, got inf"),
    ],
)
def test_an_error_about_a_bias_names_its_token(biases: dict[str, Any], message: str) -> None:
    body, _ = completion(logit_bias=biases)
    if not message:
        assert bodies.sampling(body, {}, {}).logit_bias == {5: 1.0, 6: 2.0, 7: -10.0}
        return
    with pytest.raises(ApiError, match=re.escape(message)) as caught:
        bodies.sampling(body, {}, {})
    assert (caught.value.status, caught.value.param) == (400, "logit_bias")


def test_texts_are_never_read_as_something_else() -> None:
    parts = [{"type": "text", "text": "null"}, {"type": "text", "text": "1"}]
    messages = [
        {"role": "user", "content": "null"},
        {"role": "user", "content": "5"},
        {"role": "user", "content": parts},
    ]
    body = bodies.read(msgspec.json.encode({"messages": messages, "stop": ["null", "1"]}), ChatBody)[0]
    assert [message.content for message in body.messages[:2]] == ["null", "5"]
    assert [part.text for part in body.messages[2].content or [] if isinstance(part, bodies.Part)] == ["null", "1"]
    assert body.stop == ["null", "1"]
    assert completion(prompt=["null", "12"])[0].prompt == ["null", "12"]


def test_fields_of_a_body_override_the_models_defaults() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    params = bodies.sampling(completion(temperature=0.1)[0], defaults, {"logprobs": 2})
    assert (params.temperature, params.top_k, params.logprobs, params.max_tokens) == (0.1, 20, 2, 16)


def test_null_equals_an_omitted_field() -> None:
    body = completion(**dict.fromkeys(SamplingFields.__struct_fields__))[0]
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
    assert msgspec.json.decode(ApiError(429, "no", "n").body()) == {
        "error": {"message": "no", "type": "RateLimitError", "param": "n", "code": 429}
    }
