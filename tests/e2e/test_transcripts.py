"""Streams and answers of the demo model, as the official clients see them, against transcripts in tests/transcripts.

A transcript has each event's name and fields: without numbers and texts, but with names, roles, reasons, flags and
nulls. The number of tokens in an event depends on the machine. So events that only continue a text are left out, and a
chunk with several things counts as several chunks. Any other change of an API changes a line. `python -m
tests.e2e.test_transcripts` writes them anew.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from tests.deadlines import scaled
from tests.http_server import serving

FOLDER = Path(__file__).parents[1] / "transcripts"
FLAGS = (
    "--dtype",
    "float32",
    "--tool-call-parser",
    "hermes",
    "--reasoning-parser",
    "qwen3",
    "--served-model-name",
    "demo",
)
TELLING = {
    "client_error",
    "type",
    "object",
    "role",
    "status",
    "finish_reason",
    "stop_reason",
    "done_reason",
    "model",
    "name",
    "param",
}
"""Fields with fixed words of the API; these are compared."""
PIECES = {"arguments", "partial_json"}
"""Fields that may or may not be empty in the first event."""
PLACES = {"index", "output_index", "content_index", "code"}
"""Fields whose numbers do not depend on time."""
ENDS = {"finish_reason", "stop_reason"}
THINGS = (("reasoning", "reasoning_content"), ("content",), ("tool_calls",), ("refusal",))
ATTEMPTS = 4
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"who": {"enum": ["bear"]}}, "required": ["who"]}
FUNCTION: dict[str, Any] = {"name": "look", "description": "it does", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story about a cat."}]}
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 4}
FIXED: dict[str, Any] = {"temperature": 0, "num_predict": 40}


class Clients:
    """One client of each API, for a server."""

    def __init__(self, url: str) -> None:
        import anthropic  # two seconds, that every process which collects the tests would take

        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=scaled(30.0))
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=scaled(30.0))
        self.ollama = ollama.Client(url, timeout=scaled(30.0))

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()
        self.ollama._client.close()

    def chat(self, **fields: Any) -> Any:
        return self.openai.chat.completions.create(**{**CHAT, "max_tokens": 40, "temperature": 0, **fields})

    def response(self, **fields: Any) -> Any:
        asked = {"model": "demo", "input": "Tell me a story.", "max_output_tokens": 40, "temperature": 0, **fields}
        return self.openai.responses.create(**asked)

    def message(self, **fields: Any) -> Any:
        return self.anthropic.messages.create(**{**CHAT, "max_tokens": 40, "extra_body": {"temperature": 0}, **fields})


USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
LOOK: dict[str, Any] = {"name": "look", "input_schema": SCHEMA}
CASES: dict[str, Callable[[Clients], Any]] = {
    "chat": lambda to: to.chat(),
    "chat_stream": lambda to: to.chat(**USAGE),
    "chat_logprobs_stream": lambda to: to.chat(logprobs=True, top_logprobs=1, stream=True),
    "chat_thinking_stream": lambda to: to.chat(stream=True, max_tokens=40, extra_body=THINKING),
    "chat_tools": lambda to: to.chat(tools=TOOLS, tool_choice="required", max_tokens=64, parallel_tool_calls=False),
    "chat_tools_stream": lambda to: to.chat(
        tools=TOOLS, tool_choice="required", max_tokens=64, parallel_tool_calls=False, **USAGE
    ),
    "completion": lambda to: to.openai.completions.create(
        model="demo", prompt="The cat", temperature=0, max_tokens=40, logprobs=1
    ),
    "completion_stream": lambda to: to.openai.completions.create(
        model="demo", prompt="The cat", temperature=0, max_tokens=40, **USAGE
    ),
    "embedding_of_a_model_without": lambda to: to.openai.embeddings.create(model="demo", input="x"),
    "models": lambda to: to.openai.models.list(),
    "unknown_model": lambda to: to.chat(model="nobody"),
    "bad_value": lambda to: to.chat(temperature=-1),
    "response": lambda to: to.response(),
    "response_stream": lambda to: to.response(stream=True),
    "response_thinking_stream": lambda to: to.response(stream=True, reasoning={"effort": "low"}, extra_body=THINKING),
    "response_tools_stream": lambda to: to.response(
        stream=True, tools=[{"type": "function", **FUNCTION}], tool_choice="required", max_output_tokens=64
    ),
    "message": lambda to: to.message(),
    "message_stream": lambda to: to.message(stream=True),
    "message_thinking_stream": lambda to: to.message(
        stream=True, max_tokens=40, thinking={"type": "enabled", "budget_tokens": 4}
    ),
    "message_tools_stream": lambda to: to.message(
        stream=True, tools=[LOOK], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=64
    ),
    "message_unknown_model": lambda to: to.message(model="nobody"),
    "counted_tokens": lambda to: to.anthropic.messages.count_tokens(**CHAT),
    "ollama_chat": lambda to: to.ollama.chat(**CHAT, options=FIXED),
    "ollama_chat_stream": lambda to: to.ollama.chat(**CHAT, options=FIXED, stream=True),
    "ollama_thinking_stream": lambda to: to.ollama.chat(**CHAT, options=FIXED, think=True, stream=True),
    "ollama_generate_stream": lambda to: to.ollama.generate("demo", "The cat", options=FIXED, stream=True),
    "ollama_unknown_model": lambda to: to.ollama.chat("nobody", CHAT["messages"]),
}


def events(ask: Callable[[Clients], Any], to: Clients) -> Iterator[Any]:
    """Yield the events of a stream as plain values; an error is an event as well."""
    import anthropic

    try:
        found = ask(to)
        one = hasattr(found, "model_dump")
        for event in [found] if one else found:
            yield event.model_dump(mode="json", exclude_unset=True, by_alias=True)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        yield {"client_error": type(error).__name__, "status": error.status_code, "body": error.body}
    except ollama.ResponseError as error:
        yield {"client_error": type(error).__name__, "status": error.status_code, "error": error.error}


def shape(value: Any, field: str = "") -> Any:
    """Reduce a value to the part that is compared."""
    if isinstance(value, dict):
        by_token = field == "top_logprobs" and all(isinstance(inner, float) for inner in value.values())
        return {"token" if by_token else key: shape(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return without_repeats([shape(inner, field) for inner in value])
    if isinstance(value, str):
        return value if field in TELLING or not (value or field in PIECES) else "text"
    if isinstance(value, bool) or value is None:
        return value
    return value if field in PLACES or field == "status" else "number"


def without_repeats(values: Iterable[Any]) -> list[Any]:
    kept: list[Any] = []
    for value in values:
        if not kept or kept[-1] != value:
            kept.append(value)
    return kept


def without_pieces(seen: list[Any]) -> list[Any]:
    """Leave out events that only continue the previous one's text, or whose text may also arrive with the end."""
    kept: list[Any] = []
    for event in seen:
        if kept and is_part(event, kept[-1]):
            continue
        if kept and without_end(event) == without_end(kept[-1]):
            kept.pop()
        kept.append(event)
    return kept


