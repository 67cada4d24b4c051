"""Vectors and scores over HTTP, with official clients: two servers of tiny random models.

The first makes vectors and generates, in the same steps; the second scores pairs. The reference is transformers.
"""

import base64
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import pytest
from openai import BadRequestError, OpenAI
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.deadlines import scaled
from tests.e2e.test_processes import family
from tests.http_server import Server, client, post, serving
from tests.pooled import add_modules, logits, vectors, write_pooled

WITHIN = 1e-5
PREFIX = "find this: "
TEXTS = ["The quick brown fox", "a small engine reads a page, and writes a page", "x", "Why did you let it go?"]


def with_processor(path: Path, *, pairs: bool) -> Path:
    """Have the tokenizer add special tokens: at the end of a text, or as BERT's around two."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    if pairs:
        both = "<s>:0 $A:0 </s>:0 $B:1 </s>:1"
        processor = TemplateProcessing(single="<s> $A </s>", pair=both, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.post_processor = processor
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_pooled(tmp_path_factory.mktemp("embedder") / "m", "Qwen3ForCausalLM")
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": PREFIX}}))
    return add_modules(with_processor(path, pairs=False), "last")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_pooled(tmp_path_factory.mktemp("reranker") / "m", "BertForSequenceClassification", {"num_labels": 1})
    return with_processor(path, pairs=True)


@pytest.fixture(scope="module")
def server(embedder: Path) -> Iterator[Server]:
    flags = ["--dtype", "float32", "--cpu-threads", "1", "--served-model-name", "vectors", "--max-num-seqs", "8"]
    with serving("--model", str(embedder), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def scores(reranker: Path) -> Iterator[httpx.Client]:
    with (
        serving("--model", str(reranker), "--dtype", "float32", "--cpu-threads", "1") as server,
        client(server) as http,
    ):
        yield http


def ids_of(path: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


def test_the_openai_package_gets_vectors(server: Server, embedder: Path) -> None:
    """In base64, the package's default, and as floats; for texts and token ids, with fewer dimensions, and
    truncated."""
    prompts = ids_of(embedder, TEXTS)
    want = vectors(embedder, prompts, "last").numpy()
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=scaled(30)) as api:
        for given in (TEXTS, prompts):
            for more in ({}, {"encoding_format": "float"}):
                asked: Any = {"input": given, **more}
                found = api.embeddings.create(model="vectors", **asked)
                assert [each.index for each in found.data] == [0, 1, 2, 3]
                assert np.abs(np.array([each.embedding for each in found.data]) - want).max() < WITHIN
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, prompts))
        short = api.embeddings.create(model="vectors", input=TEXTS[0], dimensions=8).data[0].embedding
        assert np.abs(short - want[0, :8] / np.linalg.norm(want[0, :8])).max() < WITHIN
        cut = api.embeddings.create(
            model="vectors", input=TEXTS[1], extra_body={"truncate_prompt_tokens": 6, "normalize": False}
        )
        (end,) = ids_of(embedder, [""])
        raw = vectors(embedder, [prompts[1][:5] + end], "last", finish=lambda states: states).numpy()
        assert np.abs(cut.data[0].embedding - raw[0]).max() < 1e-4
        bad: list[tuple[Any, str]] = [
            ({"input": TEXTS[0], "dimensions": 65}, "dimensions must be at most the 64"),
            ({"input": "word " * 900}, "truncate_prompt_tokens"),
            ({"input": []}, "got an empty list"),
            ({"input": ["x", "word " * 900]}, "text 1: This model.s maximum context length is 160 tokens"),
            ({"input": [[1, 400]]}, "token ids must be between 0 and 383"),
        ]
        for wrong, message in bad:
            with pytest.raises(BadRequestError, match=message):
                api.embeddings.create(model="vectors", **wrong)


def test_other_forms_of_vectors(http: httpx.Client, embedder: Path) -> None:
    prompts = ids_of(embedder, TEXTS[:2])
    want = vectors(embedder, prompts, "last").numpy()
    local = ollama.Client(host=str(http.base_url))
    with closing(local._client):
        assert np.abs(np.array(local.embed("vectors", TEXTS[:2]).embeddings) - want).max() < WITHIN
        assert np.abs(np.array(local.embeddings("vectors", TEXTS[0]).embedding) - want[0]).max() < WITHIN
        assert local.show("vectors").capabilities == ["completion", "embedding"]
    rows = post(http, "/pooling", {"input": TEXTS[0], "task": "token_embed"})["data"][0]["data"]
    assert np.abs(np.array(rows[-1]) - want[0]).max() < WITHIN
    assert len(rows) == len(prompts[0])
    coded = post(http, "/pooling", {"input": TEXTS[0], "encoding_format": "base64"})["data"][0]["data"]
    assert np.abs(np.frombuffer(base64.b64decode(coded), "<f4") - want[0]).max() < WITHIN
    similar = post(http, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[:2]})["data"]
    assert np.abs(np.array([each["score"] for each in similar]) - [1.0, want[0] @ want[1]]).max() < WITHIN
    assert post(http, "/v1/models/vectors", {}, 405)["error"]
    assert http.get("/v1/models").json()["data"][0]["vllm_lite"]["tasks"] == ["generate", "embed", "token_embed"]
    error = post(http, "/pooling", {"input": "x", "task": "classify"}, 400)["error"]["message"]
    assert error == "the model 'vectors' does not support the task 'classify': it can be asked to embed or token_embed"
    missing = post(http, "/classify", {"input": "x"}, 404)["error"]
    assert missing["message"] == "this model classifies no texts: it can be asked to embed or token_embed"
    assert (missing["type"], missing["param"]) == ("NotFoundError", "model")


def test_vectors_in_coheres_form(http: httpx.Client, embedder: Path) -> None:
    """Vectors of unchanged texts, of texts after a prompt from the model's folder, of texts cut at either end, and
    vectors as bits."""
    prompts = ids_of(embedder, TEXTS)
    want = vectors(embedder, prompts, "last").numpy()
    found = post(http, "/v2/embed", {"texts": TEXTS, "input_type": "query", "embedding_types": ["float", "ubinary"]})
    assert (found["response_type"], found["texts"]) == ("embeddings_by_type", TEXTS)
    led = vectors(embedder, ids_of(embedder, [PREFIX + text for text in TEXTS]), "last").numpy()
    assert np.abs(np.array(found["embeddings"]["float"]) - led).max() < WITHIN
    assert found["embeddings"]["ubinary"] == np.packbits(led >= 0, axis=-1).tolist()
    plain = post(http, "/v2/embed", {"texts": TEXTS})
    assert np.abs(np.array(plain["embeddings"]["float"]) - want).max() < WITHIN
    assert plain["meta"]["billed_units"] == {"input_tokens": sum(map(len, prompts)), "image_tokens": 0}
    (end,) = ids_of(embedder, [""])
    longest = max(prompts, key=len)
    text = TEXTS[prompts.index(longest)]
    for side, kept in (("END", longest[:3]), ("START", longest[:-1][-3:])):
        cut = post(http, "/v2/embed", {"texts": [text], "truncate": side, "max_tokens": 4})["embeddings"]["float"]
        assert np.abs(np.array(cut) - vectors(embedder, [kept + end], "last").numpy()).max() < WITHIN
    bad: list[tuple[dict[str, Any], str]] = [
        ({"texts": [text], "truncate": "NONE", "max_tokens": 4}, "over max_tokens of 4; truncate it at START or END"),
        (
            {"texts": ["x"], "input_type": "clustering"},
            "Unsupported input_type 'clustering': the prompts that this model has are: query",
        ),
        ({"texts": []}, "Expected `array` of length >= 1"),
        ({}, "give either texts or inputs"),
        ({"images": ["data:"]}, "images are not supported"),
        ({"texts": ["x"], "output_dimension": 12, "embedding_types": ["binary"]}, "a multiple of 8 numbers"),
        (
            {"texts": ["x"], "embedding_types": ["int8"]},
            "`embedding_types[0]` must be one of float, binary, ubinary, base64, got 'int8'",
        ),
    ]
    for wrong, message in bad:
        assert message in post(http, "/v2/embed", wrong, 400)["error"]["message"]


def test_vectors_come_as_bytes_of_any_type(http: httpx.Client) -> None:
    body = {"input": TEXTS[0], "encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
    coded = base64.b64decode(post(http, "/v1/embeddings", body)["data"][0]["embedding"])
    answer = http.post("/v1/embeddings", json={**body, "encoding_format": "bytes"})
    assert answer.content == coded
    assert json.loads(answer.headers["metadata"])["data"][0]["shape"] == [len(coded) // 2]
    exact = post(http, "/v1/embeddings", {"input": TEXTS[0]})["data"][0]["embedding"]
    assert np.abs(np.frombuffer(coded, ">f2") - exact).max() < 1e-3
    error = post(http, "/v1/embeddings", {**body, "embed_dtype": "int8"}, 400)["error"]
    assert error["param"] == "embed_dtype"


def test_pairs_are_ranked_as_transformers_ranks_them(scores: httpx.Client, reranker: Path) -> None:
    rng = random.Random(1)
    words = " ".join(TEXTS).split()
    documents = [" ".join(rng.choices(words, k=rng.randint(1, 20))) for _ in range(120)]
    pairs = Tokenizer.from_file(str(reranker / "tokenizer.json")).encode_batch([(TEXTS[0], each) for each in documents])
    want = logits(reranker, [each.ids for each in pairs], [each.type_ids for each in pairs]).sigmoid()[:, 0]
    body = {"query": TEXTS[0], "documents": documents}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = post(scores, path, body)["results"]
        assert [each["index"] for each in found] == want.argsort(descending=True, stable=True).tolist()
        assert max(abs(each["relevance_score"] - want[each["index"]]) for each in found) < WITHIN
    best = post(scores, "/rerank", body | {"top_n": 2, "documents": [{"text": each} for each in documents]})["results"]
    assert [each["index"] for each in best] == [each["index"] for each in found[:2]]
    for one, other in zip(best, found, strict=False):  # their last bits depend on the step that computes them
        assert one["relevance_score"] == pytest.approx(other["relevance_score"], abs=WITHIN)
    assert best[0]["document"] == {"text": documents[best[0]["index"]]}
    both = post(scores, "/score", {"queries": TEXTS[0], "documents": documents[:3]})["data"]
    assert [each["score"] for each in both] == pytest.approx(want[:3].tolist(), abs=WITHIN)
    one = post(scores, "/classify", {"input": TEXTS[0]})["data"][0]
    assert (one["label"], one["num_classes"]) == ("LABEL_0", 1)
    for path, wrong, message in (
        ("/rerank", {"query": "x", "documents": []}, "length >= 1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "2 texts cannot be paired with 1"),
        ("/score", {"text_1": "a"}, "give text_1 and text_2"),
        ("/v1/embeddings", {"input": "x"}, "does not support the task 'embed': it can be asked to classify or score"),
        ("/v1/completions", {"prompt": "x"}, "generates no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "generates no text"),
        ("/v1/responses", {"input": "x"}, "generates no text"),
    ):
        assert message in post(scores, path, wrong, 400)["error"]["message"]


def test_each_side_of_a_pair_may_be_cut(scores: httpx.Client, reranker: Path) -> None:
    ids = Tokenizer.from_file(str(reranker / "tokenizer.json")).encode(TEXTS[0], add_special_tokens=False)
    short = TEXTS[0][: ids.offsets[2][1]]
    whole = {"query": "x", "documents": [TEXTS[0], "y"], "max_tokens_per_doc": 0}
    cut = post(scores, "/rerank", {**whole, "max_tokens_per_doc": 3})
    asked = {**whole, "documents": [short, "y"]}
    by_hand = post(scores, "/rerank", asked)
    assert cut["usage"] == by_hand["usage"] != post(scores, "/rerank", whole)["usage"]
    assert_alike(
        [each["relevance_score"] for each in cut["results"]], [each["relevance_score"] for each in by_hand["results"]]
    )
    pair = {"text_1": TEXTS[0], "text_2": "y", "max_tokens_per_query": 3}
    by_hand = post(scores, "/score", {"text_1": short, "text_2": "y"})
    assert_alike(post(scores, "/score", pair)["data"], by_hand["data"])
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        assert post(scores, "/rerank", {**whole, name: -5}, 400)["error"]["param"] == name


def assert_alike(found: Any, wanted: Any) -> None:
    """The same, but for numbers that depend on the requests that were computed together."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        return assert_alike(list(found.values()), list(wanted.values()))
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other)
        return None
    assert found == (pytest.approx(wanted, abs=WITHIN) if isinstance(wanted, float) else wanted)
    return None


