"""Chats of checkpoints whose config.json does not name the token that ends their answers, through whole engines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http_server import Server, serving
from tests.scripted import END, TEMPLATE, write_scripted
from vllm_lite import LLM, SamplingParams

TEXT = "Hello, world."


def write(path: Path, token: str, *, special: bool, **changes: Any) -> Path:
    """Write a checkpoint that outputs TEXT and `token`, and then continues. `changes` are keys of its config.json."""
    folder = write_scripted(path, [f"{TEXT}{token}What nobody asked."], [token], max_model_len=256)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for each in tokenizer["added_tokens"]:
        each["special"] = special or each["content"] != token
    file.write_text(json.dumps(tokenizer))
    return folder


def change(folder: Path, **changes: Any) -> None:
    """Change keys of tokenizer_config.json."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A base model trained with ChatML: config.json still has the base model's end token."""
    folder = write(tmp_path_factory.mktemp("trained"), "<|im_end|>", special=True)
    change(folder, eos_token="<|im_end|>")
    with serving(str(folder)) as server:
        yield server


def answer(http: httpx.Client, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "script 0"}]
    found = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 60, **fields})
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def test_the_start_logs_that_files_disagree(server: Server) -> None:
    assert "config.json and the tokenizer's eos_token disagree about the token that ends an answer" in server.output


@pytest.mark.parametrize("shows", [True, False])
def test_a_chat_ends_at_the_tokenizers_eos_token(http: httpx.Client, *, shows: bool) -> None:
    choice = answer(http, skip_special_tokens=not shows)
    assert choice["message"]["content"] == TEXT
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_a_stream_ends_at_the_templates_end_token(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "script 0"}], "max_tokens": 60, "stream": True}
    lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == TEXT
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_ignore_eos_and_min_tokens_cover_the_templates_end_token(http: httpx.Client) -> None:
    choice = answer(http, ignore_eos=True)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith(f"{TEXT}What nobody asked.")
    assert len(answer(http, min_tokens=len(TEXT) + 2, logprobs=True)["logprobs"]["content"]) > len(TEXT) + 1


def test_a_grammar_ends_by_the_templates_end_token(http: httpx.Client) -> None:
    """The model wants to write the token as soon as its text may end."""
    choice = answer(http, structured_outputs={"regex": "Hello, world\\..*"})
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")


def test_a_chat_ends_by_a_token_that_only_the_template_names(tmp_path: Path) -> None:
    """No file names the token, no list has it, and it is not even a special one, so that texts would show it."""
    folder = write(tmp_path, "<|fin|>", special=False, eos_token_id=None)
    closes = "{% for m in messages %}{{ m.content }}<|fin|>\n{% endfor %}"
    change(folder, chat_template=f"{{% if add_generation_prompt %}}{TEMPLATED}{{% else %}}{closes}{{% endif %}}")
    with LLM(model=str(folder), device="cpu", num_gpu_blocks_override=64, single_process=True) as llm:
        (output,) = llm.chat([{"role": "user", "content": "script 0"}], SamplingParams(max_tokens=60), use_tqdm=False)
        (sample,) = output.outputs
        assert (sample.text, sample.finish_reason, sample.stop_reason) == (TEXT, "stop", None)
        assert set(llm.engine.eos_token_ids) == {llm.get_tokenizer().encode(text)[0] for text in ("<|fin|>", END)}


TEMPLATED = TEMPLATE.replace("PROMPTS", '[[1, ""]]')
