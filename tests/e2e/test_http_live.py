"""GET /v1/live of a running server: its numbers are those of /metrics, and clients without a key see nothing."""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import httpx
import pytest

from tests.deadlines import scaled
from tests.http_server import Server, client, serving, until
from tests.live_numbers import COUNTS, TIMES, counts_of, mean_ms, metrics_of
from vllm_lite.errors import RemoteError
from vllm_lite.kernels.cpu import library
from vllm_lite.server.live import snapshot
from vllm_lite.tools.top.watched import ServerLook, events, looks

ADMIN, USER = "an-admins-key", "a-users-key"


NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--num-gpu-blocks-override", "200", "--max-num-seqs", "2") as running:
        yield running


@contextmanager
def watching(http: httpx.Client, **headers: str) -> Iterator[Iterator[ServerLook]]:
    with http.stream("GET", "/v1/live", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield looks(events(answer.iter_lines()))


def rows(looks: Iterator[ServerLook]) -> dict[str, dict[str, Any]]:
    """The requests of the next look, by the ids under which users know them."""
    return {row["id"]: row for row in next(looks).engines["0"].requests.values()}


def rows_once(looks: Iterator[ServerLook], holds: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, Any]:
    """The requests of the first look of which this holds."""
    deadline_s = time.monotonic() + scaled(60)
    while not holds(seen := rows(looks)):
        assert time.monotonic() < deadline_s, seen
    return seen


@contextmanager
def busy(server: Server, count: int) -> Iterator[None]:
    """So many requests at any time: a new one for each that ends, until all are aborted."""
    body = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    is_over = threading.Event()

    def ask() -> None:
        with client(server) as one:
            while not is_over.is_set():
                asked = body | {"request_id": f"b{next(NUMBERS)}"}
                with one.stream("POST", "/v1/completions", json=asked) as answer:
                    deque(takewhile(lambda _: not is_over.is_set(), answer.iter_lines()), maxlen=0)

    asking = [threading.Thread(target=ask) for _ in range(count)]
    for thread in asking:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in asking:
            thread.join(scaled(60))


def test_requests_are_seen_and_why_they_wait(server: Server) -> None:
    with client(server) as http, watching(http) as looks:
        with busy(server, 4):
            seen = rows_once(looks, lambda seen: any(row["reason"] == "waits_for_row" for row in seen.values()))
            waiting = next(row for row in seen.values() if row["reason"] == "waits_for_row")
            assert waiting["why"] == "all rows of the batch are taken (--max-num-seqs)"
            running = next(row for row in seen.values() if row["state"] == "running")
            assert running["reason"] is None
            assert len(running["table"]) == running["blocks"] > 0
            assert all(name.startswith("cmpl-b") for name in seen)
        rows_once(looks, lambda seen: not seen)


def test_numbers_match_metrics(server: Server) -> None:
    assert COUNTS.keys() == set(snapshot.COUNTS)
    assert TIMES.keys() == set(snapshot.TIMES)
    with client(server) as http:
        http.post(
            "/v1/completions", json={"prompt": "Once upon a time there was a", "max_tokens": 20}
        ).raise_for_status()
        with watching(http) as looks:
            next(looks)  # the latest look, which others may have had
            engine = next(looks).engines["0"].head
        text = http.get("/metrics").text
    assert engine["counts"] == counts_of(text)
    assert engine["counts"]["generated_tokens"] >= 20
    values = metrics_of(text)
    for name, (total, count) in engine["times"].items():
        assert count == values[f"{TIMES[name]}_count"] > 0, name
        assert total == pytest.approx(values[f"{TIMES[name]}_sum"], abs=1e-5), name


@contextmanager
def paused(server: Server, http: httpx.Client, count: int) -> Iterator[list[str]]:
    """A number of requests, some running and some waiting, in a paused server. Yields their ids."""
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}
    names = [f"cmpl-p{next(NUMBERS)}" for _ in range(count)]  # ids of the previous test may be in use for a moment

    def ask(name: str) -> None:
        with client(server) as one:
            one.post("/v1/completions", json=body | {"request_id": name.removeprefix("cmpl-")})

    asked = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in asked:
        thread.start()
    until(lambda: all(http.get(f"/v1/requests/{name}").is_success for name in names), "all requests")
    http.post("/pause?mode=keep").raise_for_status()
    try:
        yield names
    finally:
        for name in names:
            http.delete(f"/v1/requests/{name}")
        http.post("/resume").raise_for_status()
        for thread in asked:
            thread.join(scaled(60))


def ids(look: ServerLook) -> set[str]:
    return {row["id"] for engine in look.engines.values() for row in engine.requests.values()}