def test_invocations_are_answered_as_their_fields_say(http: httpx.Client, scores: httpx.Client) -> None:
    bodies: list[tuple[httpx.Client, str, dict[str, Any], str]] = [
        (http, "/v1/embeddings", {"input": TEXTS[0]}, "data"),
        (http, "/pooling", {"input": TEXTS[0], "task": "token_embed"}, "data"),
        (scores, "/rerank", {"query": "x", "documents": TEXTS}, "results"),
        (scores, "/score", {"text_1": "x", "text_2": TEXTS}, "data"),
        (scores, "/classify", {"input": TEXTS}, "data"),
    ]
    for there, path, body, name in bodies:
        assert_alike(post(there, "/invocations", body)[name], post(there, path, body)[name])
    named = [post(http, path, {"input": "x", "request_id": "mine"})["id"] for path in ("/pooling", "/v1/embeddings")]
    assert named == ["pooling-mine", "embd-mine"]
    assert "give messages for a chat" in post(scores, "/invocations", {"x": 1}, 400)["error"]["message"]


def test_a_long_list_waits_for_others_and_outlives_a_worker(server: Server, http: httpx.Client, embedder: Path) -> None:
    """1,500 texts in one body, with short ones and a stream beside them; the worker is killed meanwhile."""
    rng = random.Random(2)
    many = [[rng.randrange(3, 384) for _ in range(rng.randint(1, 30))] for _ in range(1500)]
    answers: list[Any] = []
    (alone,) = vectors(embedder, ids_of(embedder, TEXTS[:1]), "last").numpy()
    greedy = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    text = post(http, "/v1/completions", greedy)["choices"][0]["text"]
    thread = threading.Thread(
        target=lambda: answers.append(post(http, "/v1/embeddings", {"input": many, "encoding_format": "base64"}))
    )
    thread.start()
    deadline_s = time.monotonic() + scaled(60)
    while http.get("/load").json()["server_load"] == 0:
        assert time.monotonic() < deadline_s
    (worker,) = [pid for pid in family(server.process.pid) if b"worker" in Path(f"/proc/{pid}/comm").read_bytes()][:1]
    os.kill(worker, signal.SIGKILL)
    assert thread.is_alive()
    found = post(http, "/v1/embeddings", {"input": TEXTS[0]})["data"][0]["embedding"]
    assert np.abs(np.array(found) - alone).max() < WITHIN
    assert post(http, "/v1/completions", greedy)["choices"][0]["text"] == text
    thread.join(scaled(60))
    assert len(answers) == 1
    got = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answers[0]["data"]]
    places = rng.sample(range(1500), 60)
    want = vectors(embedder, [many[place] for place in places], "last").numpy()
    assert np.abs(np.stack([got[place] for place in places]) - want).max() < WITHIN
    assert http.get("/load").json()["server_load"] == 0


def test_batch_files_take_vectors(server: Server, embedder: Path, tmp_path: Path) -> None:
    lines = [
        {"custom_id": "a", "url": "/v1/embeddings", "body": {"input": TEXTS[:2]}},
        {"custom_id": "b", "url": "/v1/score", "body": {"text_1": TEXTS[0], "text_2": TEXTS[0]}},
    ]
    (tmp_path / "in").write_text("".join(json.dumps({"method": "POST", **line}) + "\n" for line in lines))
    command = [sys.executable, "-m", "vllm_lite", "run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    subprocess.run([*command, "--url", server.url], check=True, timeout=scaled(60), capture_output=True)
    answers = (tmp_path / "out").read_text().splitlines()
    data = {answer["custom_id"]: answer["response"]["body"]["data"] for answer in map(json.loads, answers)}
    first, second = data["a"], data["b"]  # in whatever order they were done
    want = vectors(embedder, ids_of(embedder, TEXTS[:2]), "last").numpy()
    assert np.abs(np.array([each["embedding"] for each in first]) - want).max() < WITHIN
    assert second[0]["score"] == pytest.approx(1.0, abs=WITHIN)
