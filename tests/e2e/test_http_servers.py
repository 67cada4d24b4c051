"""Several API servers behind one address: one engine, one port, and each server finds every request."""

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest

from tests.deadlines import patience, scaled
from tests.e2e.light_worker import STEP_S
from tests.http_server import READY_S, Server, children, client, serving, until

MODULE = "vllm_lite.server.processes.http_server"
KEY = {"Authorization": "Bearer key"}
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
PACED: dict[str, Any] = {"env": {STEP_S: "0.005"}, "light": True}
"""A server whose steps take time, so that tests can look at requests while they run."""
DEADLINE_S = scaled(30.0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = ["--api-key", "key", "--num-gpu-blocks-override", "4096", "--log-stats-interval-s", "0.2"]
    with serving("--api-server-count", "2", *settings, **PACED) as server:
        yield server


class Both:
    """A connection to each of two servers. The kernel chooses the server of a connection, so connections are opened
    until both servers have one."""

    def __init__(self, server: Server) -> None:
        self._stack = ExitStack()
        self.of: dict[int, httpx.Client] = {}
        for _ in range(200):
            http = client(server, headers=KEY)
            number = http.get("/load").json()["server"]
            if number in self.of:
                http.close()
            else:
                self.of[number] = http
                self._stack.callback(http.close)
            if len(self.of) == 2:
                return
        raise AssertionError(f"only {list(self.of)} answer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def load_of(server: Server) -> dict[str, Any]:
    load: dict[str, Any] = httpx.get(server.url + "/load", headers=KEY, timeout=DEADLINE_S).json()
    assert load["server_load"] == sum(load["servers"])
    return load


def test_ready_is_said_once_when_all_are(server: Server) -> None:
    assert server.output.count("ready at") == 1
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert sum(MODULE in child.cmdline() for child in family) == 1


def test_only_the_engine_logs_its_statistics(server: Server) -> None:
    assert "tokens/s" not in server.output, "nothing ran yet"
    with Both(server) as both:
        for http in both.of.values():
            http.post("/v1/completions", json=LONG | {"max_tokens": 20}).raise_for_status()
    server.wait_for("Avg generation throughput: 0.0 tokens/s, Running: 0 reqs")
    lines = [line for line in server.output.splitlines() if "tokens/s" in line]
    assert {line.split()[1] for line in lines} == {"engine"}
    assert "Prefix cache hit rate: " in lines[-1]


async def test_requests_are_spread_over_both(server: Server) -> None:
    """Each of 30 requests has a separate connection; /load counts the requests of each server."""
    asking = httpx.AsyncClient(base_url=server.url, headers=KEY, timeout=DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S), asking as http:

        async def one(place: int) -> str:
            body = {**LONG, "max_tokens": 60, "temperature": 1, "seed": place}
            answer = await http.post("/v1/completions", json=body)
            return str(answer.json()["choices"][0]["text"])

        running = [asyncio.ensure_future(one(place)) for place in range(30)]
        most: list[int] = []
        while not all(each.done() for each in running):
            most = max(most, (await http.get("/load")).json()["servers"], key=sum)
        assert len(set(await asyncio.gather(*running))) == 30
    assert len(most) == 2
    assert min(most) > 0


@pytest.mark.parametrize("owner", [0, 1])
def test_every_request_is_found_from_the_other(server: Server, owner: int) -> None:
    with Both(server) as both:
        http, other = both.of[owner], both.of[1 - owner]
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True, "request_id": "mine"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            state = other.get("/v1/requests/cmpl-mine").json()
            assert (state["id"], state["state"]) == ("cmpl-mine", "running")
            load = other.get("/load").json()
            assert (load["server"], load["servers"][owner]) == (1 - owner, 1)
            assert other.post("/v1/completions", json={**LONG, "request_id": "mine"}).status_code == 409
            with other.stream("POST", "/v1/requests/cmpl-mine/fork", json={"n": 2, "stream": True}) as branches:
                assert branches.headers["content-type"].startswith("text/event-stream")
                pieces = branches.iter_lines()
                assert '"id":"cmpl-' in next(pieces)
                assert load_of(server)["servers"] == [1, 1]  # forks run where they were asked for
            until(lambda: load_of(server)["server_load"] == 1, "the end of branches whose client has gone")
            refused = other.post("/v1/requests/cmpl-mine/fork", json={"max_tokens": 1})
            assert refused.status_code == 400
            assert "max_tokens counts" in refused.json()["error"]["message"]
            assert other.delete("/v1/requests/cmpl-mine").json()["deleted"] is True
            assert '"finish_reason":"abort"' in "".join(lines)
        for each in (http, other):
            gone = each.get("/v1/requests/cmpl-mine")
            assert gone.status_code == 404
            assert "no request 'cmpl-mine' is running" in gone.json()["error"]["message"]
        strange = other.get("/v1/requests/..%2F..%2Fload%3Fa")
        assert strange.status_code == 404


FORKED: dict[str, tuple[str, dict[str, Any]]] = {
    "cmpl-a": ("/v1/completions", {**LONG, "logprobs": 1, "echo": True}),
    "cmpl-b": ("/v1/completions", {**LONG, "prompt_logprobs": 1}),
    "chatcmpl-c": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}),
    "gen-d": ("/inference/v1/generate", {"token_ids": [5, 6, 7]}),
}


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a decoded answer, in order."""
    if isinstance(value, (int, float)):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers(each)


@pytest.mark.parametrize("call_id", FORKED)
def test_forks_are_the_same_from_both(server: Server, call_id: str) -> None:
    """Greedy forks continue like the request itself, with its logprobs from the first token on."""
    path, body = FORKED[call_id]
    params = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
    body = {**body, "request_id": call_id[-1], **({"sampling_params": params} if call_id == "gen-d" else params)}
    with Both(server) as both, client(server, headers=KEY) as third:
        running = threading.Thread(target=both.of[0].post, args=(path,), kwargs={"json": body})
        running.start()

        def has_begun() -> bool:
            assert running.is_alive()
            state = third.get(f"/v1/requests/{call_id}").json()
            return "usage" in state and state["usage"]["completion_tokens"] > 2

        until(has_begun, "tokens of the request")
        fork = partial(httpx.Client.post, url=f"/v1/requests/{call_id}/fork", json={"max_tokens": 350})
        with ThreadPoolExecutor() as threads:
            answers = [answer.json() for answer in threads.map(fork, (both.of[0], both.of[1]))]
        running.join(DEADLINE_S)
    (choice,), (other,) = (answer["choices"] for answer in answers)
    scores = list(numbers(choice)), list(numbers(other))
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)  # the two were not in the same steps
    for name in ("text", "message", "token_ids", "finish_reason"):
        assert choice.get(name) == other.get(name), answers
    assert (choice["finish_reason"], answers[0]["usage"]["completion_tokens"]) == ("length", 350)
    if call_id == "cmpl-a":
        assert choice["text"].startswith(LONG["prompt"])
        assert len(choice["logprobs"]["token_logprobs"]) == answers[0]["usage"]["total_tokens"]
    if call_id == "cmpl-b":
        assert len(choice["prompt_logprobs"]) == answers[0]["usage"]["prompt_tokens"]
    if call_id == "chatcmpl-c":
        assert len(choice["logprobs"]["content"]) == 350


def test_both_know_the_prompts_of_a_list_that_have_ended(server: Server) -> None:
    """As long as another one runs. The first prompt leaves room for 8 tokens."""
    body = {**LONG, "prompt": [[5] * 2040, [6] * 10], "stream": True, "request_id": "list"}
    with Both(server) as both, both.of[0].stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if '"finish_reason":"length"' in line)
        states = [both.of[1].get("/v1/requests/cmpl-list").json() for _ in range(2)]
        for state in states:
            ended, live = state["prompts"]
            assert ended == {"state": "finished", "prompt_tokens": 2040, "completion_tokens": 8, "priority": 0}
            assert (live["state"], live["prompt_tokens"]) == ("running", 10)
            assert state["usage"]["prompt_tokens"] == 2050
            assert state["usage"]["completion_tokens"] == 8 + live["completion_tokens"]
        assert both.of[1].delete("/v1/requests/cmpl-list").json()["deleted"] is True
        assert '"finish_reason":"abort"' in "".join(lines)


def test_a_unix_socket_has_several_servers_too() -> None:
    with tempfile.TemporaryDirectory(prefix="vl") as folder:
        server = Server("--api-server-count", "2", "--uds", f"{folder}/s", env={"TMPDIR": folder}, light=True)
        try:
            server.wait_for("Try:")
            (run_dir,) = (path for path in Path(folder).iterdir() if path.is_dir())
            assert run_dir.stat().st_mode & 0o077 == 0
            transport = httpx.HTTPTransport(uds=f"{folder}/s")
            with httpx.Client(transport=transport, base_url="http://server", timeout=DEADLINE_S) as http:
                answer = http.post("/v1/completions", json={**LONG, "max_tokens": 3})
                assert answer.json()["usage"]["completion_tokens"] == 3
                assert http.get("/load").json()["servers"] == [0, 0]
            assert server.stop() == 0
        finally:
            server.close()
        assert list(Path(folder).iterdir()) == []


def test_a_server_that_is_killed_is_replaced_and_the_others_continue(server: Server) -> None:
    with Both(server) as both, ExitStack() as stack:
        body = {**LONG, "stream": True, "max_tokens": 300}
        mine = stack.enter_context(both.of[0].stream("POST", "/v1/completions", json=body)).iter_lines()
        lost = stack.enter_context(both.of[1].stream("POST", "/v1/completions", json=body)).iter_lines()
        assert next(mine)
        assert next(lost)
        os.kill(children(server.process.pid)[MODULE], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lost)
        text = "".join(mine)
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]")
    server.wait_for("API server 1 ended (killed by SIGKILL); it is started again")
    with Both(server) as both:  # connections that arrive meanwhile wait, and are not refused
        for http in both.of.values():
            assert http.post("/v1/completions", json={**LONG, "max_tokens": 3}).status_code == 200
    until(lambda: load_of(server)["server_load"] == 0, "the end of all requests")
    assert server.output.count("ready at") == 1


def test_a_server_that_hangs_is_replaced_and_the_others_continue() -> None:
    silence = f"{patience(2.0):.1f}"  # the others are not to be taken for hung
    keys, admin = ["--api-key", "key", "--admin-api-key", "admin"], {"Authorization": "Bearer admin"}
    flags = ["--api-server-count", "2", "--heartbeat-timeout-s", silence, *keys]
    with serving(*flags, light=True) as server:
        with Both(server) as both, ExitStack() as stack:
            body = {**LONG, "stream": True}
            mine = stack.enter_context(both.of[0].stream("POST", "/v1/completions", json=body)).iter_lines()
            lost = stack.enter_context(both.of[1].stream("POST", "/v1/completions", json=body)).iter_lines()
            assert next(mine)
            assert next(lost)
            # Both streams have to be running until one of the servers has been replaced.
            paused = httpx.post(server.url + "/pause", params={"mode": "keep"}, headers=admin, timeout=DEADLINE_S)
            assert paused.status_code == 200
            os.kill(children(server.process.pid)[MODULE], signal.SIGSTOP)
            with pytest.raises(httpx.TransportError):
                list(lost)
            server.wait_for(f"API server 1 has not answered for {float(silence):g} s; it is killed")
            server.wait_for("API server 1 ended (killed by SIGKILL); it is started again")
            assert httpx.post(server.url + "/resume", headers=admin, timeout=DEADLINE_S).status_code == 200
            text = "".join(mine)
        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]")
        with Both(server) as both:
            for http in both.of.values():
                assert http.post("/v1/completions", json={**LONG, "max_tokens": 3}).status_code == 200


def test_sigterm_drains_all(tmp_path: Path) -> None:
    """The first one has done its part long before the other."""
    num_tokens = {0: 100, 1: 400}
    flags = ["--api-server-count", "2", "--shutdown-timeout", str(scaled(60)), "--api-key", "key"]
    env = PACED["env"] | {"TMPDIR": str(tmp_path)}
    with serving(*flags, env=env, light=True) as server, Both(server) as both:
        answers: dict[int, httpx.Response] = {}

        def ask(number: int) -> None:
            answers[number] = both.of[number].post("/v1/completions", json={**LONG, "max_tokens": num_tokens[number]})

        asking = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
        for thread in asking:
            thread.start()
        until(lambda: load_of(server)["servers"] == [1, 1], "the requests")
        server.process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(DEADLINE_S)
        assert server.wait() == 0
        for number in (0, 1):
            answer = answers[number].json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == num_tokens[number]
        assert "Traceback" not in server.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("whose", ["first server", "engine"])
def test_all_end_together(whose: str) -> None:
    with serving("--api-server-count", "3", "--max-restarts", "0", light=True) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert sum(MODULE in child.cmdline() for child in family) == 2
        found = children(server.process.pid)
        os.kill(server.process.pid if whose == "first server" else found["vllm_lite.engine.process"], signal.SIGKILL)
        _, left = psutil.wait_procs(family, timeout=scaled(5.0))
        assert left == []
        assert server.wait() == (-signal.SIGKILL if whose == "first server" else 1)
        assert "Traceback" not in server.output


def test_a_taken_port_is_refused(server: Server) -> None:
    port = server.url.rsplit(":", 1)[1]
    second = Server("--api-server-count", "2", "--port", port)
    try:
        assert second.process.wait(READY_S) == 2
    finally:
        second.close()
    assert f"cannot listen on 127.0.0.1:{port}" in second.output