def test_rows_are_what_descriptions_say(server: Server) -> None:
    """On /v1/live and in `top`."""
    with client(server) as http, paused(server, http, 4) as names:
        with watching(http) as looks:
            next(looks)
            found = rows(looks)
        command = [sys.executable, "-m", "vllm_lite", "top", "--url", server.url, "--once"]
        env = {**os.environ, "COLUMNS": "200", "LINES": "60"}
        run = {"capture_output": True, "text": True, "timeout": scaled(60), "check": True, "env": env}
        text = subprocess.run(command, **run).stdout  # type: ignore[call-overload]
        for name in names:
            said, row = http.get(f"/v1/requests/{name}").json(), found[name]
            [prompt] = said["prompts"]
            [sample] = prompt["samples"]
            assert row["state"] == said["state"]
            assert (row["prompt"], row["output"]) == (prompt["prompt_tokens"], prompt["completion_tokens"])
            assert (row["cached"], row["preemptions"]) == (prompt["cached_tokens"], prompt["preemptions"])
            assert (row["computed"], row["place"]) == (sample["computed_tokens"], sample["place_in_queue"])
            assert (row["blocks"], row["host_blocks"]) == (sample["blocks"], sample["host_blocks"])
            assert row["reason"] == said["admission"]["reason"]
            shown = next(line.split() for line in text.splitlines() if line.startswith(name))
            figures = [row[field] for field in ("state", "prompt", "cached", "output", "blocks")]
            assert shown[1:6] == list(map(str, figures)), shown
        states = {row["state"] for row in found.values()}
        assert "waiting" in states
        assert states <= {"running", "waiting", "preempted"}, "blocks do not suffice for two whole answers"
        counts = counts_of(http.get("/metrics").text)
        assert f"{counts['num_used_blocks']:.0f} of 199 KV blocks, {counts['num_cached_blocks']:.0f} cached" in text
        means = re.search(r"first token ([\d.,]+) ms, next ([\d.,]+) ms, queue ([\d.,]+) ms", text)
        assert means
        metrics = http.get("/metrics").text
        for shown_ms, name in zip(means.groups(), TIMES, strict=True):
            assert shown_ms == f"{mean_ms(metrics, name):,.1f}", name
        share = counts["cached_tokens"] / counts["prompt_tokens"]
        assert f"{share:.0%} of prompts cached" in text


def test_several_servers_and_engines_are_shown_together() -> None:
    flags = ("-dp", "2", "--api-server-count", "2", "--num-gpu-blocks-override", "200", "--max-num-seqs", "1")
    with serving(*flags) as server, client(server) as http, paused(server, http, 6) as names:
        for _ in range(4):  # each may come to another API server
            with client(server) as other, watching(other) as looks:
                next(looks)
                look = next(looks)
                assert ids(look) == set(names)
                assert sorted(look.engines) == ["0", "1"]
                assert all(engine.requests for engine in look.engines.values())
            metrics = http.get("/metrics").text
            for number, engine in look.engines.items():
                assert engine.head["counts"] == counts_of(metrics, engine=number), number
        command = [sys.executable, "-m", "vllm_lite", "top", "--url", server.url, "--once"]
        run = {"capture_output": True, "text": True, "timeout": scaled(60), "check": True}
        text = subprocess.run(command, env={**os.environ, "LINES": "40"}, **run).stdout  # type: ignore[call-overload]
        assert "demo_model [0]  paused" in text
        assert "demo_model [1]  paused" in text


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


def test_a_block_is_known_by_its_hash(server: Server) -> None:
    with client(server) as http, paused(server, http, 1) as (name,):
        with watching(http) as looks:
            next(looks)
            block = rows(looks)[name]["table"][0]
        said = http.get(f"/v1/live/blocks/{block}?engine=0").json()
        assert (said["block"], said["references"], said["tiers"]) == (block, 1, ["device"] if said["hash"] else [])
        for path, status in (("200", 404), ("1?engine=1", 404), ("1?engine=-1", 400), ("9" * 5000, 400), ("x", 400)):
            assert http.get(f"/v1/live/blocks/{path}").status_code == status, path
        assert http.get(f"/v1/live/blocks/1?engine={'1' * 5000}").status_code == 400
        assert http.get("/v1/live/blocks/1", headers={"sec-fetch-site": "cross-site"}).status_code == 403


def test_settings_match_the_command(server: Server) -> None:
    with client(server) as http:
        said = http.get("/v1/live/settings").json()
        assert http.get("/v1/live/settings", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert "--num-gpu-blocks-override 200" in said["command"]
    assert "--max-num-seqs 2" in said["command"]
    assert (said["computed"]["max_num_seqs"], said["computed"]["device"]) == (2, "cpu")
    assert said["kernels"]["instruction set"] in library.ISAS
    assert "bfloat16" in said["kernels"]["matrices"]


def test_top_prints_a_look(server: Server) -> None:
    command = [sys.executable, "-m", "vllm_lite", "top", "--url", server.url, "--once"]
    run = {"capture_output": True, "text": True, "timeout": scaled(60), "check": True}
    text = subprocess.run(command, **run).stdout  # type: ignore[call-overload]
    assert "demo_model  serving" in text
    assert "of 199 KV blocks" in text
    shown = json.loads(subprocess.run([*command, "--json"], **run).stdout)  # type: ignore[call-overload]
    assert shown["engines"]["0"]["counts"]["num_blocks"] == 199


def test_with_keys_an_admin_sees_all_and_a_user_nothing() -> None:
    with serving("--api-key", USER, "--admin-api-key", ADMIN, light=True) as server, client(server) as http:
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
