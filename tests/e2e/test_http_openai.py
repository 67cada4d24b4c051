"""The server as the official OpenAI package sees it, with the demo model."""

import asyncio
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.deadlines import scaled
from tests.http_server import Server, serving, short_socket, until
from vllm_lite.client.engines.session import Session
from vllm_lite.protocol.params import SamplingParams

PROMPT = "Once upon a time there was a"
MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a bear."}]
LONG: Any = {"model": "demo", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="vl") as folder,
        serving("--address", short_socket(Path(folder)), "--served-model-name", "demo", "story") as server,
    ):
        yield server


def test_models(api: OpenAI) -> None:
    models = api.models.list().data
    assert [model.id for model in models] == ["demo", "story"]
    assert api.models.retrieve("story").max_model_len == 2048  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


def test_completion_at_once_and_streamed_are_the_same_text(api: OpenAI) -> None:
    whole = api.completions.create(model="demo", prompt=PROMPT, max_tokens=30, seed=5)
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    assert whole.model == "demo"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 30
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 30
    chunks = list(api.completions.create(model="demo", prompt=PROMPT, max_tokens=30, seed=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])


def test_chat_stream_has_role_text_end_and_usage(api: OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        api.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            stream=True,
            stream_options=options,
            temperature=0,
            max_completion_tokens=40,
        )
    )
    first, *middle, last = chunks
    assert first.object == "chat.completion.chunk"
    assert first.id.startswith("chatcmpl-")
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 40
    assert middle[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in middle)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in middle)
    whole = api.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=40)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].message.role == "assistant"


def test_chat_ends_at_the_models_own_end(api: OpenAI) -> None:
    answer = api.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content


def test_text_parts_of_a_message_are_one_text(api: OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    one = api.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=10)
    other = api.chat.completions.create(model="demo", messages=parts, temperature=0, max_tokens=10)
    assert one.choices[0].message.content == other.choices[0].message.content


