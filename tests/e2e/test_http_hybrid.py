"""A hybrid model behind HTTP, as the official OpenAI package sees it: marks, chats, tokens that a grammar forces."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.families.hybrid import VARIANTS
from tests.http_server import Server, client, serving

FLAGS = (
    "--dtype",
    "float32",
    "--cpu-threads",
    "1",
    "--num-gpu-blocks-override",
    "300",
    "--served-model-name",
    "tiny",
)
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
SYSTEM = "Answer in one word, and never say why. " * 3
SCHEMA = {
    "type": "object",
    "properties": {"the_kind_of_animal": {"enum": ["bear", "fox"]}, "is_it_large": {"type": "boolean"}},
    "required": ["the_kind_of_animal", "is_it_large"],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="vl") as folder:
        path = VARIANTS[0].make(Path(folder) / "model")
        settings = path / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
        with serving(str(path), *FLAGS) as server:
            yield server


def chat(api: OpenAI, messages: list[dict[str, str]], **others: Any) -> tuple[str, int]:
    """Return the answer, and the number of cached tokens of the prompt."""
    extra = {"ignore_eos": True, **others.pop("extra_body", {})}
    asked: Any = {"messages": messages, "temperature": 0, "max_tokens": 24, "extra_body": extra}
    answer = api.chat.completions.create(model="tiny", **(asked | others))
    assert answer.usage
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].message.content or "", (details and details.cached_tokens) or 0


def asked(system: str, *rest: str) -> list[dict[str, str]]:
    """A chat: a system prompt, and texts of user and assistant in turn."""
    roles = ("user", "assistant") * len(rest)
    said = ({"role": role, "content": content} for role, content in zip(roles, rest, strict=False))
    return [{"role": "system", "content": system}, *said]


def test_an_edited_prompt_begins_at_its_mark(api: OpenAI) -> None:
    prompt = [5 + number % 90 for number in range(100)]
    for marks, tail, cached in (([40], [7] * 9, 32), (None, [8] * 9, 32), ([70], [9] * 50, 32)):
        edited = prompt[:45] + tail
        extra = {"marks": marks} if marks else {}
        api.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=extra)
        answer = api.completions.create(model="tiny", prompt=edited, max_tokens=1)
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        assert answer.usage.prompt_tokens_details.cached_tokens == cached


def test_chats_share_a_system_prompt_and_continue_where_they_stopped(api: OpenAI) -> None:
    first, cached = chat(api, asked(SYSTEM, "What is a bear?"))
    assert cached == 0
    _, shared = chat(api, asked(SYSTEM, "Who was here first?"))
    assert shared > 0, "the system prompt"
    longer = asked(SYSTEM, "What is a bear?", first, "And a fox?")
    said, found = chat(api, longer)
    assert found > shared
    assert (said, 0) == chat(api, longer, extra_body={"cache_salt": "another"})


def test_a_chat_continues_behind_tokens_that_a_grammar_forced(server: Server, api: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    messages = asked("Be brief.", "Name an animal of the forest.")
    said, _ = chat(api, messages, response_format=form, max_tokens=200, extra_body={"ignore_eos": False})
    assert set(json.loads(said)) == {"the_kind_of_animal", "is_it_large"}
    with client(server) as http:
        metrics = http.get("/metrics").text
    forced = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert float(forced[0].split()[-1]) > 0, "the names of the properties were computed several at a time"
    longer = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Another?"}]
    answer, found = chat(api, longer)
    assert found > 0
    assert (answer, 0) == chat(api, longer, extra_body={"cache_salt": "another"})
