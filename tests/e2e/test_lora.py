"""Adapters over real processes: tokens of merged weights in every dialect, at run time, through deaths of processes."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.reference import Reference
from tests.http_server import Server, children, client, engine_of, serving, short_socket, until
from tests.lora_adapters import make_adapter, merge
from vllm_lite import LLM, AsyncClient, LoRARequest, SamplingParams
from vllm_lite.errors import ModelError, RequestError

ADMIN = {"Authorization": "Bearer sk-admin"}
HEADERS = ADMIN
PROMPTS = [list(range(3, 40)), list(range(60, 80)), [5, 6, 7]]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Adapted(NamedTuple):
    """A checkpoint, its adapters by their names, and the tokens of each prompt by the name ("" for none)."""

    base: Path
    adapters: dict[str, Path]
    tokens: dict[str, list[list[int]]]


def greedy(path: Path) -> list[list[int]]:
    reference = Reference(path)
    return [reference.generate(prompt).tokens[:NUM_TOKENS] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapted")
    base = make_checkpoint(folder / "base")
    adapters, tokens = {}, {"": greedy(base)}
    for seed, name in enumerate(("sql", "poems", "both"), start=1):
        targets = ["q_proj", "v_proj", "down_proj"] if name == "sql" else "all-linear"
        adapters[name] = make_adapter(base, folder / name, targets, seed=seed, rank=4 * seed)
        tokens[name] = greedy(merge(base, adapters[name], folder / f"merged-{name}"))
    assert len({str(each) for each in tokens.values()}) == len(tokens)
    return Adapted(base, adapters, tokens)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_of_mixed_batches_match_merged_weights(adapted: Adapted, ranks: int) -> None:
    """Three adapters and none in one batch, over room for two, twice: the second time there are prefixes to be hit."""
    requests = [None, *(LoRARequest(name, 1, path) for name, path in adapted.adapters.items())]
    prompts = [prompt for _ in requests for prompt in PROMPTS]
    each = [request for request in requests for _ in PROMPTS]
    expected = [tokens for request in requests for tokens in adapted.tokens[request.lora_name if request else ""]]
    settings: dict[str, Any] = {"tensor_parallel_size": ranks, "single_process": True, "max_loras": 2}
    with LLM(adapted.base, dtype="float32", enable_lora=True, **settings) as llm:
        for turn in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=each)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            hits = [output.num_cached_tokens for output in outputs]
            assert hits == ([32, 16, 0] * 4 if turn else [0] * 12)
        with pytest.raises(RequestError, match="adapter 'other' is not loaded; give its lora_path"):
            llm.generate([1], GREEDY, lora_request=LoRARequest("other"))
        with pytest.raises(RequestError, match=r"adapter 'bad': .*adapter_config\.json: no such file"):
            llm.generate([1], GREEDY, lora_request=LoRARequest("bad", 2, "/nowhere"))


def test_vectors_in_python_match_merged_weights(adapted: Adapted) -> None:
    def vectors(llm: LLM, request: LoRARequest | None = None) -> np.ndarray[Any, Any]:
        found = llm.embed(PROMPTS, use_tqdm=False, lora_request=request)
        return np.array([each.outputs.embedding for each in found])

    settings: dict[str, Any] = {"dtype": "float32", "single_process": True, "convert": "embed"}
    with LLM(adapted.base.parent / "merged-sql", **settings) as llm:
        expected = vectors(llm)
    with LLM(adapted.base, enable_lora=True, **settings) as llm:
        assert np.abs(vectors(llm, LoRARequest("sql", 1, adapted.adapters["sql"])) - expected).max() < 1e-5
        assert np.abs(vectors(llm) - expected).max() > 1e-2
        llm.sleep()
        with pytest.raises(RequestError, match="the engine sleeps"):
            vectors(llm)


def test_engines_without_adapters_and_adapters_that_do_not_fit_are_refused(adapted: Adapted) -> None:
    one = LoRARequest("sql", 1, adapted.adapters["sql"])
    with LLM(adapted.base, single_process=True) as llm, pytest.raises(RequestError, match="start it with enable_lora"):
        llm.generate([1], GREEDY, lora_request=one)
    modules = [{"name": "both", "path": str(adapted.adapters["both"])}]
    with pytest.raises(ModelError, match="has rank 12, and max_lora_rank is 8; start with --max-lora-rank 12"):
        LLM(adapted.base, enable_lora=True, max_lora_rank=8, lora_modules=modules, single_process=True)


@pytest.fixture(scope="module")
def server(adapted: Adapted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    address = short_socket(tmp_path_factory.mktemp("s"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    flags = ["--dtype", "float32", "--enable-lora", "--max-loras", "3", "--served-model-name", "base"]
    flags += ["--lora-modules", f"sql={adapted.adapters['sql']}", "--admin-api-key", "sk-admin", "--address", address]
    with serving("--model", str(adapted.base), "--convert", "embed", *flags, template=template) as server:
        yield server


def load(http: httpx.Client, name: str, path: Path, status: int = 200, **more: Any) -> str:
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})
    assert answer.status_code == status, answer.text
    return answer.text if status == 200 else answer.json()["error"]["message"]


def unload(http: httpx.Client, name: str, status: int = 200) -> str:
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": name})
    assert answer.status_code == status, answer.text
    return answer.text


def tokens_of(http: httpx.Client, model: str, prompt: list[int], **more: Any) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more}
    answer = http.post("/v1/completions", json={**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def models(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in http.get("/v1/models").json()["data"]}


def test_adapters_are_models_that_come_and_go(http: httpx.Client, adapted: Adapted) -> None:
    assert models(http)["sql"]["parent"] == "base"
    assert models(http)["sql"]["root"] == str(adapted.adapters["sql"])
    poems = adapted.adapters["poems"]
    assert load(http, "poems", poems) == "Success: LoRA adapter 'poems' added successfully."
    assert list(models(http)) == ["base", "sql", "poems"]
    assert http.get("/v1/models/poems").json()["parent"] == "base"
    for name in ("sql", "poems"):
        for prompt, tokens in zip(PROMPTS, adapted.tokens[name], strict=True):
            assert tokens_of(http, name, prompt) == tokens
    assert tokens_of(http, "base", PROMPTS[0]) == adapted.tokens[""][0]
    assert "has already been loaded" in load(http, "poems", poems, 400)
    load(http, "poems", adapted.adapters["both"], load_inplace=True)
    assert tokens_of(http, "poems", PROMPTS[0]) == adapted.tokens["both"][0]
    assert "Both 'lora_name' and 'lora_path' must be provided." in load(http, "", poems, 400)
    assert "adapter_config.json: no such file" in load(http, "nothing", Path("/nowhere"), 404)
    assert "not the name of a file" in load(http, "nothing", Path("/no\0where"), 404)
    assert "cannot be read" in load(http, "nothing", Path("/" + "x/" * 2040), 404)
    assert "the model itself is called 'base'" in load(http, "base", poems, 400)
    metrics = http.get("/metrics").text
    assert 'vllm:lora_requests_info{engine="0",max_lora="3",' in metrics
    assert unload(http, "poems") == "Success: LoRA adapter 'poems' removed successfully."
    assert "The lora adapter 'poems' cannot be found." in unload(http, "poems", 404)
    assert "poems" not in models(http)
    answer = http.post("/v1/completions", json={"model": "poems", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_a_cached_prompt_is_explained_for_each_adapter(http: httpx.Client) -> None:
    prompt = [90 - number % 20 for number in range(70)]  # of no other test
    tokens_of(http, "sql", prompt)
    found = {}
    for model in ("sql", "base"):
        answer = http.post("/debug/prefix", json={"model": model, "prompt": prompt})
        assert answer.status_code == 200, answer.text
        found[model] = answer.json()["miss"], answer.json()["num_cached_tokens"] > 0
    assert found == {"sql": ("all_cached", True), "base": ("other_keys", False)}


def test_only_admins_load_and_unload(server: Server, adapted: Adapted) -> None:
    with client(server) as http:
        for path in ("load", "unload"):
            body = {"lora_name": "x", "lora_path": str(adapted.adapters["sql"])}
            assert http.post(f"/v1/{path}_lora_adapter", json=body).status_code == 401


def test_every_api_accepts_an_adapter_as_its_model(http: httpx.Client) -> None:
    """Answers in every API are the adapter's, and have its name."""
    chat = [{"role": "user", "content": "The quick brown fox"}]
    few, options = {"max_tokens": 6, "temperature": 0}, {"num_predict": 6, "temperature": 0}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "The quick brown fox", **few},
        "/v1/chat/completions": {"messages": chat, **few},
        "/v1/messages": {"messages": chat, **few},
        "/v1/responses": {"input": "The quick brown fox", "max_output_tokens": 16, "temperature": 0},
        "/inference/v1/generate": {"token_ids": PROMPTS[0], "sampling_params": few},
        "/api/generate": {"prompt": "The quick brown fox", "stream": False, "options": options},
        "/api/chat": {"messages": chat, "stream": False, "options": options},
    }
    changing = {"id", "created", "created_at", "completed_at", "request_id", "model"}
    for path, body in bodies.items():
        answers = {}
        for model in ("base", "sql", "sql:latest")[: 3 if path.startswith("/api") else 2]:
            answer = http.post(path, json={"model": model, **body})
            assert answer.status_code == 200, (path, answer.text)
            answers[model] = answer.json()
            assert answers[model].get("model", model) == model
        base, adapted = ({k: v for k, v in answers[m].items() if k not in changing} for m in ("base", "sql"))
        assert str(base) != str(adapted), path
    assert "sql:latest" in [model["name"] for model in http.get("/api/tags").json()["models"]]