def apart(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Split a chunk of a chat into several, with one thing each: reasoning, content, calls, and the end."""
    if event.get("object") != "chat.completion.chunk" or not event["choices"]:
        yield event
        return
    (choice,) = event["choices"]
    delta, ends = choice["delta"], choice["finish_reason"] is not None
    going_on = {**{key: value for key, value in choice.items() if key != "stop_reason"}, "finish_reason": None}
    for names in (("role", "content"),) if "role" in delta else THINGS:
        if named := {name: delta[name] for name in names if name in delta}:
            yield {**event, "choices": [{**going_on, "delta": named}]}
    if ends:
        yield {**event, "choices": [{**choice, "delta": {}, "logprobs": None}]}


def is_part(one: Any, other: Any) -> bool:
    """Whether all that `one` says is in `other`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(key in other and is_part(value, other[key]) for key, value in one.items()) and bool(one)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(is_part, one, other))
    return bool(one == other)


def without_end(value: Any) -> Any:
    if isinstance(value, list):
        return [without_end(inner) for inner in value]
    if isinstance(value, dict):
        return {key: without_end(inner) for key, inner in value.items() if key not in ENDS}
    return value


def transcript(name: str, to: Clients) -> str:
    seen = without_pieces([part for event in events(CASES[name], to) for part in apart(shape(event))])
    return "".join(f"{json.dumps(event)}\n" for event in seen)


@contextmanager
def clients() -> Iterator[Clients]:
    flags = (*FLAGS, "--chat-template", str(FOLDER / "thinking.jinja"))
    with serving(*flags) as server, closing(Clients(server.url)) as made:
        yield made


@pytest.fixture(scope="module")
def to() -> Iterator[Clients]:
    with clients() as made:
        yield made


@pytest.mark.parametrize("name", CASES)
def test_transcripts_of_clients_are_stable(name: str, to: Clients) -> None:
    """In at least one of several tries, because on a very busy machine all tokens may arrive at once."""
    before = (FOLDER / f"{name}.txt").read_text()
    seen = transcript(name, to)
    for _ in range(ATTEMPTS - 1):
        seen = seen if seen == before else transcript(name, to)
    assert seen == before


def test_every_transcript_is_compared() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)


if __name__ == "__main__":
    with clients() as made:
        for case in CASES:
            (FOLDER / f"{case}.txt").write_text(transcript(case, made))
