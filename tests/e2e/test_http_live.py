"""GET /v1/live of a really running server: numbers are those of /metrics, and strangers see nothing."""

import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deadlines import scaled
from tests.http_server import Server, client, serving
from vllm_lite.errors import RemoteError
from vllm_lite.tools.top.watched import ServerLook, watched

ADMIN, USER = "an-admins-key", "a-users-key"
SAME = {
    "num_running": "vllm:num_requests_running",
    "num_waiting": "vllm:num_requests_waiting",
    "num_blocks": "vllm_lite:kv_blocks",
    "num_used_blocks": "vllm_lite:kv_blocks_used",
    "num_cached_blocks": "vllm_lite:kv_blocks_cached",
    "generated_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prompt_tokens_cached_total",
    "preemptions": "vllm:num_preemptions_total",
    "steps": "vllm_lite:steps_total",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--num-gpu-blocks-override", "200", "--max-num-seqs", "2") as running:
        yield running


@contextmanager
def watching(http: httpx.Client, **headers: str) -> Iterator[Iterator[ServerLook]]:
    with http.stream("GET", "/v1/live", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield watched(answer.iter_lines())


def rows(looks: Iterator[ServerLook]) -> dict[str, dict[str, Any]]:
    """The requests of the next look, by the ids under which users know them."""
    return {row["id"]: row for row in next(looks).engines["0"].requests.values()}


def test_requests_are_seen_and_why_they_wait(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 2}
    with client(server) as http, watching(http) as looks:
        with ExitStack() as streams:
            for number in range(4):
                streams.enter_context(http.stream("POST", "/v1/completions", json=body | {"request_id": f"s{number}"}))
            seen = rows(looks)
            while not any(row["reason"] == "waits_for_seat" for row in seen.values()):
                seen = rows(looks)
            waiting = next(row for row in seen.values() if row["reason"] == "waits_for_seat")
            assert waiting["why"] == "all places in the batch are taken (--max-num-seqs)"
            running = next(row for row in seen.values() if row["state"] == "running")
            assert running["reason"] is None
            assert len(running["table"]) == running["blocks"] > 0
            assert set(seen) <= {f"cmpl-s{number}" for number in range(4)}
        while rows(looks):
            pass


def test_numbers_are_those_of_metrics(server: Server) -> None:
    with client(server) as http:
        http.post(
            "/v1/completions", json={"prompt": "Once upon a time there was a", "max_tokens": 20}
        ).raise_for_status()
        with watching(http) as looks:
            next(looks)  # the latest look, which others may have had
            engine = next(looks).engines["0"].head
        families = text_string_to_metric_families(http.get("/metrics").text)
        values = {sample.name: sample.value for family in families for sample in family.samples}
        assert {name: engine["counts"][name] for name in SAME} == {name: values[said] for name, said in SAME.items()}
        total, count = engine["times"]["first_token_s"]
        assert count == values["vllm:time_to_first_token_seconds_count"] > 0
        assert total == pytest.approx(values["vllm:time_to_first_token_seconds_sum"], abs=1e-5)


def test_pages_of_others_see_nothing(server: Server) -> None:
    with client(server) as http:
        for headers in (
            {"origin": "http://localhost:3000"},
            {"sec-fetch-site": "cross-site"},
            {"x-forwarded-for": "1"},
        ):
            answer = http.get("/v1/live", headers=headers)
            assert answer.status_code == 403, headers
            assert "closed to" in answer.json()["error"]["message"]
        with watching(http, **{"sec-fetch-site": "same-origin"}) as looks:
            assert next(looks).engines, "the page of the server itself"


def test_settings_are_those_of_the_command(server: Server) -> None:
    with client(server) as http:
        said = http.get("/v1/live/settings").json()
        assert http.get("/v1/live/settings", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert "--num-gpu-blocks-override 200" in said["command"]
    assert "--max-num-seqs 2" in said["command"]
    assert (said["computed"]["max_num_seqs"], said["computed"]["device"]) == (2, "cpu")


def test_top_prints_a_look(server: Server) -> None:
    command = [sys.executable, "-m", "vllm_lite", "top", "--url", server.url, "--once"]
    run = {"capture_output": True, "text": True, "timeout": scaled(60), "check": True}
    text = subprocess.run(command, **run).stdout  # type: ignore[call-overload]
    assert "demo_model  serving" in text
    assert "of 199 KV blocks" in text
    shown = json.loads(subprocess.run([*command, "--json"], **run).stdout)  # type: ignore[call-overload]
    assert shown["engines"]["0"]["counts"]["num_blocks"] == 199


def test_with_keys_an_admin_sees_all_and_a_user_nothing() -> None:
    with serving("--api-key", USER, "--admin-api-key", ADMIN) as server, client(server) as http:
        assert http.get("/v1/live").status_code == 401
        assert http.get("/v1/live/settings").status_code == 401
        settings = http.get("/v1/live/settings", headers={"authorization": f"Bearer {ADMIN}"})
        assert settings.status_code == 200
        assert not any(key in settings.text for key in (USER, ADMIN))
        refused = http.get("/v1/live", headers={"authorization": f"Bearer {USER}", "sec-fetch-site": "same-origin"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (403, "this needs an admin key")
        with watching(http, authorization=f"Bearer {ADMIN}") as looks:
            assert next(looks).engines
            server.process.terminate()
            with pytest.raises(RemoteError, match="the server has ended"):
                deque(looks, maxlen=0)
        assert server.wait() == 0