def test_vectors_match_the_adapter(http: httpx.Client) -> None:
    """Asked for in turn, as prefixes of the one are none of the other."""

    def vector(path: str, model: str) -> Any:
        answer = http.post(path, json={"model": model, "input": "The quick brown fox", "prompt": "The quick brown fox"})
        assert answer.status_code == 200, answer.text
        return answer.json()["embedding"] if path.startswith("/api") else answer.json()["data"][0]["embedding"]

    for path in ("/v1/embeddings", "/api/embeddings"):
        base, own, again = (vector(path, model) for model in ("base", "sql", "base"))
        assert base == pytest.approx(again, abs=1e-6)
        assert max(abs(one - other) for one, other in zip(base, own, strict=True)) > 0.01


def test_an_adapter_unloaded_while_it_runs_and_deaths_of_processes(
    server: Server, http: httpx.Client, adapted: Adapted, tmp_path: Path
) -> None:
    """A worker is killed while two adapters run, then the engine: streams continue with the same tokens, and an adapter
    that was loaded over HTTP is loaded again."""
    folder = Path(shutil.copytree(adapted.adapters["poems"], tmp_path / "poems"))
    load(http, "poems", folder)
    long = {"max_tokens": 440}
    expected = {name: tokens_of(http, name, PROMPTS[1], **long) for name in ("sql", "poems", "base")}
    for victim in ("worker", "engine"):
        found: dict[str, list[int]] = {}

        def run(name: str, found: dict[str, list[int]] = found) -> None:
            found[name] = tokens_of(http, name, PROMPTS[1], **long)

        threads = [threading.Thread(target=run, args=(name,)) for name in expected]
        with engine_of(server) as session:
            for thread in threads:
                thread.start()
            until(lambda session=session: session.stats().running_adapters == ["poems", "sql"], "both adapters")  # type: ignore[misc]
        os.kill(children(server.process.pid)[f"vllm_lite.{victim}.process"], signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert found == expected
        assert list(models(http)) == ["base", "sql", "poems"]
    running = threading.Thread(target=run, args=("poems",))
    found.clear()
    with engine_of(server) as session:
        running.start()
        until(lambda: session.stats().running_adapters == ["poems"], "the adapter")
    unload(http, "poems")
    running.join()
    assert found["poems"] == expected["poems"]


async def test_clients_in_python_load_adapters_by_path(server: Server, adapted: Adapted) -> None:
    args = server.process.args
    assert isinstance(args, list)
    address = str(args[args.index("--address") + 1])

    async with AsyncClient(address) as one:
        request = LoRARequest("both", 3, adapted.adapters["both"])
        async for output in one.generate(PROMPTS[0], GREEDY, lora_request=request):
            last = output
        assert list(last.outputs[0].token_ids) == adapted.tokens["both"][0]
        assert "both" in one.adapters
        vectors = {}
        for adapter in (None, request):
            async for made in one.encode(PROMPTS[0], pooling_task="embed", lora_request=adapter):
                vectors[adapter] = made.outputs.embedding
        assert vectors[None] != vectors[request]
        await one.unload_adapter("both")
        with pytest.raises(RequestError, match="there is no adapter 'both'"):
            await one.unload_adapter("both")
        with pytest.raises(RequestError, match="no such file"):
            await one.load_adapter("both", "/nowhere")
