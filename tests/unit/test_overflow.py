"""A prompt that is too long, as clients see it: each knows this error by a code or a phrase, and reads the numbers."""

import re
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tests.unit.test_server_response import FACTORY
from vllm_lite.client.pooling import PoolingFactory
from vllm_lite.errors import ContextLengthError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import PoolerInfo, PoolingParams
from vllm_lite.server.openai.errors import ApiError, refused

LENGTH = 2048
PHRASES = {
    "LiteLLM's ContextWindowExceededError": (r"(?i)this model's maximum context length is", ()),
    "LangChain's ContextOverflowError": ("prompt is too long", ()),
    "who cuts a conversation to what fits": (r"maximum context length is (\d+) tokens", (LENGTH,)),
    "who asks again for fewer tokens": (
        r"maximum context length is (\d+).*you requested (\d+) output .*prompt contains at least (\d+) input tokens",
        (LENGTH, 16, 3000),
    ),
}


def overflow(num_prompt: int = 3000) -> ApiError:
    with pytest.raises(ContextLengthError) as caught:
        FACTORY.make([5] * num_prompt, SamplingParams(), "r")
    return refused(caught.value, "prompt")


@pytest.mark.parametrize("whose", PHRASES)
def test_the_message_has_the_phrases_that_clients_look_for(whose: str) -> None:
    phrase, numbers = PHRASES[whose]
    found = re.search(phrase, overflow().message)
    assert found is not None
    assert tuple(map(int, found.groups())) == numbers


def test_no_phrase_makes_clients_think_of_something_else() -> None:
    """Clients search for such phrases in errors, and then try again or ask for another key."""
    text = str(ContextLengthError(2048, 3000, None)) + str(ContextLengthError(2048, 20, 5000))
    assert not re.search(r"(?i)rate.?limit|quota|too large|api.?key|timed? ?out|string too long", text)


def test_openais_package_knows_the_code() -> None:
    """Inspect looks at it."""
    answer = overflow()

    def reply(_: httpx.Request) -> httpx.Response:
        return httpx.Response(answer.status, content=answer.body(), headers={"Content-Type": "application/json"})

    http: Any = httpx.Client(transport=httpx.MockTransport(reply))
    with (
        openai.OpenAI(base_url="http://here/v1", api_key="none", http_client=http) as api,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        api.completions.create(model="demo", prompt="x")
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "count"), [("word " * 3000, r"\d{4,} tokens"), ("word " * 40_000, "more"), ([5] * 2049, "2049 tokens")]
)
def test_a_text_to_pool_has_no_output_to_be_shortened(prompt: Any, count: str) -> None:
    limits = msgspec.structs.replace(FACTORY.limits, pooler=PoolerInfo(("embed",), size=8))
    factory = PoolingFactory(limits, FACTORY.tokenizer)
    with pytest.raises(ContextLengthError, match=f"but the text has {count};") as caught:
        factory.make([[5], prompt], PoolingParams(), "embed", ["a", "b"])
    answer = refused(caught.value, "input")
    assert answer.message.startswith("text 1: This model's maximum context length is 2048 tokens")
    assert "output" not in answer.message
    assert b"context_length_exceeded" in answer.body()
    assert factory.make([[5] * 2048], PoolingParams(), "embed", ["a"])


def test_requests_that_fit_are_no_overflow() -> None:
    assert FACTORY.make([5] * (LENGTH - 1), SamplingParams(max_tokens=LENGTH), "r").params.max_tokens == LENGTH
    overflow(LENGTH)


def test_advice_names_the_part_that_is_too_long() -> None:
    assert str(ContextLengthError(2048, 3000, 16)).endswith("shorten it to 2047 or fewer")
    assert str(ContextLengthError(2048, 48, 5000)).endswith("ask for max_tokens of 2000 or fewer")