def test_a_chat_continues_its_last_message_and_echoes_it(api: OpenAI) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "Once upon a time"}]
    extra = {"echo": True, "continue_final_message": True}
    settings: Any = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 8}
    plain = api.chat.completions.create(**settings, extra_body={"continue_final_message": True})
    whole = api.chat.completions.create(**settings, extra_body=extra).choices[0].message.content
    assert whole == "Once upon a time" + (plain.choices[0].message.content or "")
    with api.chat.completions.create(**settings, extra_body=extra, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    settings["messages"] = MESSAGES  # a question cannot be continued as an answer
    assert api.chat.completions.create(**settings, extra_body={"echo": True}).choices[0].message.content == (
        api.chat.completions.create(**settings).choices[0].message.content
    )


def test_several_prompts_and_samples_are_indexed(api: OpenAI) -> None:
    prompts = [PROMPT, "One windy day,"]
    whole = api.completions.create(model="demo", prompt=prompts, n=2, max_tokens=8, seed=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    alone = api.completions.create(model="demo", prompt=prompts[1], n=2, max_tokens=8, seed=3)
    assert [choice.text for choice in whole.choices[2:]] == [choice.text for choice in alone.choices]
    assert alone.choices[0].text != alone.choices[1].text
    texts = dict.fromkeys(range(4), "")
    for chunk in api.completions.create(model="demo", prompt=prompts, n=2, max_tokens=8, seed=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]


def tokenized(server: Server, text: str) -> list[int]:
    import httpx

    found: list[int] = httpx.post(server.url + "/tokenize", json={"prompt": text}).json()["tokens"]
    return found


def test_prompts_of_token_ids(api: OpenAI, server: Server) -> None:
    ids = tokenized(server, PROMPT)
    settings: Any = {"model": "demo", "temperature": 0, "max_tokens": 6}
    text = api.completions.create(prompt=PROMPT, **settings).choices[0].text
    assert api.completions.create(prompt=ids, **settings).choices[0].text == text
    assert [choice.text for choice in api.completions.create(prompt=[ids, ids], **settings).choices] == [text, text]


def test_echo_tells_the_prompt_first(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 5}
    plain, echoed = (api.completions.create(echo=echo, **settings).choices[0].text for echo in (False, True))
    assert echoed == PROMPT + plain
    chunks = api.completions.create(echo=True, stream=True, **settings)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed


def test_stop_strings_and_reasons(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 60}
    text = api.completions.create(**settings).choices[0].text
    stop = text[20:24]
    choice = api.completions.create(stop=[stop], **settings).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    chunks = list(api.completions.create(stop=stop, stream=True, **settings))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_logprobs_of_a_completion(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 3}
    choice = api.completions.create(**settings).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.top_logprobs is not None
    assert found.token_logprobs is not None
    assert choice.text.endswith("Zoë"), "the text should end with a character of two tokens"
    assert found.tokens[-2:] == ["bytes:\\xc3", "bytes:\\xab"]
    assert "".join(found.tokens[:-2]) + "ë" == choice.text
    starts = [sum(map(len, found.tokens[:place])) for place in range(5)]
    assert found.text_offset == [*starts, starts[-1]]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values()) <= 0
    streamed = [chunk.choices[0].logprobs for chunk in api.completions.create(stream=True, **settings)]
    assert [token for entry in streamed if entry for token in entry.tokens or []] == found.tokens
    assert [place for entry in streamed if entry for place in entry.text_offset or []] == found.text_offset


@pytest.mark.skipif("prompt_logprobs" not in SamplingParams.__struct_fields__, reason="the sampler has none yet")
def test_echo_with_logprobs_scores_the_prompt(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 1, "logprobs": 2}
    choice = api.completions.create(echo=True, **settings).choices[0]
    found = choice.logprobs
    assert found is not None
    assert "".join(found.tokens or []) == "<|bos|>" + choice.text
    first, *rest = found.token_logprobs or []
    assert first is None
    assert all(logprob is not None and logprob <= 0 for logprob in rest)
    scored = api.completions.create(extra_body={"prompt_logprobs": 0}, **settings).choices[0]
    told: Any = scored.prompt_logprobs
    assert [None if entry is None else next(iter(entry.values()))["logprob"] for entry in told] == [None, *rest[:-1]]
    with pytest.raises(openai.BadRequestError):
        api.completions.create(extra_body={"prompt_logprobs": 0}, stream=True, **settings)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_evaluation_scores_prompts(api: OpenAI, server: Server, max_tokens: int) -> None:
    """Send as lm-eval's local-completions does, and read the answer as it does: tokens of a context and a
    continuation."""
    prompts = [tokenized(server, text) for text in (PROMPT, PROMPT + " little bear")]
    settings: Any = {"model": "demo", "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    answer = api.completions.create(prompt=prompts, max_tokens=max_tokens, **settings)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens * 2
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.top_logprobs is not None
        assert found.text_offset is not None
        assert choice.finish_reason == "length"
        assert len(found.tokens) == len(found.text_offset) == len(prompt) + max_tokens
        assert found.text_offset == sorted(found.text_offset)
        assert found.text_offset[:2] == [0, 0], "the first is a special token, which the text lacks"
        starts = [*found.text_offset[1:], len(choice.text)]
        told = [choice.text[start:end] for start, end in pairwise(starts)]
        assert told == found.tokens[1:]
        first, *rest = zip(found.token_logprobs or [], found.top_logprobs, strict=True)
        assert first == (None, None)
        for logprob, top in rest:
            assert logprob is not None
            assert logprob in top.values()
            assert logprob <= max(top.values()) <= 0
            assert len(top) in (1, 2)


def test_a_prompt_is_scored_the_same_with_and_without_output(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "prompt": PROMPT, "temperature": 0, "echo": True}
    scored = api.completions.create(max_tokens=0, logprobs=1, **settings)
    with_one = api.completions.create(max_tokens=1, logprobs=1, **settings)
    assert scored.choices[0].logprobs is not None
    assert with_one.choices[0].logprobs is not None
    assert scored.choices[0].text == PROMPT
    for name, values in scored.choices[0].logprobs.to_dict().items():
        assert values == getattr(with_one.choices[0].logprobs, name)[:-1], name
    several = api.completions.create(max_tokens=0, n=2, extra_body={"min_tokens": 3, "stop": [" "]}, **settings)
    assert [(choice.text, choice.finish_reason) for choice in several.choices] == [(PROMPT, "length")] * 2
    chunks = list(api.completions.create(max_tokens=0, stream=True, **settings))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT
    assert chunks[-1].choices[0].finish_reason == "length"


def test_fields_not_asked_for_are_null(api: OpenAI) -> None:
    completion = api.completions.create(model="demo", prompt=PROMPT, max_tokens=1)
    assert_null(completion.choices[0].to_dict())
    chat = api.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1)
    assert_null(chat.to_dict())
    extra = {"return_token_ids": True, "prompt_logprobs": 0}
    told: Any = api.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1, extra_body=extra)
    assert len(told.prompt_token_ids) == len(told.prompt_logprobs) == told.usage.prompt_tokens


