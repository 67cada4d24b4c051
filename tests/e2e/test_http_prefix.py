"""POST /debug/prefix and `vllm-lite why --prompt` with a running server: what they say is what a request then gets."""

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.http_server import Server, client, serving
from vllm_lite.tools.cli import main

ADMIN, USER = "an-admins-key", "a-users-key"
STORY = "Once upon a time there was a little cat, and it lived in a big house with a red door. It was {} there. " * 3


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--num-gpu-blocks-override", "200", "--max-num-seqs", "2", "--block-size", "16") as running:
        yield running


def explained(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/debug/prefix", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached_by(http: httpx.Client, path: str, **body: Any) -> int:
    answer = http.post(path, json={"max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    number: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_a_prompt_misses_where_it_differs(server: Server) -> None:
    with client(server) as http:
        before, after = STORY.format("warm", "warm", "warm"), STORY.format("warm", "cold", "warm")
        assert explained(http, prompt=before)["num_cached_tokens"] == 0
        cached_by(http, "/v1/completions", prompt=before, request_id="warm")
        found = explained(http, prompt=after)
        size, hit = found["block_size"], found["num_hit_blocks"]
        assert hit > 0
        assert found["miss"] == "differs"
        assert found["num_cached_tokens"] == hit * size
        assert found["blocks"][0] == {"blocks": [0, hit], "tokens": [0, hit * size], "hit": True, "tier": "device"}
        assert found["blocks"][1]["tier"] is None
        difference = found["difference"]
        assert hit * size <= difference["token"] < (hit + 1) * size
        assert (difference["here"]["text"] + difference["here"]["after"]).strip().startswith("cold there")
        assert (difference["there"]["text"] + difference["there"]["after"]).strip().startswith("warm there")
        assert difference["before"].endswith("was")
        assert "warm" in difference["request_id"]
        assert found["why"].startswith(f"{hit * size} of {found['num_tokens']} tokens are cached; block {hit} differs")
        assert cached_by(http, "/v1/completions", prompt=after) == found["num_cached_tokens"]
        again = explained(http, prompt=after)
        assert (again["miss"], again["difference"]) == ("all_cached", None)


def test_chats_tokens_and_salts(server: Server) -> None:
    messages = [{"role": "user", "content": STORY.format("dark", "dark", "dark")}]
    with client(server) as http:
        cached_by(http, "/v1/chat/completions", messages=messages)
        found = explained(http, messages=messages)
        assert (found["miss"], found["num_cached_tokens"] > 0) == ("all_cached", True)
        salted = explained(http, messages=messages, cache_salt="mine")
        assert (salted["miss"], salted["num_cached_tokens"], salted["difference"]) == ("other_keys", 0, None)
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert explained(http, prompt=tokens)["num_cached_tokens"] == found["num_cached_tokens"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, ""),
        (b"{}", 400, "prompt"),
        (b'{"prompt": ["a", "b"]}', 400, "give one prompt, got 2"),
        (b'{"prompt": [-1]}', 400, ""),
        (b'{"prompt": [99999999]}', 400, ""),
        (b'{"messages": []}', 400, ""),
        (b'{"prompt": "a", "model": "nobody"}', 404, "nobody"),
    ],
)
def test_a_bad_body_gets_a_sentence(server: Server, body: bytes, status: int, said: str) -> None:
    with client(server) as http:
        answer = http.post("/debug/prefix", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
        assert http.get("/health").status_code == 200


def test_the_command_says_it_in_a_sentence(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(server) as http:
        cached_by(http, "/v1/completions", prompt=STORY.format("loud", "loud", "loud"))
    monkeypatch.setattr("sys.stdin", io.StringIO(STORY.format("loud", "soft", "loud")))
    assert main(["why", "--prompt", "-", "--url", server.url]) == 0
    sentence, *lines = capsys.readouterr().out.splitlines()
    assert "differs at token" in sentence
    assert "where the nearest cached prompt has" in sentence
    assert lines[0].endswith("hit, device")
    assert lines[-2].strip().startswith("here:")
    assert lines[-1].strip().startswith("there:")
    body = {"prompt": STORY.format("loud", "soft", "loud")}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(body)))
    assert main(["why", "--prompt", "-", "--url", server.url, "--json", "--cache-salt", "x"]) == 0
    assert json.loads(capsys.readouterr().out)["miss"] == "other_keys"
    assert main(["why", "--prompt", "-", "id"]) == 2
    assert main(["why", "id"]) == 2


def test_only_an_admin_sees_others_prompts() -> None:
    with serving("--api-key", USER, "--admin-api-key", ADMIN, light=True) as server, client(server) as http:
        for key, status in ((None, 401), (USER, 403), (ADMIN, 200)):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            assert http.post("/debug/prefix", json={"prompt": [3, 4]}, headers=headers).status_code == status


def test_of_several_engines_the_one_that_would_compute_answers() -> None:
    flags = ("-dp", "2", "--num-gpu-blocks-override", "100", "--block-size", "16")
    with serving(*flags, light=True) as server, client(server) as http:
        prompts = [[number, *range(3, 60)] for number in range(4, 10)]
        for prompt in prompts:
            cached_by(http, "/v1/completions", prompt=prompt)
        found = [explained(http, prompt=prompt) for prompt in prompts]
        assert {each["engine"] for each in found} == {0, 1}
        assert {each["num_cached_tokens"] for each in found} == {48}


def test_without_a_cache_it_says_so() -> None:
    with serving("--no-enable-prefix-caching", light=True) as server, client(server) as http:
        found = explained(http, prompt=[3, 4, 5])
        assert (found["miss"], found["blocks"], found["num_cached_tokens"]) == ("caching_is_off", [], 0)
