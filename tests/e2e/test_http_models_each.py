"""Each of several models behind one address has the features of a single model: ranks, adapters, vectors, limits.
Requests of clients of llama-swap and Open WebUI are answered."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import ollama
import pytest

from tests.checkpoints import make_checkpoint
from tests.deadlines import scaled
from tests.e2e.poisoned_worker import POISON, poison_all
from tests.e2e.test_http_models import PROMPT, Stream, complete, routing, states, write
from tests.e2e.test_processes import family
from tests.http_server import Server, client, until
from tests.lora_adapters import make_adapter

SAY = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint and two adapters of it."""
    folder = tmp_path_factory.mktemp("adapted")
    base = make_checkpoint(folder / "base")
    return base, make_adapter(base, folder / "one", seed=1), make_adapter(base, folder / "two", seed=2)


@pytest.fixture(scope="module")
def poison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workers die of some prompts while this file is there."""
    return tmp_path_factory.mktemp("poison") / "poison"


@pytest.fixture(scope="module")
def each(tmp_path_factory: pytest.TempPathFactory, adapters: tuple[Path, Path, Path], poison: Path) -> Iterator[Server]:
    base, one, _ = adapters
    text = f"""
    defaults: {{dtype: float32, cpu_threads: 1}}
    models:
      org/split: {{model: demo, tensor_parallel_size: 2}}
      adapted: {{model: {base}, enable_lora: true, max_loras: 2, lora_modules: [{{name: tuned, path: {one}}}]}}
      narrow: {{model: demo, aliases: [small], max_num_seqs: 1, max_num_queued_reqs: 1}}
      vectors: {{model: demo, runner: pooling}}
    """
    poisoned = poison_all(tmp_path_factory.mktemp("site"), poison)
    with routing(write(tmp_path_factory.mktemp("each"), text), env=poisoned) as server:
        yield server


def ids(http: httpx.Client, model: str) -> list[int]:
    """The ids with which a model answers a prompt of ids."""
    body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_each_model_has_its_own_ranks_and_limits(each: Server) -> None:
    with client(each) as http:
        split, narrow = complete(http, "org/split"), complete(http, "small")
        assert split["choices"] == narrow["choices"]
        pids = {name: http.get(f"/v1/models/{name}").json()["vllm_lite"]["pid"] for name in ("org/split", "narrow")}
        assert len(family(pids["org/split"])) == len(family(pids["narrow"])) + 1, "a worker more"
        long = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(http.post, "/v1/completions", json={"model": "narrow", **long}) for _ in range(6)]
            other = threads.submit(http.post, "/v1/completions", json={"model": "org/split", **long})
            answers = [future.result() for future in asked]
            assert other.result().status_code == 200
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < 6
    assert {answer.status_code for answer in refused} == {429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


def test_adapters_are_names_of_their_model(each: Server, adapters: tuple[Path, Path, Path]) -> None:
    with client(each) as http:
        assert states(http)["tuned"] == states(http)["adapted"], "it is listed before the model is loaded"
        base, tuned = ids(http, "adapted"), ids(http, "tuned")
        assert base != tuned
        load = {"lora_name": "late", "lora_path": str(adapters[2])}
        assert http.post("/v1/load_lora_adapter", json=load).status_code == 400, "of which model?"
        assert http.post("/v1/load_lora_adapter?model=adapted", json=load).status_code == 200
        assert ids(http, "late") not in (base, tuned)
        assert "late" in states(http)
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
        assert http.post("/v1/completions", json={"model": "late", "prompt": PROMPT}).status_code == 404
        vector = http.post("/v1/embeddings", json={"model": "vectors", "input": "A text."}).json()["data"][0][
            "embedding"
        ]
        assert len(vector) > 8
        assert ids(http, "tuned") == tuned


def test_a_request_that_kills_its_workers_is_found_by_its_model_and_others_notice_nothing(
    each: Server, poison: Path
) -> None:
    with client(each) as http, client(each) as others:
        long = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}
        expected, undisturbed = ids(http, "adapted"), complete(http, "narrow", **long)["choices"][0]["text"]
        pids = {name: http.get(f"/v1/models/{name}").json()["vllm_lite"]["pid"] for name in ("adapted", "narrow")}
        workers = set(family(pids["narrow"]))
        stream = Stream(others, "narrow", **long)
        poison.touch()
        try:
            body = {"model": "adapted", "prompt": [POISON, 5, 6], "max_tokens": 40, "ignore_eos": True}
            with ThreadPoolExecutor(2) as threads:
                asked = threads.submit(http.post, "/v1/completions", json=body)
                beside = threads.submit(ids, http, "adapted")
                answer = asked.result()
            assert beside.result() == expected, "another request of the same model goes on"
        finally:
            poison.unlink()
        assert answer.status_code == 400, "clients send a 500 again"
        assert "was ended because the workers died" in answer.json()["error"]["message"]
        assert stream.result() == undisturbed
        assert workers <= set(family(pids["narrow"])), "nobody of another model was replaced"
        assert ids(http, "adapted") == expected
        assert http.get("/v1/models/adapted").json()["vllm_lite"]["pid"] == pids["adapted"]
        lines = http.get("/metrics").text.splitlines()
    poisoned = [
        line for line in lines if line.startswith("vllm_lite:poisoned_requests_total") and not line.endswith(" 0.0")
    ]
    assert len(poisoned) == 1
    assert 'model_name="adapted"' in poisoned[0]


def test_clients_of_llama_swap(each: Server) -> None:
    """List, switch, look, go past the router, unload."""
    with client(each) as http:
        assert {"org/split", "narrow", "small", "vectors"} <= {
            card["id"] for card in http.get("/v1/models").json()["data"]
        }
        body = {"model": "small", "messages": [SAY], "max_tokens": 4, "temperature": 0}
        said = http.post("/v1/chat/completions", json=body).json()["choices"]
        assert {"model": "narrow", "state": "ready"} in http.get("/running").json()["running"]
        past = http.post("/upstream/narrow/v1/chat/completions", json={**body, "model": "narrow"})
        assert (past.status_code, past.json()["choices"]) == (200, said)
        assert http.get("/upstream/org/split/health").status_code == 200, "its name has a slash"
        assert http.get("/upstream/nobody/health").status_code == 404
        assert http.post("/upstream/narrow/sleep?level=1").status_code == 400
        assert http.get("/unload").status_code == 200
        until(lambda: set(states(http).values()) == {"unloaded"}, "the end of all")
        assert http.get("/running").json() == {"running": []}
        assert http.post("/models/load", json={"model": "small"}).json() == {"success": True}
        until(lambda: states(http)["narrow"] == "loaded", "a load without a request")
        with http.stream("POST", "/models/load", json={"model": "narrow", "stream": True}) as events:
            last = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")][-1]
        assert (last["model"], last["status"]) == ("narrow", "loaded")
        assert http.post("/unload", json={"model": "nobody"}).status_code == 404
        assert http.post("/unload", json={"model": "vectors"}).json() == {"success": True}
        assert states(http)["narrow"] == "loaded", "another was named"
        assert http.post("/unload", json={"model": "narrow"}).json() == {"success": True}
        until(lambda: states(http)["narrow"] == "unloaded", "the end of narrow")
        assert http.post("/unload").json() == {"msg": "ok"}


def test_requests_of_open_webui(each: Server) -> None:
    """With Ollama's API: version, tags, running models, a description, a streamed chat, vectors, and unloading. With
    OpenAI's: models and a chat."""
    with client(each) as http, closing(ollama.Client(host=each.url, timeout=scaled(60))) as ours:
        assert http.get("/api/version").json()["version"]
        tags = [model["model"] for model in http.get("/api/tags").json()["models"]]
        assert "org/split:latest" in tags
        assert http.post("/api/show", json={"name": "narrow:latest"}).json()["details"]["family"] == "llama"
        chat = {"model": "narrow:latest", "messages": [SAY], "options": {"num_predict": 4}, "keep_alive": "5m"}
        with http.stream("POST", "/api/chat", json={**chat, "stream": True}) as answer:
            pieces = [json.loads(line) for line in answer.iter_lines() if line]
        assert pieces[-1]["done"]
        assert "narrow:latest" in [model.model for model in ours.ps().models]
        assert len(http.post("/api/embed", json={"model": "vectors:latest", "input": ["a"]}).json()["embeddings"]) == 1
        body = {"model": "narrow:latest", "messages": [SAY], "max_tokens": 4, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
        unload = {"model": "narrow:latest", "keep_alive": 0, "prompt": "", "suffix": "", "options": None}
        assert http.post("/api/generate", json=unload).status_code == 200
        until(lambda: states(http)["narrow"] == "unloaded", "the end of narrow")
        assert http.post("/api/generate", json=unload).json()["done_reason"] == "unload"
        assert states(http)["narrow"] == "unloaded", "it was not loaded for that"
