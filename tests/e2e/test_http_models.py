"""Several models behind one address: swaps, streams over a swap, deaths, Ollama's client, keys, the end."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deadlines import scaled
from tests.e2e.test_processes import family
from tests.http_server import Server, client, until

PROMPT = "Once upon a time"
LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}


def write(folder: Path, text: str) -> str:
    path = folder / "models.yaml"
    path.write_text(text)
    return str(path)


@contextmanager
def routing(file: str, *flags: str, env: dict[str, str] | None = None, fresh: bool = False) -> Iterator[Server]:
    server = Server("--models", file, "--port", "0", "--device", "cpu", *flags, env=env, fresh=fresh)
    try:
        server.wait_for("Try:")
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def swapping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models, of which one is loaded at a time, and an entry with a fault. Steps are small, so that computing a
    prompt takes longer than loading its KV, and KV is loaded."""
    folder = tmp_path_factory.mktemp("swapping")
    text = f"""
    models_max: 1
    models_slice_s: 0.1
    defaults: {{dtype: float32, kv_cache_dir: {folder / "kv"}, max_num_seqs: 4, max_num_batched_tokens: 32}}
    models:
      red: {{model: demo, aliases: [gpt-4o]}}
      blue: {{model: demo, max_model_len: 600}}
      bad: {{model: demo, max_modell_len: 5}}
    """
    with routing(write(folder, text)) as server:
        yield server


def complete(http: httpx.Client, model: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 40, **more}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def states(http: httpx.Client) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in http.get("/v1/models").json()["data"]}