def assert_null(fields: dict[str, object]) -> None:
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert name in fields
        assert fields[name] is None


def test_max_tokens_is_cut_to_the_remaining_context(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "extra_body": {"ignore_eos": True}}
    answer = api.completions.create(prompt=[5] * 2000, max_tokens=2048, **settings)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (48, "length")
    chat = api.chat.completions.create(
        model="demo", messages=MESSAGES, max_completion_tokens=2048, n=2, temperature=0, stop="bear"
    )
    assert chat.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("settings", [{"prompt": [5] * 2048, "max_tokens": 1}, {"prompt": "Hi", "max_tokens": 2049}])
def test_the_error_for_a_long_prompt_is_known_to_clients(api: OpenAI, settings: Any) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="demo", stream=stream, **settings)
        assert caught.value.code == "context_length_exceeded"
        assert "maximum context length is 2048 tokens" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="demo", messages=MESSAGES, max_completion_tokens=2049)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


def test_logprobs_of_a_chat(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 60, "logprobs": True}
    choice = api.chat.completions.create(top_logprobs=2, **settings).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    for entry in choice.logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2
    spelled = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert choice.message.content == spelled.decode()
    assert any(ord(character) > 127 for character in spelled.decode()), "the text should have had longer characters"
    chunks = api.chat.completions.create(stream=True, **settings)
    tokens = [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert tokens == [entry.token for entry in choice.logprobs.content]


def test_beams_and_best_of(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 8}
    beams = api.completions.create(n=2, extra_body={"use_beam_search": True}, **settings).choices
    assert len({beam.text for beam in beams}) == 2
    chunks = list(api.completions.create(n=2, extra_body={"use_beam_search": True}, stream=True, **settings))
    assert [chunk.choices[0].text for chunk in chunks] == [beam.text for beam in beams]
    assert len(api.completions.create(n=1, best_of=3, **settings).choices) == 1


def test_token_ids_on_request(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 6}
    choice = api.completions.create(extra_body={"return_token_ids": True}, **settings).choices[0]
    ids = choice.token_ids
    assert len(ids) == 6
    chunks = api.completions.create(extra_body={"return_token_ids": True}, stream=True, **settings)
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == ids


def test_a_streams_first_chunk_has_the_prompts_ids(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "max_tokens": 3, "extra_body": {"return_token_ids": True}}
    prompts = [[5, 6, 7], [8, 9]]
    chunks = list(api.completions.create(prompt=prompts, n=2, stream=True, **settings))
    given = [(choice.index, choice.to_dict().get("prompt_token_ids")) for chunk in chunks for choice in chunk.choices]
    assert [each for each in given if each[1] is not None] == [(0, [5, 6, 7]), (1, [5, 6, 7]), (2, [8, 9]), (3, [8, 9])]
    assert all(ids is not None for _, ids in given[:4])
    whole: Any = api.chat.completions.create(messages=MESSAGES, **settings)
    for n in (1, 2):
        chats = api.chat.completions.create(messages=MESSAGES, n=n, stream=True, **settings)
        told = [chunk.to_dict().get("prompt_token_ids") for chunk in chats]
        assert told == [whole.prompt_token_ids] + [None] * (len(told) - 1)
        assert len(told) > n
    plain = api.completions.create(model="demo", prompt=PROMPT, max_tokens=1, stream=True)
    assert "token_ids" not in str([chunk.to_dict() for chunk in plain])


def test_cached_tokens_are_reported(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "prompt": "A long beginning that is said twice. " * 8, "max_tokens": 1}
    usage = [api.completions.create(**settings).usage for _ in range(2)]
    cached = [entry.prompt_tokens_details.cached_tokens for entry in usage if entry and entry.prompt_tokens_details]
    assert cached[0] == 0
    assert usage[0] is not None
    assert cached[1] is not None
    assert 16 <= cached[1] < usage[0].prompt_tokens


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"top_p": 2}, "top_p"),
        ({"logprobs": 1000}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs"),
        ({"extra_body": {"guided_regex": "(a"}}, "guided_regex"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], "mixed"]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "word " * 4000}, "prompt"),
    ],
)
def test_a_bad_field_is_named(api: OpenAI, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(**{"model": "demo", "prompt": PROMPT, **settings})
    assert caught.value.param == param
    assert caught.value.type == "BadRequestError"
    assert caught.value.body["message"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"bos_token": "x"}}}, "messages"),
        ({"extra_body": {"chat_template_kwargs": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages"),
        ({"extra_body": {"logprob_token_ids": [5]}}, "logprob_token_ids"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ],
)
def test_a_bad_field_of_a_chat_is_named(api: OpenAI, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(**{"model": "demo", "messages": MESSAGES, **settings})
    assert caught.value.param == param


def test_an_unknown_model_is_not_found(api: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        api.completions.create(model="gpt", prompt=PROMPT)
    assert caught.value.param == "model"


def test_fields_without_effect_are_accepted(api: OpenAI) -> None:
    answer = api.chat.completions.with_raw_response.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=2,
        tools=[],
        response_format={"type": "text"},
        presence_penalty=0,
        frequency_penalty=0,
        metadata={"a": "b"},
    )
    assert "metadata" in answer.headers["warning"]
    assert "tools" not in answer.headers["warning"]


def test_closing_the_stream_aborts(api: OpenAI, session: Session) -> None:
    stream = api.completions.create(prompt=PROMPT, stream=True, n=2, **LONG)
    next(iter(stream))
    assert session.stats().num_running + session.stats().num_waiting > 0
    stream.close()
    until(lambda: session.stats().num_used_blocks == 0, "the end of an abandoned request")
    assert session.stats().num_running == session.stats().num_waiting == 0


async def test_many_at_once(server: Server) -> None:
    async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=scaled(60)) as api:

        async def one(seed: int) -> str:
            settings: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "seed": seed % 4}
            if seed % 2:
                return str((await api.completions.create(**settings)).choices[0].text)
            stream = await api.completions.create(stream=True, **settings)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(seed) for seed in range(32)))
    assert all(text == texts[place % 4] for place, text in enumerate(texts))
    assert len(set(texts)) > 1


def test_a_deadline_is_a_status_of_its_own(api: OpenAI) -> None:
    settings: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 1900}
    extra = {"deadline_ms": 5, "ignore_eos": True}
    with pytest.raises(openai.APIStatusError, match="deadline of 5 ms passed") as caught:
        api.completions.create(**settings, extra_body=extra)
    assert caught.value.status_code == 408
    with (
        pytest.raises(openai.APIError, match="deadline of 5 ms passed"),
        api.completions.create(**settings, extra_body=extra, stream=True) as stream,
    ):
        list(stream)
