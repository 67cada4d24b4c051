"""Models of several families behind `vllm-lite serve`, as processes: OpenAI's calls, a worker killed during a stream, a
replayed trace, ranks, drafts, and transformers' code. Tokens equal transformers'."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.deadlines import scaled
from tests.e2e.reference import TIE, Case, Reference, make_prompts
from tests.families.all import VARIANTS
from tests.http_server import Server, children, client, serving
from vllm_lite.checkpoint.config_json import load_spec

BY_NAME = {variant.name: variant for variant in VARIANTS}
SMALL = ("--dtype", "float32", "--cpu-threads", "1", "--num-gpu-blocks-override", "300")
LONG = 400
"""Tokens of a stream that is to be running still when its worker has been killed."""


def made(folder: Path, name: str) -> tuple[Path, Case]:
    """The checkpoint of a variant, and transformers' output for a prompt without ties."""
    path = BY_NAME[name].make(folder / name)
    cases = map(Reference(path).generate, make_prompts([45] * 10))
    return path, next(case for case in cases if min(case.margins) > TIE)


def body(case: Case, **others: Any) -> dict[str, Any]:
    usual = {"prompt": case.prompt, "max_tokens": len(case.tokens), "temperature": 0, "ignore_eos": True}
    return usual | {"return_token_ids": True} | others


def completed(http: httpx.Client, asked: dict[str, Any]) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(http: httpx.Client, asked: dict[str, Any]) -> Iterator[list[int]]:
    """The token ids of every event."""
    with http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    yield choice.get("token_ids") or []


class Served(NamedTuple):
    path: Path
    case: Case
    server: Server
    trace: Path


@pytest.fixture(scope="module", params=["gpt2", "gemma3"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """One with learned positions, and one with several groups of KV blocks."""
    with tempfile.TemporaryDirectory(prefix="vl") as folder:
        path, case = made(Path(folder), request.param)
        trace = Path(folder) / "trace"
        with serving(str(path), *SMALL, "--record", str(trace)) as server:
            yield Served(path, case, server, trace)


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with client(served.server) as connected:
        yield connected


def test_the_maximum_length_of_each_family_is_served(served: Served, http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["max_model_len"] == load_spec(served.path).max_position_embeddings


def test_completions_match_transformers(served: Served, http: httpx.Client) -> None:
    case = served.case
    choice = completed(http, body(case, logprobs=2))
    assert choice["token_ids"] == case.tokens
    theirs = case.logits.log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(theirs, case.tokens, strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=2e-4)
    assert list(chain(*streamed(http, body(case)))) == case.tokens


def test_a_streamed_chat_equals_the_whole_one(http: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "One, two"}], "temperature": 0, "max_tokens": 20}
    whole = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    with http.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(pieces) == whole


def test_a_form_and_two_samples(served: Served, http: httpx.Client) -> None:
    form = {"max_tokens": 20, "temperature": 1, "seed": 3, "structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", completed(http, body(served.case, **form, ignore_eos=False))["text"])
    answer = http.post("/v1/completions", json=body(served.case, n=2, temperature=1, seed=4)).json()
    one, other = (choice["token_ids"] for choice in answer["choices"])
    assert one != other


def test_a_stream_continues_when_the_worker_is_killed(served: Served, http: httpx.Client) -> None:
    asked = body(served.case, max_tokens=LONG)
    whole = completed(http, asked)["token_ids"]
    pid = children(served.server.process.pid)["vllm_lite.worker.process"]
    events = streamed(http, asked)
    tokens = next(events)
    os.kill(pid, signal.SIGKILL)
    assert list(chain(tokens, *events)) == whole
    served.server.wait_for(f"(pid {pid}) died: killed by SIGKILL")


def test_the_trace_of_each_family_replays(served: Served) -> None:
    """The last test of a server: it ends it."""
    assert served.server.stop() == 0
    assert run("replay", str(served.trace), "--assert").returncode == 0


NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-m", "vllm_lite", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("opt", ["--model-impl", "transformers"]),
        ("bloom", ["-tp", "2", "--speculative-config", NGRAM, "--disable-adaptive-drafts"]),
    ],
)
def test_other_ways_give_the_same_tokens(name: str, flags: list[str], tmp_path: Path) -> None:
    path, case = made(tmp_path, name)
    with serving(str(path), *SMALL, *flags) as server, client(server) as http:
        assert completed(http, body(case))["token_ids"] == case.tokens
        words = "(transformers)" if "transformers" in flags else "(native)"
        assert words in server.output


def test_more_than_the_learned_positions_is_one_sentence(tmp_path: Path) -> None:
    path = BY_NAME["gpt2-unscaled"].make(tmp_path / "model")
    done = run("serve", str(path), "--max-model-len", "257")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["vllm-lite: max_model_len must be at most the model's 256 positions, got 257"]
