"""The API of llama.cpp's server on real servers: the shapes are those that llama-server answers with."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from tests.http_server import Server, client, serving
from tests.scripted import write_scripted

PROMPT = "Once upon a time"
FIXED: dict[str, Any] = {"prompt": PROMPT, "n_predict": 8, "temperature": 0}
FINAL = [
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
    *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached"),
    "timings",
]
PART = ["index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"]
_TIMES = ["n", "ms", "per_token_ms", "per_second"]
TIMINGS = ["cache_n", *(f"prompt_{name}" for name in _TIMES), *(f"predicted_{name}" for name in _TIMES)]
GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
SCRIPT = "abcdefghijklmnopqrstuvwxyz"
"""A model that writes it chooses the letter by the number of tokens before."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--served-model-name", "demo") as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with closing(client(server)) as http:
        yield http


def post(http: httpx.Client, path: str = "/completion", status: int = 200, **fields: Any) -> Any:
    answer = http.post(path, json=fields)
    assert answer.status_code == status, answer.text
    return answer.json()


def refusal(http: httpx.Client, status: int = 400, path: str = "/completion", **fields: Any) -> tuple[str, str]:
    error = post(http, path, status, **fields)["error"]
    assert error["code"] == status
    return error["type"], error["message"]


def events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post("/completion", json={**FIXED, "stream": True, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n")[:-1]]


def as_completion(http: httpx.Client, prompt: Any = PROMPT, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    return post(http, "/v1/completions", **body)["choices"][0]


def test_an_answer_has_the_fields_of_llama_server(http: httpx.Client) -> None:
    found = post(http, **FIXED)
    assert list(found) == FINAL
    assert list(found["timings"]) == TIMINGS
    assert found["content"] == as_completion(http)["text"]
    assert (found["prompt"], found["model"], found["tokens"]) == ("<|bos|>" + PROMPT, "demo", [])
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
    assert (
        found["tokens_predicted"] == found["timings"]["predicted_n"] == found["generation_settings"]["n_predict"] == 8
    )
    assert found["tokens_cached"] == found["tokens_evaluated"] + 7
    assert found["timings"]["prompt_n"] + found["timings"]["cache_n"] == found["tokens_evaluated"]
    assert len(post(http, **FIXED, return_tokens=True)["tokens"]) == 8


def test_a_stream_ends_with_all_fields_and_no_text(http: httpx.Client) -> None:
    *parts, last = events(http)
    assert {tuple(part) for part in parts} == {tuple(PART)}
    assert list(last) == FINAL
    assert "".join(part["content"] for part in parts) == as_completion(http)["text"]
    assert sum(len(part["tokens"]) for part in parts) == parts[-1]["tokens_predicted"] == last["tokens_predicted"] == 8
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    assert list(events(http, timings_per_token=True)[0]["timings"]) == TIMINGS


def test_prompts_of_texts_and_ids(http: httpx.Client) -> None:
    ids = post(http, "/tokenize", prompt=PROMPT)["tokens"]
    parts = [post(http, "/tokenize", prompt=text, add_special_tokens=False)["tokens"] for text in (" upon", " a time")]
    whole = as_completion(http)["text"]
    assert post(http, **{**FIXED, "prompt": ids})["content"] == whole
    mixed = [*ids[: -len(parts[0] + parts[1])], " upon", *parts[1]]
    several = [PROMPT, ids, mixed, {"prompt_string": PROMPT}]
    found = post(http, **{**FIXED, "prompt": several})
    assert [(each["index"], each["content"]) for each in found] == [(place, whole) for place in range(4)]
    assert {each["prompt"] for each in found} == {"<|bos|>" + PROMPT}
    streamed = events(http, prompt=[PROMPT, PROMPT])
    assert sorted(each["index"] for each in streamed if each["stop"]) == [0, 1]
    assert [each["index"] for each in post(http, **FIXED, n_cmpl=2)] == [0, 1]


def test_fields_of_a_request(http: httpx.Client) -> None:
    text = as_completion(http)["text"]
    word = text.split()[1]
    stopped = post(http, **FIXED, stop=[word])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == text[: text.index(word)]
    assert post(http, **{**FIXED, "n_predict": 0})["tokens_predicted"] == 1, "as llama-server answers"
    word_tokens = post(http, "/tokenize", prompt="cat", add_special_tokens=False)["tokens"]
    for bias in ([["cat", 100]], {"cat": 100}):
        biased = post(http, **FIXED, logit_bias=bias, return_tokens=True)
        assert set(biased["tokens"]) <= set(word_tokens)
        assert [each["token"] for each in biased["generation_settings"]["logit_bias"]] == word_tokens
    token = word_tokens[0]
    for bias in ([[token, 100]], {str(token): 100}):
        biased = post(http, **FIXED, logit_bias=bias, return_tokens=True)
        assert biased["tokens"] == [token] * 8
        assert biased["generation_settings"]["logit_bias"] == [{"bias": 100.0, "token": token}]
    first = post(http, **FIXED, return_tokens=True)["tokens"][0]
    assert post(http, **FIXED, return_tokens=True, logit_bias=[[first, False]])["tokens"][0] != first
    assert post(http, **FIXED, grammar='root ::= "yes"')["content"] == "yes"
    assert post(http, **{**FIXED, "json_schema": {"const": True}})["content"] == "true"
    drawn = [post(http, **{**FIXED, "temperature": 1, "seed": 5})["content"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    post(http, **{**FIXED, "prompt": PROMPT * 8})
    assert post(http, **{**FIXED, "prompt": PROMPT * 8})["timings"]["cache_n"] > 0
    assert post(http, **{**FIXED, "prompt": PROMPT * 8, "cache_prompt": False})["timings"]["cache_n"] == 0
    wanted = ["content", "generation_settings/n_predict", "timings/none"]
    assert post(http, **FIXED, response_fields=wanted) == {"content": text, "generation_settings/n_predict": 8}


def test_probabilities(http: httpx.Client) -> None:
    scores = post(http, **FIXED, n_probs=2)["completion_probabilities"]
    assert len(scores) == 8
    assert list(scores[0]) == ["id", "token", "logprob", "bytes", "top_logprobs"]
    assert scores[0]["top_logprobs"][0] == {name: scores[0][name] for name in ("id", "token", "logprob", "bytes")}
    assert len(scores[0]["top_logprobs"]) == 2
    told = [score for part in events(http, n_probs=2)[:-1] for score in part["completion_probabilities"]]
    assert told == scores


def test_refusals_have_llama_cpps_form(http: httpx.Client) -> None:
    kind, text = refusal(http, n_predict=2)
    assert (kind, "prompt" in text) == ("invalid_request_error", True)
    for fields, named in (
        ({"prompt": []}, "prompt"),
        ({"prompt": [3, [4]]}, "prompt"),
        ({"prompt": [10**9]}, "1000000000"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "multimodal_data"),
        ({"n_probs": 65}, "n_probs"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"temperature": "x"}, "temperature"),
        ({"mirostat": 2}, "mirostat"),
        ({"grammar": "rooot ::= ["}, "grammar"),
    ):
        assert named in refusal(http, **{**FIXED, **fields})[1], fields
    assert refusal(http, prompt="word " * 9000)[0] == "exceed_context_size_error"
    assert refusal(http, 404, model="other", prompt="a")[0] == "not_found_error"
    assert "gap" in refusal(http, path="/infill", input_prefix="a", input_suffix="b")[1]


def test_the_prompt_of_a_chat(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    made = post(http, "/apply-template", messages=messages)
    assert "Tell me a story." in made["prompt"]
    ids = post(http, "/tokenize", prompt=made["prompt"], add_special_tokens=False)["tokens"]
    assert ids == post(http, "/tokenize", messages=messages)["tokens"]
    assert "messages" in refusal(http, path="/apply-template")[1]


def test_short_completions_stay_openais(http: httpx.Client) -> None:
    assert post(http, "/completions", prompt=PROMPT, max_tokens=2)["object"] == "text_completion"


def test_a_gap_is_filled(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_scripted(tmp_path_factory.mktemp("gap"), [SCRIPT], GAP)
    with serving(str(folder)) as server, closing(client(server)) as http:
        body: dict[str, Any] = {"input_prefix": "x", "input_suffix": "yz", "n_predict": 3, "temperature": 0}
        found = post(http, "/infill", **body)  # prefix, x, suffix, y, z, middle: 6 tokens
        assert (found["prompt"], found["tokens_evaluated"]) == ("<|fim_prefix|>x<|fim_suffix|>yz<|fim_middle|>", 6)
        assert (found["content"], found["stop_type"]) == ("fgh", "limit")
        more = post(http, "/infill", **body, prompt="12", input_extra=[{"text": "t", "filename": "n"}])
        assert more["prompt"] == "<|file_sep|>n\nt\n<|file_sep|><|fim_prefix|>x12<|fim_suffix|>yz<|fim_middle|>"
        files = [{"text": "q" * 1000}]
        cut = post(http, "/infill", **body, input_extra=files)
        assert cut["prompt"].startswith("qqqq"), "the beginning of other files is left out"
        assert cut["tokens_evaluated"] + 3 == http.get("/props").json()["default_generation_settings"]["n_ctx"]
