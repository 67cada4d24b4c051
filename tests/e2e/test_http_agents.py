"""Libraries of agents, unchanged: the parse helpers and streamed tools of OpenAI's client, LangChain's tools and
structured outputs, and the two examples. The demo model knows no JSON, so the grammar makes all of it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.deadlines import scaled
from tests.e2e.test_http_tools import TEMPLATE
from tests.http_server import Server, serving

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI  # a second, that every process which collects the tests would take

EXAMPLES = Path(__file__).parents[2] / "examples"
CLOSING_BRACE = 97
QUESTION: Any = {"role": "user", "content": "What is the weather?"}


class Weather(BaseModel):
    """Look up the weather."""

    city: str = Field(max_length=10)
    days: int = Field(ge=1, le=7)
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--log-level", "error", template=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def chat(server: Server) -> "Iterator[ChatOpenAI]":
    from langchain_openai import ChatOpenAI

    with httpx.Client(timeout=scaled(60)) as http:
        settings: Any = {"model": "demo_model", "base_url": server.url + "/v1", "api_key": "none", "http_client": http}
        settings |= {"max_retries": 0, "max_tokens": 300, "seed": 1}
        yield ChatOpenAI(**settings)


# ---- Anthropic's API


def test_a_budget_of_thinking_is_kept_to_by_a_model_that_does_not_think(server: Server) -> None:
    """Agents send one to whatever model they are given."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"max_tokens": 8, "messages": [QUESTION], "thinking": thinking}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=scaled(60))
    assert answer.status_code == 200, answer.text
    assert [block["type"] for block in answer.json()["content"]] == ["text"]


# ---- OpenAI's client


def test_openai_parses_into_a_class(api: OpenAI) -> None:
    answer = api.chat.completions.parse(
        model="demo_model", messages=[QUESTION], response_format=Weather, max_tokens=200, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)
    with api.chat.completions.stream(
        model="demo_model", messages=[QUESTION], response_format=Weather, max_tokens=200, seed=2
    ) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    assert kinds >= {"content.delta", "content.done"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_openai_parses_calls(api: OpenAI, choice: Any) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    settings: dict[str, Any] = {"model": "demo_model", "tools": tools, "max_tokens": 300, "seed": 3}
    answer = api.chat.completions.parse(messages=[QUESTION], tool_choice=choice, **settings)
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
    with api.chat.completions.stream(messages=[QUESTION], tool_choice=choice, **settings) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    assert len(deltas) > 1
    assert message.tool_calls
    assert [call.function.arguments for call in message.tool_calls] == [call.function.arguments for call in calls]
    history: list[Any] = [QUESTION, message.model_dump(exclude_none=True, exclude={"parsed"})]
    history += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    settings["max_tokens"] = 10
    assert api.chat.completions.create(messages=history, **settings).choices[0].message.role == "assistant"


# ---- LangChain


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_has_structured_output(chat: "ChatOpenAI", method: Any) -> None:
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke("the weather"), Weather)


def test_langchain_has_json_mode(chat: "ChatOpenAI") -> None:
    """Any object is right, and would be long: a likely closing brace keeps it short."""
    short = chat.model_copy(update={"logit_bias": {CLOSING_BRACE: 100}})
    answer: Any = short.with_structured_output(None, method="json_mode", include_raw=True).invoke("as JSON")
    assert isinstance(json.loads(answer["raw"].content), dict)
    assert answer["parsing_error"] is None


def test_langchain_calls_tools_and_continues(chat: "ChatOpenAI") -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    bound = chat.bind_tools([Weather], tool_choice="any")
    question = HumanMessage("the weather")
    whole = bound.invoke([question])
    assert isinstance(whole, AIMessage)
    assert [Weather.model_validate(call["args"]) for call in whole.tool_calls]
    streamed: Any = None
    for chunk in bound.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in whole.tool_calls]
    results = [ToolMessage("rain", tool_call_id=call["id"]) for call in whole.tool_calls]
    assert chat.bind_tools([Weather]).invoke([question, whole, *results]).type == "ai"


# ---- the examples


@pytest.mark.parametrize(("name", "shows"), [("structured_output", "years old"), ("tool_calls", "add(")])
def test_an_example_runs(server: Server, name: str, shows: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), server.url + "/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    assert shows in done.stdout