class Stream(threading.Thread):
    """A stream that is read on a thread: its text, when each piece came, and its last chunk."""

    def __init__(self, http: httpx.Client, model: str, **more: Any) -> None:
        super().__init__(daemon=True)
        self._http = http
        self._body = {"model": model, "prompt": PROMPT, "stream": True, **LONG, **more}
        self._began = threading.Event()
        self.text, self.times, self.last = "", list[float](), dict[str, Any]()
        self.start()
        assert self._began.wait(scaled(60))

    def run(self) -> None:
        with self._http.stream("POST", "/v1/completions", json=self._body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.last = json.loads(line[6:])
                    assert "error" not in self.last, self.last
                    self.text += self.last["choices"][0]["text"]
                    self.times.append(time.monotonic())
                    if len(self.times) == 3:
                        self._began.set()

    def result(self) -> str:
        self.join(scaled(60))
        assert not self.is_alive()
        assert self.last["choices"][0]["finish_reason"] == "length", self.last
        return self.text


def test_models_are_swapped_and_a_chat_finds_its_cache(swapping: Server) -> None:
    assert "not served: bad: unknown setting 'max_modell_len'; did you mean 'max_model_len'?" in swapping.output
    with client(swapping) as http:
        assert states(http) == dict.fromkeys(("red", "gpt-4o", "blue"), "unloaded") | {"bad": "failed"}
        refused = http.post("/v1/completions", json={"model": "bad", "prompt": PROMPT})
        assert refused.status_code == 503
        assert "did you mean 'max_model_len'" in refused.json()["error"]["message"]
        unloaded = http.post("/debug/prefix", json={"model": "red", "prompt": PROMPT})
        assert (unloaded.status_code, states(http)["red"]) == (409, "unloaded")
        assert "the model 'red' is unloaded, so nothing" in unloaded.json()["error"]["message"]
        missing = http.post("/v1/completions", json={"model": "green", "prompt": PROMPT})
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
        long = PROMPT * 30
        first = complete(http, "gpt-4o", prompt=long)
        assert first["model"] == "gpt-4o"
        assert states(http)["red"] == "loaded"
        other = complete(http, "blue", prompt=long)
        assert states(http) == {"red": "sleeping", "gpt-4o": "sleeping", "blue": "loaded", "bad": "failed"}
        assert other["choices"] == first["choices"]
        again = complete(http, "red", prompt=long + first["choices"][0]["text"])
        usage = again["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= usage["prompt_tokens"] - 32, usage  # whole blocks
        explained = http.post("/debug/prefix", json={"model": "red", "prompt": long})
        assert (explained.status_code, explained.json()["miss"]) == (200, "all_cached"), explained.text


def test_a_decision_is_made_by_the_model_that_it_names(swapping: Server) -> None:
    question = {"type": "choice", "instructions": "Which?", "criteria": {"one": None, "two": None}}
    with client(swapping) as http:
        found = http.post("/v1/systemone", json={"model": "red", "state": PROMPT, "questions": {"q": question}})
        assert found.status_code == 200, found.text
        assert found.json()["model"] == "red"
        assert set(found.json()["answers"]["q"]["probabilities"]) == {"one", "two"}
        missing = http.post("/v1/systemone", json={"model": "green", "state": PROMPT, "questions": {"q": question}})
        assert missing.status_code == 404


def test_a_stream_continues_over_a_swap_with_the_same_tokens(swapping: Server) -> None:
    with client(swapping) as http, client(swapping) as others:
        long = {**LONG, "max_tokens": 1800, "logprobs": 5}  # which takes longer
        undisturbed = complete(http, "red", **long)["choices"][0]["text"]
        stream = Stream(http, "red", **long)
        assert complete(others, "blue")["model"] == "blue"
        assert stream.result() == undisturbed
        metrics = http.get("/metrics").text
    families = {each.name: each for each in text_string_to_metric_families(metrics)}
    sleeps = {
        each.labels["model_name"]: each.value
        for each in families["vllm_lite:model_sleeps"].samples
        if each.name.endswith("_total")
    }
    assert sleeps["red"] >= 2
    names = {sample.labels["model_name"] for sample in families["vllm:generation_tokens"].samples}
    assert names == {"red", "blue"}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that generates, one that makes embeddings, and one with a separate key."""
    text = """
    models:
      writer: {model: demo, dtype: float32, pin: true}
      vectors: {model: demo, runner: pooling, dtype: float32}
      own: {model: demo, api_key: [secret]}
    """
    with routing(write(tmp_path_factory.mktemp("together"), text)) as server:
        yield server


def test_the_death_of_one_leaves_the_others_alone(together: Server) -> None:
    with client(together) as http, client(together) as others:
        undisturbed = complete(http, "writer", **LONG)["choices"][0]["text"]
        vectors = {"model": "vectors", "input": "A text."}
        before = others.post("/v1/embeddings", json=vectors).json()["data"]
        stream = Stream(http, "writer")
        described = others.get(f"/v1/requests/{stream.last['id']}")
        assert (described.status_code, described.json()["state"]) == (200, "running"), "its model is found by its id"
        assert others.delete("/v1/requests/cmpl-none").status_code == 404
        os.kill(http.get("/v1/models/vectors").json()["vllm_lite"]["pid"], signal.SIGKILL)
        assert others.post("/v1/embeddings", json=vectors).json()["data"] == before
        assert stream.result() == undisturbed


def test_vectors_beside_texts_by_ollamas_client(together: Server) -> None:
    with closing(ollama.Client(host=together.url, timeout=scaled(60))) as ours:
        names = [model.model for model in ours.list().models]
        assert names == ["writer:latest", "vectors:latest", "own:latest"]
        until(lambda: any(model.model == "writer:latest" for model in ours.ps().models), "the pinned model")
        said = ours.generate("writer", PROMPT, options={"temperature": 0, "num_predict": 8}, raw=True)
        assert said.response
        vector = ours.embed("vectors:latest", "A text.", keep_alive="10m").embeddings[0]
        assert len(vector) > 8
        running = {model.model: model for model in ours.ps().models}
        assert set(running) == {"writer:latest", "vectors:latest"}
        assert (running["vectors:latest"].size or 0) > 10 << 20
        shown = ours.show("writer")
        assert shown.details is not None
        assert shown.details.family == "llama"
        assert ours.show("own").capabilities == ["completion"], "it need not be loaded for that"
        ours.copy("writer", "author")
        assert "author:latest" in [model.model for model in ours.list().models]
        assert ours.delete("author").status == "success"
        with pytest.raises(ollama.ResponseError, match="is in the server's settings"):
            ours.delete("vectors")
        with pytest.raises(ollama.ResponseError, match="use bartowski/Llama"):
            ours.pull("llama3.2")
        assert ours.pull("writer").status == "success"
        ours.generate("vectors", keep_alive=0)
        until(lambda: [model.model for model in ours.ps().models] == ["writer:latest"], "the end of vectors")


def test_a_key_of_its_own(together: Server) -> None:
    with client(together) as http:
        assert http.post("/models/load", json={"model": "own"}).json() == {"success": True}
        body = {"model": "own", "prompt": PROMPT, "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 401
        answer = http.post("/v1/completions", json=body, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200, answer.text
        assert states(http)["own"] == "loaded"
        assert http.post("/models/unload", json={"model": "own"}).json() == {"success": True}
        until(lambda: states(http)["own"] == "unloaded", "the end of own")
        forwarded = http.post("/models/unload", json={"model": "own"}, headers={"X-Forwarded-For": "10.0.0.1"})
        assert forwarded.status_code == 403
        assert http.post("/sleep?level=1").status_code == 400


def test_the_end_lets_streams_end_and_leaves_no_process(together: Server) -> None:
    """The last test of this server."""
    with client(together) as http:
        stream = Stream(http, "writer", max_tokens=150)
        processes = family(together.process.pid)
        assert len(processes) >= 4
        together.process.send_signal(signal.SIGTERM)
        stream.result()
        assert together.wait() == 0
        until(lambda: not [pid for pid in processes if _is_alive(pid)], "the end of all processes")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--models", "/nowhere"), "'/nowhere' is neither a file nor a folder"),
        (("demo", "--models", "/nowhere"), "--models has the models to serve; take 'demo' out"),
        (("--models-max", "2"), "models_max is for --models"),
        (("--models", "hub", "--models-memory", "lots"), "expected an amount of memory"),
    ],
)
def test_models_that_cannot_be_served_end_the_start(flags: tuple[str, ...], why: str) -> None:
    server = Server(*flags)
    try:
        assert server.wait() == 2
        assert why in server.output
        assert server.output.count("\n") == 1
    finally:
        server.close()
