"""Entities over HTTP, and vectors of texts longer than the model: two servers, of tiny random models."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.entities import BIOES, pipeline_of, plain, texts, word_pieces, write_classifier
from tests.http_server import client, post, serving
from tests.pooled import OSS, token_logits, vectors, write_pooled
from vllm_lite.client.text.tokenizer import Tokenizer

FLAGS = ["--dtype", "float32", "--cpu-threads", "1"]
LONG = " ".join(texts(40)[7:])[:900]


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = "OpenAIPrivacyFilterForTokenClassification"
    return write_classifier(tmp_path_factory.mktemp("tagger") / "m", name, BIOES, **OSS | {"num_labels": len(BIOES)})


@pytest.fixture(scope="module")
def tags(tagger: Path) -> Iterator[httpx.Client]:
    with serving("--model", str(tagger), *FLAGS, "--max-model-len", "120") as server, client(server) as http:
        yield http


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_pieces(write_pooled(tmp_path_factory.mktemp("embedder") / "m", "BertModel"))


@pytest.fixture(scope="module")
def chunks(embedder: Path) -> Iterator[httpx.Client]:
    config = {"enable_chunked_processing": True, "max_embed_len": 400}
    flags = [*FLAGS, "--max-model-len", "32", "--pooler-config", json.dumps(config)]
    with serving("--model", str(embedder), *flags) as server, client(server) as http:
        yield http


def test_entities_and_redacted_texts(tags: httpx.Client, tagger: Path) -> None:
    several, pipeline = [text for text in texts(30) if text], pipeline_of(tagger)
    several = [text for text in several if len(text) < 100]
    found = post(tags, "/token_classify", {"input": several, "aggregation_strategy": "simple"})
    assert [each["index"] for each in found["data"]] == list(range(len(several)))
    for text, each in zip(several, found["data"], strict=True):
        want = plain(pipeline(text, aggregation_strategy="simple"))
        assert [(own["label"], own["start"], own["end"]) for own in each["entities"]] == [own[:3] for own in want]
        assert [own["score"] for own in each["entities"]] == pytest.approx([own[3] for own in want], abs=1e-4)
        assert all(own["text"] == text[own["start"] : own["end"]] for own in each["entities"])
        assert each.keys() == {"object", "index", "entities"}
    tokens = [len(each) for each in (Tokenizer.load(tagger).encode(text) for text in several)]
    assert found["usage"]["prompt_tokens"] == sum(tokens)
    for each, text in zip(
        post(tags, "/v1/token_classify", {"input": several, "redact": True})["data"], several, strict=True
    ):
        assert {own["label"] for own in each["entities"]} <= {"person", "place"}
        if each["entities"]:
            first = each["entities"][0]
            assert each["redacted"].startswith(text[: first["start"]] + f"<{first['label'].upper()}>")
        else:
            assert each["redacted"] == text
    labels = {own["label"] for each in found["data"] for own in each["entities"]}
    one = post(
        tags, "/token_classify", {"input": several, "aggregation_strategy": "simple", "ignore_labels": ["person"]}
    )
    assert labels - {own["label"] for each in one["data"] for own in each["entities"]} == {"person"}
    assert "O" in {own["label"] for each in one["data"] for own in each["entities"]}


def test_numbers_of_each_token_in_vllms_fields(tags: httpx.Client, tagger: Path) -> None:
    text = "Maria lives in New York."
    (want,) = token_logits(tagger, [Tokenizer.load(tagger).encode(text)])
    for body in ({"task": "token_classify"}, {}):
        rows = post(tags, "/pooling", {"input": text, **body})["data"][0]["data"]
        assert np.abs(np.array(rows) - want.softmax(1).numpy()).max() < 1e-4
    coded = post(tags, "/pooling", {"input": text, "use_activation": False, "encoding_format": "base64"})
    numbers = np.frombuffer(base64.b64decode(coded["data"][0]["data"]), "<f4").reshape(want.shape)
    assert np.abs(numbers - want.numpy()).max() < 1e-4
    binary = tags.post("/pooling", json={"input": text, "encoding_format": "bytes"})
    assert json.loads(binary.headers["metadata"])["data"][0]["shape"] == list(want.shape)
    assert post(tags, "/pooling", {"input": text, "padding": "do_not_pad"})["data"][0]["data"] == rows
    assert tags.get("/v1/models").json()["data"][0]["vllm_lite"]["tasks"] == ["token_classify"]
    invoked = post(tags, "/invocations", {"input": text})["data"][0]
    assert invoked == post(tags, "/token_classify", {"input": text})["data"][0]


def test_a_long_text_is_one_text(tags: httpx.Client, tagger: Path) -> None:
    """Windows overlap by as many tokens as a label depends on, so the entities are those of the whole text."""
    want = plain(pipeline_of(tagger)(LONG, aggregation_strategy="simple"))
    body = {"input": [LONG, "x", LONG], "aggregation_strategy": "simple", "stride": 48}
    found = post(tags, "/token_classify", body)
    first, short, last = (each["entities"] for each in found["data"])
    assert first == last
    assert len(short) <= 1
    assert [(own["label"], own["start"], own["end"]) for own in first] == [own[:3] for own in want]
    num_tokens = len(Tokenizer.load(tagger).encode(LONG))
    assert num_tokens > 4 * 120
    assert found["usage"]["prompt_tokens"] == 2 * num_tokens + 1
    rows = post(tags, "/pooling", {"input": LONG})["data"][0]["data"]
    assert len(rows) == num_tokens
    short = post(tags, "/pooling", {"input": LONG, "truncate_prompt_tokens": -1})["data"][0]["data"]
    assert len(short) == 120


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/token_classify", {"input": ""}, 400, "the text is empty"),
        ("/token_classify", {"input": []}, 400, "length >= 1"),
        ("/token_classify", {"input": [1, 2]}, 400, "str"),
        ("/token_classify", {"input": "x", "aggregation_strategy": "last"}, 400, "aggregation_strategy"),
        ("/token_classify", {"input": "x", "stride": 61}, 400, "stride must be between 0 and 60, got 61"),
        ("/token_classify", {"input": "x", "stride": -1}, 400, ">= 0"),
        ("/token_classify", {"input": "x", "truncate_prompt_tokens": 3}, 400, "does not go with entities"),
        ("/token_classify", {"input": "x", "aggregation_strategy": "none", "redact": True}, 400, "redact needs"),
        ("/token_classify", {"input": "ab " * 300_000}, 400, "maximum context length is 131072 tokens"),
        ("/pooling", {"input": [[5] * 121]}, 400, "maximum context length is 120 tokens, but the text has 121"),
        ("/pooling", {"input": "x", "padding": "max_length"}, 400, "padding is not supported by this server"),
        ("/pooling", {"input": "x", "padding": "longest"}, 400, "padding"),
        ("/pooling", {"input": "x", "task": "plugin"}, 400, "the task 'plugin' is not supported"),
        ("/pooling", {"input": "x", "task": "embed"}, 400, "it can be asked to token_classify"),
        ("/classify", {"input": "x"}, 404, "this model classifies no texts: it can be asked to token_classify"),
        (
            "/score",
            {"text_1": "x", "text_2": "y"},
            404,
            "this model scores no pairs: it can be asked to token_classify",
        ),
        ("/v1/score", {"text_1": "x", "text_2": "y"}, 404, "this model scores no pairs"),
        ("/rerank", {"query": "x", "documents": ["y"]}, 404, "this model scores no pairs"),
        ("/v2/rerank", {"query": "x", "documents": ["y"]}, 404, "this model scores no pairs"),
    ],
)
def test_invalid_requests_are_refused(
    tags: httpx.Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    error = post(tags, path, body, status)["error"]
    assert message in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(("field", "value"), [("stride", 61), ("truncate_prompt_tokens", 3)])
def test_the_refused_field_is_named(tags: httpx.Client, field: str, value: int) -> None:
    assert post(tags, "/token_classify", {"input": "x", field: value}, 400)["error"]["param"] == field


def test_vectors_of_chunked_texts(chunks: httpx.Client, embedder: Path) -> None:
    """The mean of the chunks' vectors, weighted by their tokens; each chunk has the special tokens of a text."""
    tokenizer = Tokenizer.load(embedder)
    long = "Maria lives in New York of the " * 13
    ids = tokenizer.encode(long)
    own = ids[1:-1]
    parts = [[ids[0], *own[start : start + 30], ids[-1]] for start in range(0, len(own), 30)]
    assert len(parts) > 3
    assert len(parts[-1]) < 32
    each = vectors(embedder, parts, "cls")
    weights = torch.tensor([float(len(part)) for part in parts])
    want = torch.nn.functional.normalize((weights[:, None] * each).sum(0) / weights.sum(), dim=0).numpy()
    found = post(chunks, "/v1/embeddings", {"input": ["x", long, "maria"]})
    assert np.abs(np.array(found["data"][1]["embedding"]) - want).max() < 1e-5
    (short,) = vectors(embedder, [tokenizer.encode("maria")], "cls").numpy()
    assert np.abs(np.array(found["data"][2]["embedding"]) - short).max() < 1e-5
    assert found["usage"]["prompt_tokens"] == 3 + len(ids) + 3
    raw = vectors(embedder, [ids[start : start + 32] for start in range(0, len(ids), 32)], "cls", lambda own: own)
    lengths = torch.tensor([float(min(32, len(ids) - start)) for start in range(0, len(ids), 32)])
    plain_mean = ((lengths[:, None] * raw).sum(0) / lengths.sum()).numpy()
    given = post(chunks, "/v1/embeddings", {"input": [ids], "use_activation": False})["data"][0]["embedding"]
    assert np.abs(np.array(given) - plain_mean).max() < 1e-4, "token ids are taken as they are"
    error = post(chunks, "/v1/embeddings", {"input": "new york " * 300}, 400)["error"]["message"]
    assert "maximum context length is 400 tokens" in error
    error = post(chunks, "/pooling", {"input": long, "task": "token_embed"}, 400)["error"]["message"]
    assert "maximum context length is 32 tokens" in error
    cut = post(chunks, "/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 32
    assert post(chunks, "/token_classify", {"input": "x"}, 404)["error"]["message"].startswith(
        "this model classifies no tokens: it can be asked to embed or token_embed"
    )
